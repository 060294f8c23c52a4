"""Forms of products and of copies to tensor memory that others' kernels use, in the interpreter: programs by hand, and
what they mean.

No chip has run these programs. What runs on B200s with the same forms is in `make test-witnesses`.
"""

import math
import re
import struct
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from interpreter.edits import replacing
from interpreter.machine.copies import TensorMap
from interpreter.machine.handwritten import SYNC, Handwritten, wait
from interpreter.machine.hazards import Misuse, Race, Undefined
from interpreter.machine.products import InstructionDescriptor, smem_descriptor

SEEDS = range(3)
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
RNG = np.random.default_rng(0)


# ---- products


def tiled(x, mn_major=False):
    """As a descriptor without a swizzle has it: 8 rows of 16 bytes in a row; (bytes, leading, stride)."""
    x = x.T if mn_major else x
    each = 16 // x.itemsize
    blocks = x.reshape(x.shape[0] // 8, 8, x.shape[1] // each, each).transpose(0, 2, 1, 3)
    return blocks.tobytes(), 128, 128 * blocks.shape[1]


def described(start, leading, stride):
    return (start >> 4) | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46


NUMBERS = {"f16": (1, 1), "tf32": (2, 2), "f8f6f4": (0, 1), "i8": (1, 1)}  # of A's format and B's
KINDS = {"f16": (BF16, BF16), "tf32": (np.float32, np.float32), "f8f6f4": (E4M3, E5M2), "i8": (np.int8, np.int8)}


def product(kind="f16", m=128, n=64, majors=(False, False), ws=False, group=1, a_in_tmem=False, b=None):
    """(program, D of each CTA and column in the lanes where it lies): D = 2 A B'.

    Shared memory of each CTA: A and B; from + 32768 an mbarrier and the address of TMEM. A in TMEM lies from column 128
    on, and another A, the doubled one, in the lanes of the second half of the columns where these are folded.
    """
    dtypes, rng = KINDS[kind], np.random.default_rng(m + n)
    depth = 32 // np.dtype(dtypes[0]).itemsize
    rows, ctas = m // group, range(group)
    a, b = (rng.integers(-6, 7, (k, depth)).astype(dtype) for k, dtype in zip((m, n), dtypes, strict=True))
    folds = 128 // rows if ws or (group == 2 and rows == 64) else 1
    images, places = [], []
    for cta in ctas:
        image, places = b"", []
        for x, mn_major in ((a[cta * rows :][:rows], majors[0]), (b[cta * n // group :][: n // group], majors[1])):
            data, *strides = tiled(x, mn_major)
            places.append(described(len(image), *strides))
            image += data
        if a_in_tmem:  # for every lane 8 words
            lanes = np.zeros((128, 32), np.uint8)
            mine = a[cta * rows :][:rows]
            for fold in range(folds):
                lanes[fold * rows :][:rows] = (mine * (1 + fold)).astype(mine.dtype).view(np.uint8)
            if folds == 1 and rows == 64:
                lanes = np.pad(lanes[:64].reshape(4, 16, 32), ((0, 0), (0, 16), (0, 0))).reshape(128, 32)
            tmem_at, image = len(image), image + lanes.T.reshape(8, 4, 128).transpose(0, 2, 1).tobytes()
        images.append(image)
    size = -(-len(images[0]) // 512) * 512
    d_lanes = np.zeros((group, 128, n // folds))
    exact = 2 * a.astype(np.float64) @ b.astype(np.float64).T
    for cta in ctas:
        mine = exact[cta * rows :][:rows]
        for fold in range(folds):
            part = mine[:, fold * n // folds :][:, : n // folds] * (1 + fold if a_in_tmem else 1)
            if folds > 1 or rows == 128:
                d_lanes[cta, fold * rows :][:rows] = part
            else:
                d_lanes[cta].reshape(4, 32, -1)[:, :16] = part.reshape(4, 16, -1)
    number = 2 if kind == "i8" else 1
    of_a, of_b = NUMBERS[kind]
    descriptor = number << 4 | of_a << 7 | of_b << 10 | majors[0] << 15 | majors[1] << 16 | n >> 3 << 17 | m >> 4 << 24
    words = [f"%r{20 + k}" for k in range(8)]
    columns = n // folds
    targets = [f"%r{40 + k}" for k in range(columns)]
    mma = f"tcgen05.mma{'.ws' * ws}.cta_group::{group}.kind::{kind}"
    to_tmem = (
        f"""
  {" ".join(f"ld.shared.b32 {r}, [%r4+{tmem_at + 512 * k}];" for k, r in enumerate(words))}
  add.s32 %r19, %r18, 128;
  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r19], {{{", ".join(words)}}};
  tcgen05.wait::st.sync.aligned;
"""
        if a_in_tmem
        else ""
    )
    multicast = (".multicast::cluster", ", %rs1") if group == 2 else ("", "")
    body = f"""
  setp.ne.b32 %p1, %r1, 0;
  setp.ge.s32 %p2, %r1, 32;
  mov.u32 %r10, %cluster_ctarank;
  setp.ne.b32 %p3, %r10, 0;
  mov.b16 %rs1, 3;
  mul.wide.u32 %rd6, %r10, {size - 512};
  add.s64 %rd6, %rd6, %rd3;
  {" ".join(f"ld.global.b32 %r8, [%rd6+{at}]; st.shared.b32 [%r4+{at}], %r8;" for at in range(0, size, 512))}
  fence.proxy.async.shared::cta;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+32768], 1;
  fence.mbarrier_init.release.cluster;
MADE:
  @%p2 bra ALLOCATED;
  mov.b32 %r12, 256;
  tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r3+32776], %r12;
ALLOCATED:
  bar.sync 0;
  ld.shared.b32 %r13, [%r3+32776];
  and.b32 %r18, %r1, 96;
  shl.b32 %r18, %r18, 16;
  add.s32 %r18, %r18, %r13;
  {to_tmem}
  tcgen05.fence::before_thread_sync;
  {SYNC}
  tcgen05.fence::after_thread_sync;
  @%p1 bra ISSUED;
  @%p3 bra ISSUED;
  cvt.u64.u32 %rd7, %r3;
  shr.u64 %rd7, %rd7, 4;
  and.b64 %rd7, %rd7, 0x3fff;
  add.s64 %rd8, %rd7, {places[0]};
  add.s64 %rd9, %rd7, {places[1]};
  mov.b32 %r14, {descriptor};
  setp.eq.b32 %p4, %r1, 0;
  {mma} [%r13], {"[%r13+128]" if a_in_tmem else "%rd8"}, %rd9, %r14, !%p4;
  {mma} [%r13], {"[%r13+128]" if a_in_tmem else "%rd8"}, %rd9, %r14, %p4;
  add.s32 %r15, %r3, 32768;
  tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{multicast[0]}.b64 [%r15]{multicast[1]};
ISSUED:
  {wait("DONE", 32768)}
  tcgen05.fence::after_thread_sync;
  bar.warp.sync -1;
  tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{", ".join(targets)}}}, [%r18];
  tcgen05.wait::ld.sync.aligned;
  {"" if folds > 1 or rows == 128 else "and.b32 %r16, %r1, 16; setp.ne.b32 %p5, %r16, 0; @%p5 bra STORED;"}
  {" ".join(f"st.global.b32 [%rd5+{512 * group * k}], {r};" for k, r in enumerate(targets))}
STORED:
  tcgen05.fence::before_thread_sync;
  {SYNC}
  tcgen05.fence::after_thread_sync;
  @%p2 bra FREED;
  tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r13, %r12;
FREED:
"""
    source = np.frombuffer(b"".join(image.ljust(size, b"\0") for image in images), np.uint32)
    program = Handwritten(body, source, threads=128, ctas=group, cluster=group, outputs=columns, target="sm_100a")
    return program, d_lanes.reshape(group * 128, columns).T


PRODUCTS = {
    "e4m3 and e5m2": {"kind": "f8f6f4"},
    "tf32": {"kind": "tf32"},
    "int8": {"kind": "i8"},
    "A is MN-major": {"majors": (True, False)},
    "both are MN-major": {"majors": (True, True)},
    "both are MN-major, 8 bits": {"kind": "f8f6f4", "majors": (True, True)},
    "both are MN-major, tf32": {"kind": "tf32", "majors": (True, True)},
    "64 rows, A in TMEM": {"m": 64, "a_in_tmem": True},
    "ws, 128 rows": {"ws": True},
    "ws, 64 rows": {"ws": True, "m": 64, "n": 128},
    "ws, 32 rows": {"ws": True, "m": 32, "n": 128},
    "ws, 64 rows, an A in TMEM for each half of the columns": {"ws": True, "m": 64, "n": 128, "a_in_tmem": True},
    "a pair's 128 rows, an A in TMEM for each half of the columns": {"m": 128, "group": 2, "a_in_tmem": True},
    "a pair's 256 rows, A in TMEM": {"m": 256, "group": 2, "a_in_tmem": True},
}


def product_named(name):
    """(program, its words; None in lanes that it does not store)"""
    program, want = product(**PRODUCTS[name])
    words = want.astype(np.int32 if name == "int8" else np.float32).view(np.uint32)
    stored = np.arange(program.total) % 32 < (16 if name == "64 rows, A in TMEM" else 32)
    return program, np.ma.array(words, mask=np.broadcast_to(~stored, words.shape))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    program, want = product_named(name)
    for seed in SEEDS:
        np.testing.assert_array_equal(np.ma.array(program.interpret(seed), mask=want.mask), want)


def collecting(first, second, **form):
    """The two products of `product`, with these uses of the collector."""
    program, want = product(**form)
    buffer = "b1" if form.get("ws") else "a"
    uses = iter((first, second))
    body = re.sub(
        r"(tcgen05\.mma\S+)",
        lambda m: f"{m[1]}.collector::{buffer}::{use}" if (use := next(uses)) else m[1],
        program.body,
    )
    return replace(program, body=body), want


@pytest.mark.parametrize("form", ["both are MN-major", "ws, 64 rows", "a pair's 256 rows, A in TMEM"])
def test_a_collector_keeps_an_operand(form):
    for uses in (("fill", "use"), ("fill", "lastuse"), ("fill", "fill")):
        program, want = collecting(*uses, **PRODUCTS[form])
        np.testing.assert_array_equal(program.interpret().view(np.float32), want)


@pytest.mark.parametrize("first", [None, "discard", "lastuse"])
def test_a_collector_gives_nothing_that_it_has_not_kept(first):
    with pytest.raises(Misuse, match="takes an operand from collector a, which has nothing"):
        collecting(first, "use")[0].interpret()


def test_a_collector_does_not_give_another_operand():
    program, _ = collecting("fill", "use")
    second = program.body.replace("!%p4;", "!%p4;\n  add.s64 %rd8, %rd8, 16;")  # the next 256 bytes of A
    with pytest.raises(Misuse, match="takes an operand from collector a, which has another operand"):
        replace(program, body=second).interpret()


def test_an_undefined_half_of_A_makes_half_of_D_undefined():
    """The lanes 64 to 127 of A are never stored: D's upper lanes are undefined, and stored all the same."""
    program, _ = product(**PRODUCTS["ws, 64 rows, an A in TMEM for each half of the columns"])
    body = program.body.replace("tcgen05.st.sync", "setp.ge.s32 %p6, %r1, 64; @%p6 bra LEFT;\n  tcgen05.st.sync")
    body = body.replace("tcgen05.wait::st.sync.aligned;", "tcgen05.wait::st.sync.aligned;\nLEFT:")
    with pytest.raises(Undefined, match=r"^warp [23]: [^|]*which is not defined in 32 lanes"):
        replace(program, body=body).interpret()


# ---- copies to tensor memory

COPIES = {
    "128x256b": [(0,), (1,), (2,), (3,)],
    "128x128b": [(0,), (1,), (2,), (3,)],
    "64x128b.warpx2::02_13": [(0, 2), (1, 3)],
    "64x128b.warpx2::01_23": [(0, 1), (2, 3)],
    "32x128b.warpx4": [(0, 1, 2, 3)],
}


def copied(form):
    """(program, columns in all lanes)"""
    rows, bits = (int(x) for x in form.split(".")[0][:-1].split("x"))
    columns = bits // 32
    given = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    data, leading, stride = tiled(given)
    targets = [f"%r{40 + k}" for k in range(columns)]
    body = f"""
  setp.ne.b32 %p1, %r1, 0;
  setp.ge.s32 %p2, %r1, 32;
  {" ".join(f"ld.global.b32 %r8, [%rd3+{at}]; st.shared.b32 [%r4+{at}], %r8;" for at in range(0, len(data), 512))}
  fence.proxy.async.shared::cta;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+32768], 1;
MADE:
  @%p2 bra ALLOCATED;
  mov.b32 %r12, 32;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+32776], %r12;
ALLOCATED:
  bar.sync 0;
  ld.shared.b32 %r13, [%r3+32776];
  @%p1 bra ISSUED;
  cvt.u64.u32 %rd7, %r3;
  shr.u64 %rd7, %rd7, 4;
  add.s64 %rd8, %rd7, {described(0, leading, stride)};
  tcgen05.cp.cta_group::1.{form} [%r13], %rd8;
  add.s32 %r15, %r3, 32768;
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r15];
ISSUED:
  {wait("DONE", 32768)}
  tcgen05.fence::after_thread_sync;
  bar.warp.sync -1;
  and.b32 %r18, %r1, 96;
  shl.b32 %r18, %r18, 16;
  add.s32 %r18, %r18, %r13;
  tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{", ".join(targets)}}}, [%r18];
  tcgen05.wait::ld.sync.aligned;
  {" ".join(f"st.global.b32 [%rd5+{512 * k}], {r};" for k, r in enumerate(targets))}
  tcgen05.fence::before_thread_sync;
  bar.sync 0;
  tcgen05.fence::after_thread_sync;
  @%p2 bra FREED;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r13, %r12;
FREED:
"""
    want = np.zeros((128, columns), np.uint32)
    for part, quarters in enumerate(COPIES[form]):
        for quarter in quarters:
            want[32 * quarter :][:32] = given[32 * part :][:32]
    return Handwritten(body, np.frombuffer(data, np.uint32), threads=128, outputs=columns, target="sm_100a"), want.T


@pytest.mark.parametrize("form", COPIES)
def test_copies(form):
    program, want = copied(form)
    for seed in SEEDS:
        np.testing.assert_array_equal(program.interpret(seed), want)


def test_a_copy_that_nobody_waits_for():
    program, _ = copied("128x256b")
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r15]"
    body = replacing((commit, "mbarrier.arrive.shared::cta.b64 _, [%r15]"))(program.body)
    for seed in SEEDS:
        with pytest.raises((Race, Undefined), match=r"the (write|read) by tcgen05\.(cp|ld)|is not defined"):
            replace(program, body=body).interpret(seed)


# ---- what has no meaning is refused


def test_descriptors_refuse_unknown_bits():
    good = described(0, 128, 256)
    assert smem_descriptor(good).stride == 256
    for bit in (14, 15, 30, 31, 49, 52, 53, 60):
        with pytest.raises(Misuse, match=r"bits that have no meaning here: 0x0*" + f"{1 << bit:x}"):
            smem_descriptor(good | 1 << bit)
    for swizzle in (3, 5, 7):
        with pytest.raises(Misuse, match="shared memory descriptor"):
            smem_descriptor(good | swizzle << 61)
    good = 1 << 4 | 1 << 7 | 1 << 10 | 8 << 17 | 8 << 24
    assert InstructionDescriptor.decode(good, "f16", 1, False).m == 128
    for bit in (0, 1, 2, 3, 6, 23, 29, 30, 31):
        with pytest.raises(Misuse, match=r"bits that have no meaning here: 0x0*" + f"{1 << bit:x}"):
            InstructionDescriptor.decode(good | 1 << bit, "f16", 1, False)
    for bit, says in ((5, "wanted dense operands"), (9, "wanted dense operands")):
        with pytest.raises(Misuse, match=says):
            InstructionDescriptor.decode(good ^ 1 << bit, "f16", 1, False)
    assert math.prod(InstructionDescriptor.decode(good, "f16", 1, True).mn_major) == 0


def encoded(**other):
    """A tensor map of bfloat16 [2, 8, 48] with boxes of 64 bytes, as CuTe's host code writes it."""
    fields = {"steps": b"\0\0\0", "boxes": (31, 3, 0, 0, 0), **other}
    head = struct.pack("<QI", 0x7000, fields["flags"]) + struct.pack("<4I", 6, 48, 0, 0) + struct.pack("<I", 1 << 4)
    return (head + struct.pack("<5I", 47, 7, 1, 0, 0) + fields["steps"] + bytes(fields["boxes"])).ljust(128, b"\0")


def test_tensor_maps_refuse_unknown_bits():
    """Atoms of 32 bytes once passed for atoms of 16."""
    good = TensorMap.decode(encoded(flags=0x246522))
    assert good == TensorMap(0x7000, 2, (32, 4, 1), (48, 8, 2), (96, 768 + (1 << 36)), 128)
    assert TensorMap.decode(encoded(flags=0x246522 | 1 << 19)) == replace(good, atom=32)
    assert TensorMap.decode(encoded(flags=0x244522)) == replace(good, swizzle=64)
    for bit in (0, 2, 3, 11, 12, 15, 17, 20, *range(23, 32)):
        with pytest.raises(Misuse, match=f"flags have bits that have no meaning here: 0x0*{1 << bit:x}"):
            TensorMap.decode(encoded(flags=0x246522 | 1 << bit))
    for given, says in (
        ({"flags": 0x6522}, "where a tensor map should is none"),
        ({"flags": 0x246522 | 15 << 7}, "elements of type 15"),
        ({"flags": 0x246522, "steps": b"\1\0\0"}, "numbers that have no meaning"),
        ({"flags": 0x246522, "boxes": (31, 3, 0, 1, 0)}, "numbers that have no meaning"),
    ):
        with pytest.raises(Misuse, match=says):
            TensorMap.decode(encoded(**given))


# ---- products of a warp


def of_warp(instruction, a, b, c):
    """[16, 8]: the sums of a product whose operands are given by lanes' registers, [registers, 32]."""
    given = np.concatenate([a, b, c]).view(np.uint32)
    names = [f"%r{10 + i}" for i in range(len(given))]
    loads = "".join(f"  ld.global.b32 {name}, [%rd3+{128 * i}];\n" for i, name in enumerate(names))
    parts = [names[:4], names[4:6], names[6:]]
    text = ", ".join("{" + ", ".join(part) + "}" for part in [[f"%r{30 + i}" for i in range(4)], *parts])
    stores = "".join(f"  st.global.b32 [%rd5+{128 * i}], %r{30 + i};\n" for i in range(4))
    made = Handwritten(f"{loads}  {instruction} {text};\n{stores}", given, outputs=4).interpret().view(np.float32)
    lanes, sums = np.arange(32), np.zeros((16, 8), np.float32)
    for i in range(4):
        sums[lanes // 4 + i // 2 * 8, lanes % 4 * 2 + i % 2] = made[i]
    return sums


def test_a_product_of_a_warp_in_tf32():
    """The lower 13 bits of a number do not count; a float32 number less its upper bits makes up for them."""
    a, b, c = (RNG.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    lanes = np.arange(32)
    row, column = lanes // 4, lanes % 4
    upper = (a.view(np.uint32) & 0xFFFFE000).view(np.float32)
    instruction = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    b = (b.view(np.uint32) & 0xFFFF0000).view(np.float32)
    of_b = np.stack([b[column, row], b[column + 4, row]])
    of_c = np.stack([c[row + i // 2 * 8, column * 2 + i % 2] for i in range(4)])

    def of_a(x):
        return np.stack([x[row + i % 2 * 8, column + i // 2 * 4] for i in range(4)])

    exact = a.astype(np.float64) @ b + c
    np.testing.assert_allclose(of_warp(instruction, of_a(a), of_b, of_c), upper.astype(np.float64) @ b + c, atol=1e-6)
    assert np.abs(of_warp(instruction, of_a(a), of_b, of_c) - exact).max() > 1e-4
    lower = of_warp(instruction, of_a(a - upper), of_b, of_c * 0)
    np.testing.assert_allclose(of_warp(instruction, of_a(a), of_b, of_c) + lower, exact, atol=2e-6)
