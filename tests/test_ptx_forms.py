"""Forms of instructions that others' kernels use, in the interpreter: programs written by hand, and what they mean.

No chip has run these programs. What runs on B200s with the same forms is in `make test-witnesses`.
"""

import itertools
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from interpreter.machine import scheduler
from interpreter.machine.copies import TensorMap
from interpreter.machine.decode import Code
from interpreter.machine.handwritten import Handwritten, wait
from interpreter.machine.hazards import Deadlock, Leak, Misuse, Race, Unsupported
from interpreter.machine.parser import parse
from interpreter.machine.reductions import add_cleared
from interpreter.machine.state import Machine, new_memory

SEEDS = range(3)
BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(0)


def run(body, source=None, **given):
    return Handwritten(body, source, target="sm_100a", **given).interpret()


# ---- arithmetic

X, Y, Z = (np.concatenate([[v, 1.5, -0.0, np.inf], RNG.standard_normal(60)]).astype(np.float32) for v in (3e38, 0, -1))
TWO_FLOATS = """
  ld.global.b64 %rd6, [%rd2];
  mul.wide.u32 %rd6, %r1, 8;
  add.s64 %rd7, %rd2, %rd6;
  add.s64 %rd8, %rd4, %rd6;
  ld.global.b64 %rd9, [%rd7];
  ld.global.b64 %rd10, [%rd7+256];
  ld.global.b64 %rd11, [%rd7+512];
  {instruction}
  st.global.b64 [%rd8], %rd12;
"""


def rounded(exact, down):
    """fp32 of a number that a fraction gives exactly."""
    near = np.float32(exact)
    return np.nextafter(near, np.float32(-np.inf)) if down and np.isfinite(exact) and float(near) > exact else near


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("add", lambda x, y, z: x + y),
        ("sub", lambda x, y, z: x - y),
        ("mul", lambda x, y, z: x * y),
        ("fma", lambda x, y, z: x * y + z),
    ],
)
@pytest.mark.parametrize("rounding", ["rn", "rm"])
def test_two_floats(name, compute, rounding):
    operands = ", ".join(["%rd12", "%rd9", "%rd10", "%rd11"][: 4 if name == "fma" else 3])
    body = TWO_FLOATS.format(instruction=f"{name}.{rounding}.f32x2 {operands};")
    got = run(body, np.concatenate([X, Y, Z]), outputs=2).view(np.float32).ravel()
    with np.errstate(all="ignore"):
        want = [rounded(compute(*map(float, v)), rounding == "rm") for v in zip(X, Y, Z, strict=True)]
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    assert (np.signbit(got) == np.signbit(want)).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(
    ("instruction", "compute"),
    [
        ("add.rn.f32.{} %r10, %rs1, %r9;", lambda x, y, z: x + z),
        ("sub.rn.f32.{} %r10, %rs1, %r9;", lambda x, y, z: x - z),
        ("fma.rn.f32.{} %r10, %rs1, %rs2, %r9;", lambda x, y, z: x * y + z),
    ],
    ids=["add", "sub", "fma"],
)
def test_halves_beside_fp32(instruction, compute, kind):
    """What is narrow is widened first, so that a result is rounded once."""
    dtype = {"f16": np.float16, "bf16": BF16}[kind]
    x, y = (np.concatenate([[np.inf, 0, -3], RNG.standard_normal(29)]).astype(dtype) for _ in range(2))
    z = np.concatenate([[1, -0.0, 1e30], RNG.standard_normal(29)]).astype(np.float32)
    body = f"""
  ld.global.b32 %r8, [%rd3];
  ld.global.b32 %r9, [%rd3+128];
  mov.b32 {{%rs1, %rs2}}, %r8;
  {instruction.format(kind)}
  st.global.b32 [%rd5], %r10;
"""
    got = run(body, np.concatenate([np.stack([x, y], 1).view(np.uint32).ravel(), z.view(np.uint32)])).view(np.float32)
    want = np.array([compute(*map(float, v)) for v in zip(x, y, z, strict=True)]).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    assert (np.signbit(got) == np.signbit(want)).all()


