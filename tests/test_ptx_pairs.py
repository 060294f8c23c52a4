"""Products of a pair of CTAs, on Blackwell, in the interpreter: programs written by hand, with planted faults.

None of our kernels uses them, and no chip has run these programs.
"""

import ml_dtypes
import numpy as np
import pytest

from interpreter.edits import replacing
from interpreter.faults import PlantedFault, interpret
from interpreter.machine.copies import TensorMap
from interpreter.machine.handwritten import SYNC, Handwritten, wait
from interpreter.machine.hazards import Deadlock, Leak, Misuse, Race, Undefined

SEEDS = range(4)
N, K = 64, 16  # products D = 2 A B', bf16 in, fp32 out
MASK = "mov.b16 %rs1, 3;"


def product(m, multicast=False):
    """Each CTA loads its rows of A and of B, and signals the leader's barrier; the leader signals both when D is
    complete.

    Shared memory of each CTA: A, then B, in groups of 8 rows and 8 columns; from + 16384 two mbarriers, and TMEM's
    address. `multicast`: the leader loads the same for both.
    """
    rows, columns = m // 2, N if m == 256 else N // 2
    descriptor = 1 << 4 | 1 << 7 | 1 << 10 | N >> 3 << 17 | m >> 4 << 24
    registers = [f"%r{100 + n}" for n in range(columns)]
    size = 32 * (rows + N // 2)
    cast, mask = (".multicast::cluster", ", %rs1") if multicast else ("", "")
    load = f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{cast}.cta_group::2"
    return f"""
  mov.u32 %r10, %cluster_ctarank;
  setp.ne.b32 %p1, %r1, 0;
  setp.ge.s32 %p2, %r1, 32;
  setp.ne.b32 %p3, %r10, 0;
  {MASK}
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+16384], 1;   // full
  mbarrier.init.shared::cta.b64 [%r3+16392], 1;   // done
  fence.mbarrier_init.release.cluster;
MADE:
  @%p2 bra ALLOCATED;
  add.s32 %r11, %r3, 16400;
  mov.b32 %r12, 64;
  tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r11], %r12;
  tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
ALLOCATED:
  {SYNC}
  ld.shared.b32 %r13, [%r3+16400];
  @%p1 bra ISSUED;
  mov.b64 %rd7, map;
  cvta.param.u64 %rd7, %rd7;
  and.b32 %r14, %r3, 0xfeffffff;   // the leader's shared memory
  mul.lo.s32 %r15, %r10, {size // 128};
  @%p3 bra {"ISSUED" if multicast else "LOAD"};
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+16384], {2 * size};
LOAD:
  {load} [%r3], [%rd7, {{0, %r15}}], [%r14+16384]{mask};
  @%p3 bra ISSUED;
  {wait("FULL", 16384)}
  shr.u32 %r16, %r3, 4;
  or.b32 %r16, %r16, {8 << 16};          // 128 bytes to the next 8 columns
  mov.b32 %r17, {1 << 14 | 16};             // 256 bytes to the next 8 rows
  mov.b64 %rd8, {{%r16, %r17}};
  add.s64 %rd9, %rd8, {2 * rows};       // B, in units of 16 bytes
  mov.b32 %r18, {descriptor};
  setp.ne.b32 %p4, %r1, 0;
  tcgen05.mma.cta_group::2.kind::f16 [%r13], %rd8, %rd9, %r18, %p4;
  tcgen05.mma.cta_group::2.kind::f16 [%r13], %rd8, %rd9, %r18, !%p4;
  add.s32 %r19, %r3, 16392;
  tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r19], %rs1;
ISSUED:
  {wait("DONE", 16392)}
  tcgen05.fence::after_thread_sync;
  bar.warp.sync -1;
  and.b32 %r20, %r1, 96;
  shl.b32 %r20, %r20, 16;
  add.s32 %r20, %r20, %r13;
  tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{", ".join(registers)}}}, [%r20];
  tcgen05.wait::ld.sync.aligned;
  {" ".join(f"st.global.b32 [%rd5+{1024 * n}], {register};" for n, register in enumerate(registers))}
  tcgen05.fence::before_thread_sync;
  {SYNC}
  tcgen05.fence::after_thread_sync;
  @%p2 bra FREED;
  tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r13, %r12;
FREED:
"""


def pair_product(m, multicast=False):
    """(program, D as its threads write it)."""
    rng, rows = np.random.default_rng(m), m // 2
    a, b = (rng.integers(-8, 9, (n, K)).astype(ml_dtypes.bfloat16) for n in (m, N))
    if multicast:
        a[rows:], b[N // 2 :] = a[:rows], b[: N // 2]

    def tiled(x):  # [groups of 8 rows, groups of 8 columns, 8, 8]
        return x.reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3).tobytes()

    halves = (tiled(a[r * rows :][:rows]) + tiled(b[r * N // 2 :][: N // 2]) for r in (0, 1))
    source = np.frombuffer(b"".join(halves), np.uint32).reshape(-1, 32)
    d = 2 * a.astype(np.float32) @ b.astype(np.float32).T
    if m == 128:  # lanes 64 to 127 have the second half of the columns of a CTA's 64 rows
        d = d.reshape(2, 64, 2, N // 2).transpose(0, 2, 1, 3).reshape(256, N // 2)
    extents, box = (32, len(source)), (32, len(source) // 2)
    program = Handwritten(
        product(m, multicast),
        source=source,
        threads=128,
        ctas=2,
        cluster=2,
        outputs=d.shape[1],
        tensor=lambda address: TensorMap(address, 4, box, extents, (128,), 0),
        target="sm_100a",
    )
    return program, np.ascontiguousarray(d.T).view(np.uint32)


PAIRS = {
    "256 rows": pair_product(256),
    "128 rows": pair_product(128),
    "256 rows, multicast": pair_product(256, multicast=True),
    "128 rows, multicast": pair_product(128, multicast=True),
}


@pytest.mark.parametrize("name", PAIRS)
def test_interpreted(name):
    program, want = PAIRS[name]
    for seed in SEEDS:
        np.testing.assert_array_equal(program.interpret(seed), want)


FAULTS = [
    PlantedFault(
        "a load that the leader hears of before its mbarriers are made",
        PAIRS["256 rows"][0],
        Misuse,
        r"mbarrier \+16384 of CTA 0 .* is used while nothing orders that after its initialisation",
        replacing((f"{SYNC}\n  ld.shared", "bar.sync 0;\n  ld.shared")),
    ),
    PlantedFault(
        "the leader expects the bytes of one CTA",
        PAIRS["256 rows"][0],
        Undefined,
        r"tcgen05\.mma.* reads SMEM of CTA \d bytes 5120\.\.6143, which nobody wrote",
        replacing((", 10240;", ", 5120;")),
    ),
    PlantedFault(
        "a load that completes on the other's mbarrier without .cta_group::2",
        PAIRS["256 rows"][0],
        Misuse,
        "a copy to CTA 1 that completes on CTA 0",
        replacing(("bytes.cta_group::2", "bytes")),
    ),
    PlantedFault(
        "a multicast for the leader to the leader alone",
        PAIRS["128 rows, multicast"][0],
        Undefined,
        r"tcgen05\.mma.* reads SMEM of CTA 1 bytes 3072\.\.4095, which nobody wrote",
        replacing((MASK, "mov.b16 %rs1, 1;"), (", 6144;", ", 3072;")),
    ),
    PlantedFault(
        "a multicast of which each CTA hears itself",
        PAIRS["128 rows, multicast"][0],
        Deadlock,
        r"mbarrier \+16384 of CTA 0 .*3072 transaction bytes outstanding",
        replacing(("multicast::cluster.cta_group::2", "multicast::cluster")),
    ),
    PlantedFault(
        "a product before the tiles are there",
        PAIRS["128 rows"][0],
        Undefined,
        r"tcgen05\.mma.* reads SMEM of CTA 0 bytes 3072\.\.4095, which nobody wrote",
        replacing((wait("FULL", 16384), "")),
    ),
    PlantedFault(
        "a commit to the leader alone",
        PAIRS["256 rows"][0],
        Deadlock,
        r"CTA 0 warp 0-3 have come and not CTA 1 .*CTA 1 warp 0-3 at line \d+ wait for .* \+16392 of CTA 1 ",
        replacing((".multicast::cluster.b64 [%r19], %rs1;", ".b64 [%r19];")),
    ),
    PlantedFault(
        "a commit to the other CTA alone",
        PAIRS["256 rows"][0],
        Deadlock,
        r"CTA 0 warp 0-3 at line \d+ wait for .* \+16392 of CTA 0 .*CTA 1 warp 0-3 have come and not CTA 0",
        replacing((MASK, "mov.b16 %rs1, 2;")),
    ),
    PlantedFault(
        "a commit to another mbarrier",
        PAIRS["256 rows"][0],
        Deadlock,
        r"CTA 0 warp 0-3 at line \d+ wait .* \+16392 of CTA 0 .*CTA 1 warp 0-3 at line \d+ wait .* \+16392 of CTA 1 ",
        replacing(("add.s32 %r19, %r3, 16392;", "add.s32 %r19, %r3, 16384;")),
    ),
    PlantedFault(
        "D is read before the product is done",
        PAIRS["128 rows"][0],
        Undefined,
        r"st\.global\.b32 .*is register %r100, which is not defined",
        replacing((wait("DONE", 16392), "")),
    ),
    PlantedFault(
        "D is read without a fence after the wait",
        PAIRS["128 rows"][0],
        Race,
        r"TMEM of CTA \d .*nothing orders this and the write by tcgen05\.mma of CTA 0",
        replacing(("tcgen05.fence::after_thread_sync;\n  bar.warp.sync", "bar.warp.sync")),
    ),
    PlantedFault(
        "TMEM is allocated by one CTA of the pair",
        PAIRS["256 rows"][0],
        Deadlock,
        "CTA 0 warp 0 at line .* waits for a warp of CTA 1 to allocate TMEM as well",
        replacing(("@%p2 bra ALLOCATED;", "@%p2 bra ALLOCATED; @%p3 bra ALLOCATED;")),
    ),
    PlantedFault(
        "the CTAs of a pair allocate differently",
        PAIRS["256 rows"][0],
        Misuse,
        "the CTAs of a pair allocate TMEM differently: 64 columns and 128",
        replacing(("mov.b32 %r12, 64;", "shl.b32 %r12, %r10, 6; add.s32 %r12, %r12, 64;")),
        also=((Misuse, "the CTAs of a pair allocate TMEM differently: 128 columns and 64"),),
    ),
    PlantedFault(
        "TMEM is not freed in the other CTA",
        PAIRS["256 rows"][0],
        Deadlock,
        "CTA 0 warp 0 at line .* waits for a warp of CTA 1 to free TMEM as well",
        replacing(("@%p2 bra FREED;", "@%p2 bra FREED; @%p3 bra FREED;")),
    ),
    PlantedFault(
        "TMEM is freed in neither",
        PAIRS["256 rows"][0],
        Leak,
        "TMEM of CTA 0 columns 0..63, .* never freed",
        replacing(("@%p2 bra FREED;", "bra FREED;")),
    ),
    PlantedFault(
        "TMEM is freed while others read it",
        PAIRS["256 rows"][0],
        Race,
        r"dealloc.* overwrites TMEM of CTA \d .* the read by tcgen05\.ld",
        replacing((f"before_thread_sync;\n  {SYNC}", "before_thread_sync;")),
        also=((Race, r"tcgen05\.ld.* reads TMEM of CTA \d .* the write by .* tcgen05\.dealloc"),),
    ),
    PlantedFault(
        "a CTA ends while the pair's product reads its memory",
        PAIRS["256 rows"][0],
        Race,
        r"multiplies in shared memory of CTA 1, which has ended",
        replacing((wait("DONE", 16392), f"@%p3 bra FREED;{wait('DONE', 16392)}")),
        also=((Deadlock, "CTA 0 warp 0 at line .* waits for a warp of CTA 1 to free TMEM as well"),),
    ),
    PlantedFault(
        "tcgen05 of one CTA and of two in a kernel",
        PAIRS["256 rows"][0],
        Misuse,
        "of .cta_group::1 and of .cta_group::2",
        replacing(("tcgen05.commit.cta_group::2", "tcgen05.commit.cta_group::1")),
    ),
    PlantedFault(
        "a pair's product of 64 rows",
        PAIRS["128 rows"][0],
        Misuse,
        "a product of 64 x 64 with .cta_group::2",
        replacing(
            (
                f"{8 << 24 | 1 << 4 | 1 << 7 | 1 << 10 | N >> 3 << 17};",
                f"{4 << 24 | 1 << 4 | 1 << 7 | 1 << 10 | N >> 3 << 17};",
            )
        ),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_finds(fault):
    """By the symptoms of this fault, whatever the order of events; no other fault has the same."""
    fault.check(interpret, seeds=SEEDS, among=FAULTS)
