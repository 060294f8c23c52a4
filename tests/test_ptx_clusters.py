"""Clusters of CTAs in the interpreter, on programs written by hand, with planted faults.

Our kernels with clusters use only some of these instructions; the programs show the rest. They also run on a Hopper
chip and must give the same there. Pairs of CTAs on Blackwell are in test_ptx_pairs.py.
"""

import numpy as np
import pytest

from interpreter.edits import replacing
from interpreter.faults import PlantedFault, interpret
from interpreter.machine.copies import TensorMap
from interpreter.machine.decode import Code
from interpreter.machine.handwritten import SYNC, Handwritten, wait
from interpreter.machine.hazards import Deadlock, Leak, Misuse, OutOfBounds, Race, Undefined
from interpreter.machine.parser import parse
from interpreter.machine.state import Machine, new_memory

SEEDS = range(4)
STORE = "st.global.b32 [%rd5], %r20;"
PEER = """
  mov.u32 %r10, %cluster_ctarank;
  xor.b32 %r11, %r10, 1;
  mapa.shared::cluster.u32 %r12, %r4, %r11;
"""  # %r10 the rank, %r11 the other's, %r12 the thread's word of the other's shared memory

EXCHANGE = f"""
  {PEER}
  ld.global.b32 %r20, [%rd3];
  st.shared.b32 [%r4], %r20;
  {SYNC}
  ld.shared::cluster.b32 %r20, [%r12];
  {SYNC}  // nobody ends before the other has read
  {STORE}
"""

BARRIER = """
  mapa.shared::cluster.u32 %r13, %r3, %r11;  // the other's; the mbarrier lies at + 4096 of each
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+4096], {count};
  fence.mbarrier_init.release.cluster;
MADE:
  barrier.cluster.arrive.relaxed.aligned;
  barrier.cluster.wait.acquire.aligned;
"""

REMOTE_STORES = f"""
  {PEER}
  {BARRIER.format(count=32)}
  ld.global.b32 %r20, [%rd3];
  st.shared::cluster.b32 [%r12], %r20;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13+4096];
  {wait("WAIT", 4096)}
  ld.shared.b32 %r20, [%r4];
  {STORE}
"""

ASYNC_STORES = f"""
  {PEER}
  {BARRIER.format(count=1)}
  @%p1 bra SEND;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+4096], 256;
SEND:
  ld.global.b32 %r20, [%rd3];
  add.s32 %r21, %r20, 1000;
  mapa.shared::cluster.u32 %r14, %r3, %r11;
  shl.b32 %r15, %r1, 3;
  add.s32 %r14, %r14, %r15;
  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r14], {{%r20, %r21}}, [%r13+4096];
  {wait("WAIT", 4096)}
  add.s32 %r15, %r3, %r15;
  ld.shared.v2.b32 {{%r20, %r21}}, [%r15];
  add.s32 %r20, %r20, %r21;
  {STORE}
  {SYNC}
"""

BULK_COPY = f"""
  {PEER}
  {BARRIER.format(count=1)}
  ld.global.b32 %r20, [%rd3];
  st.shared.b32 [%r4], %r20;
  fence.proxy.async.shared::cta;
  bar.sync 0;
  @%p1 bra SENT;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+4096], 256;
  cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r13+1024], [%r3], 256, [%r13+4096];
SENT:
  {wait("WAIT", 4096)}
  ld.shared.b32 %r20, [%r4+1024];
  {STORE}
  {SYNC}  // the other tells that the copy is there, and so has been read
"""