def test_a_sum_rounded_downwards_of_what_fp64_cannot_hold():
    """1 - 2^-100 is below 1, though fp64 has no number between."""
    x = np.full(64, 1, np.float32), np.full(64, -(2.0**-100), np.float32), np.zeros(64, np.float32)
    got = run(TWO_FLOATS.format(instruction="add.rm.f32x2 %rd12, %rd9, %rd10;"), np.concatenate(x), outputs=2)
    assert (got.view(np.float32) == np.nextafter(np.float32(1), np.float32(0))).all()


@pytest.mark.parametrize(("name", "wanted"), [("max", max), ("min", min)])
def test_extremum_of_three(name, wanted):
    body = f"""
  ld.global.b32 %r8, [%rd3];
  ld.global.b32 %r9, [%rd3+128];
  ld.global.b32 %r10, [%rd3+256];
  {name}.f32 %r11, %r8, %r9, %r10;
  st.global.b32 [%rd5], %r11;
"""
    x = RNG.standard_normal((3, 32)).astype(np.float32)
    assert run(body, x).view(np.float32).tolist() == [wanted(v) for v in zip(*x.tolist(), strict=True)]


# ---- addresses, bytes, and launches of several dimensions


def test_generic_addresses_of_shared_memory():
    body = """
  st.shared.b32 [%r4], %r1;
  cvt.u64.u32 %rd6, %r4;
  cvta.shared.u64 %rd7, %rd6;
  setp.eq.u64 %p1, %rd6, %rd7;
  cvta.to.shared::cluster.u64 %rd8, %rd7;
  cvt.u32.u64 %r8, %rd8;
  ld.shared.b32 %r9, [%r8];
  selp.b32 %r9, -1, %r9, %p1;
  st.global.b32 [%rd5], %r9;
"""
    assert run(body).tolist() == list(range(32))


def test_stores_bytes():
    body = """
  st.shared.b32 [%r4], 0;
  cvt.u16.u32 %rs1, %r1;
  bar.warp.sync -1;
  add.s32 %r8, %r3, %r1;
  st.shared.b8 [%r8+1], %rs1;
  bar.warp.sync -1;
  ld.shared.b32 %r9, [%r4];
  st.global.b32 [%rd5], %r9;
"""
    for form in (body, body.replace("%rs1;\n  bar", "%r1;\n  bar")):  # the lower bits of a wider register
        assert run(form).view(np.uint8)[:33].tolist() == [0, *range(32)]