MULTICAST = f"""
  {PEER}
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+4096], 1;   // full
  mbarrier.init.shared::cta.b64 [%r3+4104], 2;   // empty: a warp of each CTA
  fence.mbarrier_init.release.cluster;
MADE:
  {SYNC}
  mov.b32 %r20, 0;
  mov.b32 %r30, 0;     // round
  mov.b64 %rd7, map;
  cvta.param.u64 %rd7, %rd7;
  mov.b16 %rs1, 3;
  shl.b32 %r31, %r10, 10;
  add.s32 %r31, %r31, %r3;           // where this CTA's half goes, in both
  shl.b32 %r32, %r10, 3;             // and its first row
  mapa.shared::cluster.u32 %r33, %r3, 0;
  mapa.shared::cluster.u32 %r34, %r3, 1;
ROUND:
  @%p1 bra READ;
  setp.eq.b32 %p3, %r30, 0;
  @%p3 bra LOAD;
  {wait("EMPTY", 4104)}
LOAD:
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+4096], 2048;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    [%r31], [%rd7, {{0, %r32}}], [%r3+4096], %rs1;
READ:
  {wait("FULL", 4096, "%r30")}
  bar.warp.sync -1;
  mov.b32 %r35, 0;
SUM:
  shl.b32 %r36, %r35, 7;
  add.s32 %r36, %r36, %r4;
  ld.shared.b32 %r37, [%r36];
  mad.lo.s32 %r20, %r20, 3, %r37;
  add.s32 %r35, %r35, 1;
  setp.lt.s32 %p4, %r35, 16;
  @%p4 bra SUM;
  bar.warp.sync -1;
  @%p1 bra TOLD;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r33+4104];
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r34+4104];
TOLD:
  add.s32 %r32, %r32, 16;
  add.s32 %r30, %r30, 1;
  setp.lt.s32 %p4, %r30, 2;
  @%p4 bra ROUND;
  {STORE}
  {SYNC}
"""

ATOMICS = f"""
  {PEER}
  mapa.shared::cluster.u32 %r13, %r3, 0;
  setp.ne.b32 %p1, %r7, 0;
  @%p1 bra CLEARED;
  st.shared.v2.b32 [%r3], {{0, -5}};
CLEARED:
  {SYNC}
  ld.global.b32 %r20, [%rd3];
  red.relaxed.cluster.shared::cluster.add.u32 [%r13], %r20;
  atom.relaxed.cluster.shared::cluster.max.s32 %r21, [%r13+4], %r20;
  {SYNC}
  ld.shared::cluster.v2.b32 {{%r20, %r22}}, [%r13];
  setp.gt.s32 %p2, %r21, %r22;   // none has seen more than the last
  selp.b32 %r23, 5000, 0, %p2;
  add.s32 %r20, %r20, %r22;
  add.s32 %r20, %r20, %r23;
  {SYNC}
  {STORE}
"""

SPECIAL = """
  mov.u32 %r20, %cluster_ctarank;
  mov.u32 %r21, %cluster_nctarank;
  mov.u32 %r22, %clusterid.x;
  mov.u32 %r23, %nclusterid.x;
  mov.u32 %r24, %cluster_ctaid.x;
  mov.u32 %r25, %cluster_nctaid.x;
  mov.b32 %r27, 1;
  mapa.shared::cluster.u32 %r26, %r3, %r27;
  getctarank.shared::cluster.u32 %r26, %r26;
  mad.lo.s32 %r20, %r21, 10, %r20;
  mad.lo.s32 %r20, %r22, 100, %r20;
  mad.lo.s32 %r20, %r23, 1000, %r20;
  mad.lo.s32 %r20, %r24, 10000, %r20;
  mad.lo.s32 %r20, %r25, 100000, %r20;
  mad.lo.s32 %r20, %r26, 1000000, %r20;
  st.global.b32 [%rd5], %r20;
"""

WARPS_THAT_END = f"""
  {PEER}
  st.shared.b32 [%r4], %r1;
  setp.ge.s32 %p1, %r1, 32;
  mov.b32 %r20, 7;
  @%p1 bra END;     // a thread that has ended counts as arrived
  {SYNC}
  ld.shared::cluster.b32 %r20, [%r12];
  {SYNC}
END:
  {STORE}
"""

ROWS = np.random.default_rng(0).integers(0, 2**32, (32, 32), dtype=np.uint32)  # words of 128 bytes


def tensor(address):
    return TensorMap(address, 4, (32, 8), (32, 32), (128,), 0)


def pair(body, **given):
    return Handwritten(body, **{"ctas": 2, "cluster": 2, **given})


def sums():
    """The result of MULTICAST: both rounds' rows, a column for each lane."""
    total = np.zeros(32, np.uint32)
    for rows in (ROWS[:16], ROWS[16:]):
        for row in rows:
            total = total * np.uint32(3) + row
    return np.tile(total, 2)


SWAPPED = np.r_[32:64, 0:32]
PROGRAMS = {
    "exchange": (pair(EXCHANGE), SWAPPED),
    "two clusters": (pair(EXCHANGE, ctas=4), np.r_[SWAPPED, 64 + SWAPPED]),
    "stores to the other": (pair(REMOTE_STORES), SWAPPED),
    "st.async": (pair(ASYNC_STORES), 2 * SWAPPED + 1000),
    "bulk copy": (pair(BULK_COPY, threads=64), np.r_[64:128, 0:64]),
    "multicast": (pair(MULTICAST, source=ROWS, tensor=tensor), sums()),
    "warps that end": (pair(WARPS_THAT_END, threads=64), np.tile(np.r_[0:32, [7] * 32], 2)),
    "atomics": (pair(ATOMICS, threads=64), np.full(128, 127 * 128 // 2 + 127)),
    "special registers": (
        pair(SPECIAL, ctas=6),
        np.repeat([1203020 + 100 * (n // 2) + 10001 * (n % 2) for n in range(6)], 32),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_interpreted(name):
    program, want = PROGRAMS[name]
    for seed in SEEDS:
        np.testing.assert_array_equal(program.interpret(seed), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_hardware(name, cuda):
    """The interpreter's result for a program is a Hopper chip's."""
    if (capability := cuda.compute_capability) != "9.0":
        pytest.skip(f"needs a device of compute capability 9.0, here is {capability}")
    program, want = PROGRAMS[name]
    for _ in range(3):
        np.testing.assert_array_equal(program.on_device(), want)


# ---- faults planted in them


RELAXED = "barrier.cluster.arrive.relaxed.aligned;"
FAULTS = [
    PlantedFault(
        "no cluster sync before the other's memory is read",
        PROGRAMS["exchange"][0],
        Race,
        r"loads from shared memory of CTA \d while nothing tells that it has begun",
        replacing((f"{SYNC}\n  ld", "ld")),
    ),
    PlantedFault(
        "no cluster sync before the other's memory is written",
        PROGRAMS["stores to the other"][0],
        Race,
        r"stores to shared memory of CTA \d while nothing tells that it has begun",
        replacing((f"{RELAXED}\n  barrier.cluster.wait.acquire.aligned;", "bar.sync 0;")),
    ),
    PlantedFault(
        "a cluster sync that releases nothing",
        PROGRAMS["exchange"][0],
        Race,
        r"ld\.shared::cluster.*nothing orders this and the write by CTA \d warp 0 \(line \d+: st\.shared\.b32",
        replacing((f"{SYNC}\n  ld", f"{RELAXED} barrier.cluster.wait.aligned; ld")),
    ),
    PlantedFault(
        "a CTA ends while the other reads its memory",
        PROGRAMS["exchange"][0],
        Race,
        r"loads from shared memory of CTA \d, which has ended",
        replacing((f"{SYNC}  // nobody", "  // nobody")),
    ),
    PlantedFault(
        "the other's memory by an address of .shared::cta",
        PROGRAMS["exchange"][0],
        Misuse,
        r"loads in shared memory of CTA \d, which takes \.shared::cluster",
        replacing(("ld.shared::cluster.b32 %r20", "ld.shared.b32 %r20")),
    ),
    PlantedFault(
        "a rank that the cluster does not have",
        PROGRAMS["exchange"][0],
        OutOfBounds,
        r"of CTA [23] in a cluster of 2",
        replacing(("xor.b32 %r11, %r10, 1", "add.s32 %r11, %r10, 2")),
    ),
    PlantedFault(
        "arrives at the cluster's barrier twice",
        PROGRAMS["exchange"][0],
        Misuse,
        "again without having waited",
        replacing((f"{SYNC}\n  ld", f"{SYNC}\n  barrier.cluster.arrive.aligned;\n  ld")),
    ),
    PlantedFault(
        "one CTA does not come to the cluster's barrier",
        PROGRAMS["exchange"][0],
        Deadlock,
        r"for the cluster's barrier, where CTA 0 warp 0-1; CTA 1 warp 1 have come and not CTA 1 warp 0",
        replacing((PEER, f"{PEER} setp.eq.b32 %p3, %r7, 64; vote.sync.any.pred %p3, %p3, -1; @%p3 bar.sync 1, 64;")),
        case={"threads": 64},
    ),
    PlantedFault(
        "mbarriers are not released to the cluster",
        PROGRAMS["stores to the other"][0],
        Misuse,
        r"mbarrier \+4096 of CTA \d .* nothing orders that after its initialisation",
        replacing(("fence.mbarrier_init.release.cluster;", "")),
    ),
    PlantedFault(
        "a remote arrival that releases nothing",
        PROGRAMS["stores to the other"][0],
        Race,
        r"nothing orders this and the write by CTA \d warp 0 .*st\.shared::cluster",
        replacing(("arrive.release.cluster.shared::cluster", "arrive.relaxed.cluster.shared::cluster")),
    ),
    PlantedFault(
        "arrives at its own mbarrier in place of the other's",
        PROGRAMS["stores to the other"][0],
        Undefined,
        r"ld\.shared\.b32 .*reads SMEM of CTA \d bytes 1024\.\.1151, which nobody wrote",
        replacing(
            ("_, [%r13+4096]", "_, [%r3+4096]"),
            ("arrive.release.cluster.shared::cluster", "arrive.release.cluster.shared::cta"),
        ),
        also=(
            (
                Race,
                r"ld\.shared\.b32 .*nothing orders this and the write by CTA \d warp 0 \(line \d+: st\.shared::cluster",
            ),
        ),
    ),
    PlantedFault(
        "a barrier counts the cluster's threads",
        PROGRAMS["stores to the other"][0],
        Deadlock,
        r"mbarrier \+4096 of CTA 0 .*32 of 64 arrivals pending.*arrived: CTA 1 warp 0",
        replacing(("[%r3+4096], 32;", "[%r3+4096], 64;")),
    ),
    PlantedFault(
        "waits for an mbarrier of the other",
        PROGRAMS["stores to the other"][0],
        Misuse,
        "wanted one of this CTA's own",
        replacing(("cluster.shared::cta.b64 %p7, [%r3", "cluster.shared::cta.b64 %p7, [%r13")),
    ),
    PlantedFault(
        "what atomics change is read before all have",
        PROGRAMS["atomics"][0],
        Race,
        r"red\.relaxed.* overwrites SMEM of CTA 0 bytes 1024\.\.1027 .* the read by CTA \d warp \d \(line \d+: ld\.",
        replacing((f"{SYNC}\n  ld.shared", "ld.shared")),
    ),
    PlantedFault(
        "a store among atomics",
        PROGRAMS["atomics"][0],
        Race,
        r"st\.shared::cluster.* overwrites SMEM of CTA 0 .* the write by CTA \d warp \d \(line \d+: @%p1 red\.",
        replacing(("red.relaxed", "@!%p1 st.shared::cluster.u32 [%r13], %r20;\n  @%p1 red.relaxed")),
    ),
    PlantedFault(
        "st.async counts more bytes than come",
        PROGRAMS["st.async"][0],
        Deadlock,
        r"256 transaction bytes outstanding",
        replacing((", 256;", ", 512;")),
    ),
    PlantedFault(
        "st.async counts on its own mbarrier",
        PROGRAMS["st.async"][0],
        Misuse,
        r"a store to CTA \d that completes on another's",
        replacing(("{%r20, %r21}, [%r13+4096]", "{%r20, %r21}, [%r3+4096]")),
    ),
    PlantedFault(
        "st.async is not waited for",
        PROGRAMS["st.async"][0],
        Undefined,
        r"ld\.shared\.v2\.b32 .*reads SMEM of CTA \d bytes 1024\.\.1279, which nobody wrote",
        replacing((wait("WAIT", 4096), "")),
    ),
    PlantedFault(
        "a bulk copy without a proxy fence",
        PROGRAMS["bulk copy"][0],
        Race,
        r"no fence\.proxy\.async after the generic write",
        replacing(("fence.proxy.async.shared::cta;", "")),
    ),
    PlantedFault(
        "a CTA ends while a bulk copy reads its memory",
        PROGRAMS["bulk copy"][0],
        Leak,
        r"ends while a copy may be in flight: nobody waited for the tma",
        replacing((f"{SYNC}  // the other tells", "  // the other tells")),
    ),
    PlantedFault(
        "a multicast to one CTA of two",
        PROGRAMS["multicast"][0],
        Deadlock,
        r"CTA 1 warp 0 at line \d+ waits for parity 0: mbarrier \+4096 of CTA 1 .*2048 transaction bytes outstanding",
        replacing(("mov.b16 %rs1, 3;", "mov.b16 %rs1, 1;")),
    ),
    PlantedFault(
        "a multicast to CTAs that there are not",
        PROGRAMS["multicast"][0],
        Misuse,
        r"mask 0b111 in a cluster of 2",
        replacing(("mov.b16 %rs1, 3;", "mov.b16 %rs1, 7;")),
    ),
    PlantedFault(
        "a multicast of which each CTA expects its own bytes",
        PROGRAMS["multicast"][0],
        Undefined,
        r"ld\.shared\.b32 %r37.*reads SMEM .*which nobody wrote",
        replacing((", 2048;", ", 1024;")),
        also=((Race, r"ld\.shared\.b32 %r37.*reads SMEM .*orders this and the write by tma of CTA"),),
    ),
    PlantedFault(
        "a multicast before the other's mbarriers are made",
        PROGRAMS["multicast"][0],
        Misuse,
        r"multicast::cluster.*there is no mbarrier at shared memory \+4096 of CTA \d",
        replacing((f"MADE:\n  {SYNC}", "MADE:\n bar.sync 0;")),
    ),
    PlantedFault(
        "a multicast over what the other still reads",
        PROGRAMS["multicast"][0],
        Race,
        r"multicast::cluster.* overwrites SMEM of CTA \d .* the read by CTA \d warp 0 \(line \d+: ld\.shared",
        replacing(
            ("[%r3+4104], 2;", "[%r3+4104], 1;"),
            ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r33+4104];", ""),
            ("arrive.release.cluster.shared::cluster.b64 _, [%r34", "arrive.shared::cta.b64 _, [%r3"),
        ),
        also=((Race, r"ld\.shared\.b32 %r37.*reads SMEM .*orders this and the write by tma of CTA"),),
    ),
    PlantedFault(
        "a CTA ends while the other arrives at its mbarrier",
        PROGRAMS["multicast"][0],
        Race,
        r"arrives at an mbarrier in shared memory of CTA \d, which has ended",
        replacing((f"{STORE}\n  {SYNC}", STORE)),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_finds(fault):
    """By the symptoms of this fault, whatever the order of events; no other fault has the same."""
    fault.check(interpret, seeds=SEEDS, among=FAULTS)


def test_refuses_a_launch_in_other_clusters():
    code, memory = Code.of(parse(pair(EXCHANGE).ptx)), new_memory()
    given = {"threads": 32, "smem_bytes": 0, "params": bytes(144), "memory": memory, "events": memory.events}
    with pytest.raises(Misuse, match="launched in clusters of 1, the kernel wants 2"):
        Machine(code, grid=2, cluster_size=1, **given)
    with pytest.raises(Misuse, match="a grid of 3 CTAs is not made of clusters of 2"):
        Machine(code, grid=3, **given)