def test_a_launch_of_three_dimensions():
    """Every special register, of a grid of 4 x 2 x 3, clusters of 2 x 1 x 3 and CTAs of 8 x 2 x 4."""
    names = ("tid", "ctaid", "cluster_ctaid", "clusterid", "ntid", "nctaid", "cluster_nctaid", "nclusterid")
    registers = [f"%{name}.{axis}" for name in (*names,) for axis in "xyz"]
    stores = " ".join(f"mov.u32 %r9, {r}; st.global.b32 [%rd7+{4 * n}], %r9;" for n, r in enumerate(registers))
    body = f"""
  mov.u32 %r8, %tid.y; mov.u32 %r9, %tid.z;
  mad.lo.s32 %r8, %r9, 2, %r8; mad.lo.s32 %r8, %r8, 8, %r1;                       // the thread
  mov.u32 %r9, %ctaid.y; mov.u32 %r10, %ctaid.z;
  mad.lo.s32 %r9, %r10, 2, %r9; mad.lo.s32 %r9, %r9, 4, %r5;                      // the CTA
  mad.lo.s32 %r8, %r9, 64, %r8;
  mul.wide.s32 %rd6, %r8, {4 * len(registers)};
  add.s64 %rd7, %rd4, %rd6;
  {stores}
"""
    code = Code.of(parse(Handwritten(body, cluster=6).ptx.replace("6, 1, 1", "2, 1, 3")))
    memory = new_memory()
    result = memory.add("result", None, 4 * len(registers) * 64 * 24)
    params = bytes(136) + result.to_bytes(8, "little")
    given = {"smem_bytes": 0, "params": params, "memory": memory, "events": memory.events}
    scheduler.run(Machine(code, grid=(4, 2, 3), threads=(8, 2, 4), cluster_size=(2, 1, 3), **given))
    got = memory.named("result").bytes.view(np.uint32).reshape(3, 2, 4, 4, 2, 8, len(names), 3)
    for cz, cy, cx, tz, ty, tx in itertools.product(*map(range, got.shape[:6])):
        want = [
            [tx, ty, tz],
            [cx, cy, cz],
            [cx % 2, 0, cz],
            [cx // 2, cy, 0],
            [8, 2, 4],
            [4, 2, 3],
            [2, 1, 3],
            [2, 2, 1],
        ]
        assert got[cz, cy, cx, tz, ty, tx].tolist() == want
    with pytest.raises(Misuse, match=r"a grid of \(4, 2, 2\) CTAs is not made of clusters of \(2, 1, 3\)"):
        Machine(code, grid=(4, 2, 2), threads=64, cluster_size=(2, 1, 3), **given)


# ---- bulk copies

LOADED = f"""
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+32768], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+32768], {{bytes}};
  mov.b64 %rd7, map;
  cvta.param.u64 %rd7, %rd7;
  mov.b64 %rd8, 0;
  {{load}}
MADE:
  bar.sync 0;
  {wait("COME", 32768)}
  {{stores}}
"""
FORM = "shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"


def gathered(atom, to=0):
    """(program, its result): rows anywhere, one of them absent, into shared memory from a place on."""
    rows = (5, 0, -1, 7)
    given = np.random.default_rng(atom).integers(0, 2**32, (8, 48), dtype=np.uint32)
    place = f"[%r3+{to}], [%rd7, {{16, {', '.join(map(str, rows))}}}]"
    load = f"cp.async.bulk.tensor.2d.{FORM}.L2::cache_hint {place}, [%r3+32768], %rd8;"
    words = (f"ld.shared.b32 %r9, [%r4+{to + 128 * n}]; st.global.b32 [%rd5+{128 * n}], %r9;" for n in range(4))
    body = LOADED.format(bytes=512, load=load, stores=" ".join(words))
    want = np.zeros((4, 32), np.uint32)
    for n, row in enumerate(rows):
        for chunk in range(8):
            place = chunk ^ n if atom == 16 else chunk ^ (n & 3) << 1
            if row >= 0:
                want[n, 4 * place : 4 * place + 4] = given[row, 16 + 4 * chunk : 20 + 4 * chunk]
    tensor = mapped((32, 1), (48, 8), (192,), atom)
    return Handwritten(body, given, outputs=4, tensor=tensor, target="sm_100a"), want


@pytest.mark.parametrize("atom", [16, 32])
def test_gathers_four_rows(atom):
    """Against the definition, chunk by chunk."""
    program, want = gathered(atom)
    np.testing.assert_array_equal(program.interpret(), want)
    with pytest.raises(Misuse, match=r"four rows by a tensor map with a box of \(32, 2\)"):
        replace(program, tensor=mapped((32, 2), (48, 8), (192,), atom)).interpret()


def mapped(box, extents, strides, atom=16):
    return lambda address: TensorMap(address, 4, box, extents, strides, 128, atom)


def test_an_atom_is_of_16_or_32_bytes():
    for swizzle, atom in ((64, 32), (128, 64)):
        with pytest.raises(Misuse, match=f"a swizzle of {swizzle} bytes in atoms of {atom}"):
            TensorMap(0, 4, (16,), (32,), (), swizzle, atom)


BULK = """
  st.shared.b32 [%r4], %r1;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra DONE;
  {copy}
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
DONE:
"""


ARRIVALS = f"""
  mov.b64 %rd6, smem;
  setp.ne.b32 %p1, %r1, 0;
  mov.b32 %r8, 64;
  @!%p1 mbarrier.init.shared.b64 [%rd6], %r8;
  bar.sync 0;
  mov.b32 %r9, 1;
  mbarrier.arrive.noComplete.shared.b64 %rd7, [smem], %r9;
  selp.b32 %r10, 0, 128, %p1;
  @!%p1 fence.proxy.async.shared::cta;
  mbarrier.arrive.expect_tx.shared.b64 %rd8, [%rd6], %r10;
  add.s32 %r11, %r3, 1024;
  @!%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r11], [%rd2], 128, [%rd6];
{wait("COME", 0)}
  ld.shared.b32 %r9, [%r4+1024];
  st.global.b32 [%rd5], %r9;
"""


def test_arrivals_that_do_not_complete_a_phase():
    """Before others that expect bytes, each thread as many as it says; mbarriers by addresses of 64 bits."""
    assert run(ARRIVALS).tolist() == list(range(32))
    with pytest.raises(Misuse, match=r"32 arrivals with \.noComplete, which complete a phase"):
        run(ARRIVALS.replace("%r8, 64", "%r8, 32"))


def test_proxy_fences_of_one_direction():
    """The release takes the place of the fence for both; the acquire alone does not."""
    body = BULK.format(copy="cp.async.bulk.global.shared::cta.bulk_group [%rd4], [%r3], 128;")
    release = "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;"
    acquire = "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;"
    released = body.replace("fence.proxy.async.shared::cta;", release).replace("bar.sync 0;", f"bar.sync 0; {acquire}")
    assert run(released).tolist() == list(range(32))
    with pytest.raises(Race, match=r"no fence\.proxy\.async after the generic write"):
        run(released.replace(release, acquire))
    with pytest.raises(Unsupported, match="modifier"):
        run(released.replace(release, release.replace("shared::cta", "shared::cluster")))


DIVERGED = f"""
  mov.b32 %r8, 1;
  setp.ne.b32 %p1, %r1, 0;
  @!%p1 mbarrier.init.shared::cta.b64 [%r3], %r8;
  bar.warp.sync -1;
  @%p1 bra OTHERS;
  mbarrier.arrive.shared::cta.b64 _, [%r3];
{wait("FIRST", 0)}
  bra.uni MET;
OTHERS:
{wait("SECOND", 0)}
MET:
  st.global.b32 [%rd5], %r1;
"""


def test_lanes_that_wait_let_others_go_on():
    """In whichever order the two sides of a branch begin."""
    for body in (DIVERGED, DIVERGED.replace("@%p1 bra OTHERS", "not.pred %p2, %p1;\n  @!%p2 bra OTHERS")):
        for seed in SEEDS:
            got = Handwritten(body, target="sm_100a").interpret(seed)
            assert got.tolist() == list(range(32))
    with pytest.raises(Deadlock, match="other lanes wait for parity 0"):
        run(DIVERGED.replace("mbarrier.arrive.shared::cta.b64 _, [%r3];", ""))


def test_signed_fields_and_clamped_and_rounded_numbers():
    body = """
  ld.global.b32 %r8, [%rd3];
  {instruction}
  st.global.b32 [%rd5], %r9;
"""
    words = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    for place, size in ((0, 26), (4, 7), (28, 12), (3, 0), (0, 32)):
        got = run(body.format(instruction=f"bfe.s32 %r9, %r8, {place}, {size};"), words).view(np.int32)
        field = words.view(np.int32).astype(object) >> place
        want = [(int(x) + (1 << size - 1) & (1 << size) - 1) - (1 << size - 1) if size else 0 for x in field]
        assert got.tolist() == want
    numbers = np.resize(np.array([-1, -0.0, 0.25, 1, 7, np.nan, np.inf, 1e-3], np.float32), 32)
    got = run(body.format(instruction="cvt.sat.f32.f32 %r9, %r8;"), numbers.view(np.uint32)).view(np.float32)
    assert got.tolist() == np.clip(np.nan_to_num(numbers, nan=0), 0, 1).tolist()
    thirds = (RNG.standard_normal(32) / 3).astype(np.float32)
    instruction = "fma.rm.f32 %r9, %r8, 0f3EAAAAAB, 0f3F800000;"
    got = run(body.format(instruction=instruction), thirds.view(np.uint32)).view(np.float32)
    third = Fraction(float(np.uint32(0x3EAAAAAB).view(np.float32)))
    for x, down in zip(thirds, got, strict=True):
        exact = Fraction(float(x)) * third + 1
        assert Fraction(float(down)) <= exact < Fraction(float(np.nextafter(down, np.float32(np.inf))))


def test_loads_into_wider_registers():
    """9.4.1: of a signed type with the sign, of another with zeros."""
    body = """
  ld.global.{kind} %rd6, [%rd3];
  shr.u64 %rd6, %rd6, 32;
  cvt.u32.u64 %r9, %rd6;
  st.global.b32 [%rd5], %r9;
"""
    words = np.arange(32, dtype=np.uint32) << 27
    assert run(body.format(kind="s32"), words).view(np.int32).tolist() == [0] * 16 + [-1] * 16
    assert run(body.format(kind="u32"), words).tolist() == [0] * 32


def test_loads_of_128_bits():
    body = """
  st.shared.b32 [%r4], %r1;
  bar.warp.sync -1;
  .reg .b128 %q;
  shl.b32 %r8, %r1, 2;
  and.b32 %r8, %r8, 112;
  add.s32 %r8, %r8, %r3;
  ld.shared.b128 %q, [%r8];
  mov.b128 {%rd6, %rd7}, %q;
  cvt.u32.u64 %r9, %rd7;
  st.global.b32 [%rd5], %r9;
"""
    assert run(body).tolist() == [n // 4 * 4 + 2 for n in range(32)]


def test_shared_memory_that_a_kernel_declares_within():
    """A variable without an extent is one byte, and what a launch asks for comes after it."""
    ptx = Handwritten("").ptx
    declared = ptx.replace(".extern .shared .align 1024 .b8 smem[];\n", "").replace(
        ".reg .pred %p<9>;", ".reg .pred %p<9>;\n  .shared .align 1024 .b8 smem;"
    )
    assert parse(declared).shared == {"smem": (1024, 1)} and parse(ptx).shared == {"smem": (1024, None)}


def test_bulk_stores():
    body = BULK.format(copy="cp.async.bulk.global.shared::cta.bulk_group [%rd4], [%r3], 128;")
    assert run(body).tolist() == list(range(32))
    with pytest.raises(Misuse, match="a bulk copy of 120 bytes"):
        run(body.replace("128;", "120;"))
    with pytest.raises(Race, match=r"no fence\.proxy\.async after the generic write"):
        run(body.replace("fence.proxy.async.shared::cta;", ""))
    with pytest.raises(Leak, match="TMA may still read shared memory"):
        run(body.replace("cp.async.bulk.wait_group 0;", ""))


def added_by_four(body, size):
    """What four CTAs of one warp add to so many bytes of zeros, in several orders."""
    code = Code.of(parse(Handwritten(body).ptx))
    for seed in SEEDS:
        memory = new_memory()
        params = bytes(136) + add_cleared(memory, "result", size).to_bytes(8, "little")
        given = {"params": params, "memory": memory, "events": memory.events, "seed": seed}
        scheduler.run(Machine(code, grid=4, threads=32, smem_bytes=65536, **given))
        yield memory.named("result").bytes


def test_bulk_sums():
    """Those of four CTAs onto what the host wrote; in whatever order they come."""
    add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd4], [%r3], 128;"
    body = BULK.format(copy=add).replace("%r4], %r1", "%r4], 0f3FC00000")
    for result in added_by_four(body, 128):
        assert (result.view(np.float32) == 6).all()
    with pytest.raises(Unsupported, match=r"modifier \.u32"):
        run(body.replace("add.f32", "add.u32"))


def test_sums_of_integers():
    """Of 32 and 64 bits, of all lanes of four CTAs, and a bit that two lanes set beside them."""
    body = """
  cvt.rn.f32.u32 %r4, %r1;
  mul.f32 %r4, %r4, 0f3F000000;
  cvt.rpi.u64.f32 %rd6, %r4;
  red.relaxed.gpu.global.add.u64 [%rd4], %rd6;
  mov.b64 %rd7, 0x8000000000000000;
  setp.lt.u32 %p1, %r1, 2;
  @%p1 red.relaxed.gpu.global.or.b64 [%rd4], %rd7;
  red.relaxed.gpu.global.add.u32 [%rd4+8], %r1;
"""
    halves = sum(-(-lane // 2) for lane in range(32))
    for result in added_by_four(body, 16):
        assert result.view(np.uint64).tolist() == [(1 << 63) + 4 * halves, 4 * sum(range(32))]
    with pytest.raises(Unsupported, match="red"):
        run(body.replace("add.u32", "add.v2.u32"))


def test_prefetches_a_box():
    body = """
  mov.b64 %rd7, map;
  cvta.param.u64 %rd7, %rd7;
  cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd7, {0, 3}];
  st.global.b32 [%rd5], %r1;
"""
    assert run(body, np.zeros((8, 48), np.uint32), tensor=mapped((32, 1), (48, 8), (192,))).tolist() == [*range(32)]
    with pytest.raises(Misuse, match="a prefetch of rank 2 by a tensor map of rank 1"):
        run(body, np.zeros((8, 48), np.uint32), tensor=mapped((32,), (48,), ()))


# ---- launch control

COUNT = f"""
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+64], 1;
  fence.mbarrier_init.release.cluster;
MADE:
  bar.sync 0;
  mov.b32 %r8, %ctaid.x;
  mov.b32 %r9, %ctaid.y;
  mov.b32 %r10, 0;                         // the phase
WORK:
  mad.lo.s32 %r11, %r9, 3, %r8;
  mad.lo.s32 %r11, %r11, 32, %r1;
  mul.wide.s32 %rd6, %r11, 4;
  add.s64 %rd7, %rd4, %rd6;
  st.global.b32 [%rd7], %r11;
  @%p1 bra ASKED;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+64], 16;
  clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r3+64];
ASKED:
  {wait("COME", 64, "%r10")}
  ld.shared.v2.b64 {{%rd8, %rd9}}, [%r3];
  mov.b128 %handle, {{%rd8, %rd9}};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  xor.b32 %r10, %r10, 1;
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %handle;
  clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r8, %handle;
  clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r12, %r9, %r13, %r14}}, %handle;
  @%p2 bra WORK;
"""


def test_clusters_that_others_take_over():
    """Every CTA's work is done once; some is done by another CTA, and some CTAs begin themselves."""
    code = Code.of(parse(Handwritten(".reg .b128 %handle;" + COUNT, target="sm_100a").ptx))
    begun = []
    for seed in range(12):
        memory = new_memory()
        result = memory.add("result", None, 6 * 128)
        machine = Machine(
            code,
            grid=(3, 2),
            threads=32,
            smem_bytes=1024,
            params=bytes(136) + result.to_bytes(8, "little"),
            memory=memory,
            events=memory.events,
            seed=seed,
        )
        scheduler.run(machine)
        assert memory.named("result").bytes.view(np.uint32).tolist() == [*range(6 * 32)]
        begun.append(sum(w.pc > 0 for w in machine.warps))
    print(begun)
    assert min(begun) == 1 and max(begun) > 1


# ---- loads and stores of tensor memory

CELLS = {  # shape: of a row and a column within .x1, (thread, register)
    "16x64b": (2, lambda r, c: (4 * (r % 8) + 2 * c + r // 8, 0)),
    "16x128b": (4, lambda r, c: (4 * (r % 8) + c, r // 8)),
    "16x256b": (8, lambda r, c: (4 * (r % 8) + c // 2, 2 * (r // 8) + c % 2)),
}


@pytest.mark.parametrize("half", [0, 16])
@pytest.mark.parametrize("shape", CELLS)
def test_loads_of_16_lanes(shape, half):
    """Lane L, column C of TMEM holds 100 L + C."""
    per, place = CELLS[shape]
    count, columns = 2 * per // 2, 2 * per
    registers = [f"%r{20 + n}" for n in range(16)]
    targets = [f"%r{40 + n}" for n in range(count)]
    body = f"""
  mov.b32 %r8, 32;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], %r8;
  ld.shared.b32 %r9, [%r3];
  mul.lo.s32 %r10, %r1, 100;
  {" ".join(f"add.s32 {r}, %r10, {n};" for n, r in enumerate(registers))}
  tcgen05.st.sync.aligned.32x32b.x16.b32 [%r9], {{{", ".join(registers)}}};
  tcgen05.wait::st.sync.aligned;
  add.s32 %r11, %r9, {half << 16};
  tcgen05.ld.sync.aligned.{shape}.x2.b32 {{{", ".join(targets)}}}, [%r11];
  tcgen05.wait::ld.sync.aligned;
  {" ".join(f"st.global.b32 [%rd5+{128 * n}], {r};" for n, r in enumerate(targets))}
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, %r8;
"""
    want = np.zeros((count, 32), int)
    for row, column in itertools.product(range(16), range(columns)):
        thread, register = place(row, column % per)
        want[register + column // per * (count // 2), thread] = 100 * (half + row) + column
    np.testing.assert_array_equal(run(body, outputs=count), want)
    with pytest.raises(Unsupported, match="shape"):
        run(body.replace("x2.b32", "x2.pack::16b.b32"), outputs=count)
