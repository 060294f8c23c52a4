"""Clusters of CTAs in the interpreter, on programs written by hand, and faults planted in them.

No kernel of ours has clusters: these programs are all that the interpreter's are shown by. Those for Hopper run on such
a chip too, where there is one, and must give the same there.
"""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.copies import TensorMap
from tests.ptx.handwritten import Handwritten
from tests.ptx.hazards import Deadlock, Fault, Leak, Misuse, OutOfBounds, Race
from tests.ptx.parser import parse
from tests.ptx.state import Machine, new_memory

SEEDS = range(4)

SYNC = "barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;"
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
WAIT = """
{name}:
  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [%r3+{offset}], {parity};
  @!%p7 bra {name};
"""


def wait(name="WAIT", offset=4096, parity=0):
    return WAIT.format(name=name, offset=offset, parity=parity)


REMOTE_STORES = f"""
  {PEER}
  {BARRIER.format(count=32)}
  ld.global.b32 %r20, [%rd3];
  st.shared::cluster.b32 [%r12], %r20;
  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13+4096];
  {wait()}
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
  {wait()}
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
  {wait()}
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

ROWS = np.random.default_rng(0).integers(0, 2**32, (32, 32), dtype=np.uint32)  # of 128 bytes


def tensor(address):
    return TensorMap(address, 4, (32, 8), (32, 32), (128,), 0)


def pair(body, **given):
    return Handwritten(body, **{"ctas": 2, "cluster": 2, **given})


def sums():
    """Of MULTICAST: both rounds' rows, a column a lane."""
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
    """What the interpreter says of a program is what a Hopper chip does."""
    if (capability := cuda.compute_capability) != "9.0":
        pytest.skip(f"needs a device of compute capability 9.0, here is {capability}")
    program, want = PROGRAMS[name]
    for _ in range(3):
        np.testing.assert_array_equal(program.on_device(), want)


# ---- products of a pair of CTAs, on Blackwell

N, K = 64, 16  # of D = 2 A B', bf16 in, fp32 out
MASK = "mov.b16 %rs1, 3;"


def product(m, multicast=False):
    """Each CTA loads its rows of A and of B, and the leader's barrier hears of both; both are told when D is there.

    Shared memory of each: A, behind it B, in groups of 8 rows and 8 columns; from + 16384 on two mbarriers, and where
    TMEM is. `multicast`: the leader loads the same for both.
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
    program = pair(
        product(m, multicast),
        source=source,
        threads=128,
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
def test_pair_interpreted(name):
    program, want = PAIRS[name]
    for seed in SEEDS:
        np.testing.assert_array_equal(program.interpret(seed), want)


# ---- faults planted in them


@dataclasses.dataclass(frozen=True)
class Planted:
    name: str
    program: str
    fault: type[Fault]
    says: str
    edits: tuple[tuple[str, str], ...] = ()  # what stands there, every time, and what then stands there
    changes: dict = dataclasses.field(default_factory=dict)

    def planted(self):
        program, _ = {**PROGRAMS, **PAIRS}[self.program]
        body = program.body
        for old, new in self.edits:
            assert old in body, old
            body = body.replace(old, new)
        return dataclasses.replace(program, body=body, **self.changes)


RELAXED = "barrier.cluster.arrive.relaxed.aligned;"
FAULTS = [
    Planted(
        "no cluster sync before the other's memory is read",
        "exchange",
        Race,
        r"loads from shared memory of CTA \d while nothing tells that it has begun",
        ((f"{SYNC}\n  ld", "ld"),),
    ),
    Planted(
        "no cluster sync before the other's memory is written",
        "stores to the other",
        Race,
        r"stores to shared memory of CTA \d while nothing tells that it has begun",
        ((f"{RELAXED}\n  barrier.cluster.wait.acquire.aligned;", "bar.sync 0;"),),
    ),
    Planted(
        "a cluster sync that releases nothing",
        "exchange",
        Race,
        r"nothing orders this and the write by CTA \d warp 0 .*st\.shared|which nobody wrote",
        ((f"{SYNC}\n  ld", f"{RELAXED} barrier.cluster.wait.aligned; ld"),),
    ),
    Planted(
        "a CTA ends while the other reads its memory",
        "exchange",
        Race,
        r"CTA \d ends while nothing orders that after CTA \d warp 0 .*ld\.shared::cluster|which has ended",
        ((f"{SYNC}  // nobody", "  // nobody"),),
    ),
    Planted(
        "the other's memory by an address of .shared::cta",
        "exchange",
        Misuse,
        r"loads in shared memory of CTA \d, which takes \.shared::cluster",
        (("ld.shared::cluster.b32 %r20", "ld.shared.b32 %r20"),),
    ),
    Planted(
        "a rank that the cluster does not have",
        "exchange",
        OutOfBounds,
        r"of CTA [23] in a cluster of 2",
        (("xor.b32 %r11, %r10, 1", "add.s32 %r11, %r10, 2"),),
    ),
    Planted(
        "arrives at the cluster's barrier twice",
        "exchange",
        Misuse,
        "again without having waited",
        ((f"{SYNC}\n  ld", f"{SYNC}\n  barrier.cluster.arrive.aligned;\n  ld"),),
    ),
    Planted(
        "one CTA does not come to the cluster's barrier",
        "exchange",
        Deadlock,
        r"for the cluster's barrier, where CTA 0 warp 0-1; CTA 1 warp 1 have come and not CTA 1 warp 0",
        ((PEER, f"{PEER} setp.eq.b32 %p3, %r7, 64; vote.sync.any.pred %p3, %p3, -1; @%p3 bar.sync 1, 64;"),),
        {"threads": 64},
    ),
    Planted(
        "mbarriers are not released to the cluster",
        "stores to the other",
        Misuse,
        r"mbarrier \+4096 of CTA \d .* nothing orders that after its initialisation",
        (("fence.mbarrier_init.release.cluster;", ""),),
    ),
    Planted(
        "a remote arrival that releases nothing",
        "stores to the other",
        Race,
        r"nothing orders this and the write by CTA \d warp 0 .*st\.shared::cluster",
        (("arrive.release.cluster.shared::cluster", "arrive.relaxed.cluster.shared::cluster"),),
    ),
    Planted(
        "arrives at its own mbarrier in place of the other's",
        "stores to the other",
        Fault,
        r"nothing orders this and the write by CTA|reads SMEM .* which nobody wrote|ends while nothing orders that",
        (
            ("_, [%r13+4096]", "_, [%r3+4096]"),
            ("arrive.release.cluster.shared::cluster", "arrive.release.cluster.shared::cta"),
        ),
    ),
    Planted(
        "a barrier counts the cluster's threads",
        "stores to the other",
        Deadlock,
        r"mbarrier \+4096 of CTA 0 .*32 of 64 arrivals pending.*arrived: CTA 1 warp 0",
        (("[%r3+4096], 32;", "[%r3+4096], 64;"),),
    ),
    Planted(
        "waits for an mbarrier of the other",
        "stores to the other",
        Misuse,
        "wanted one of this CTA's own",
        (("cluster.shared::cta.b64 %p7, [%r3", "cluster.shared::cta.b64 %p7, [%r13"),),
    ),
    Planted(
        "what atomics change is read before all have",
        "atomics",
        Race,
        r"loads|reads SMEM of CTA 0 .* orders this and the write by CTA \d warp \d .*(red|atom)|overwrites SMEM",
        ((f"{SYNC}\n  ld.shared", "ld.shared"),),
    ),
    Planted(
        "a store among atomics",
        "atomics",
        Race,
        r"overwrites SMEM of CTA 0 .* nothing orders this and the (read|write) by|reads SMEM of CTA 0",
        (("red.relaxed", "@!%p1 st.shared::cluster.u32 [%r13], %r20;\n  @%p1 red.relaxed"),),
    ),
    Planted(
        "st.async counts more bytes than come",
        "st.async",
        Deadlock,
        r"256 transaction bytes outstanding",
        ((", 256;", ", 512;"),),
    ),
    Planted(
        "st.async counts on its own mbarrier",
        "st.async",
        Misuse,
        r"a store to CTA \d that completes on another's",
        (("{%r20, %r21}, [%r13+4096]", "{%r20, %r21}, [%r3+4096]"),),
    ),
    Planted(
        "st.async is not waited for",
        "st.async",
        Fault,
        r"orders this and the write by st\.async|nobody wrote|bytes outstanding",
        ((wait(), ""),),
    ),
    Planted(
        "a bulk copy without a proxy fence",
        "bulk copy",
        Race,
        r"no fence\.proxy\.async after the generic write",
        (("fence.proxy.async.shared::cta;", ""),),
    ),
    Planted(
        "a CTA ends while a bulk copy reads its memory",
        "bulk copy",
        Leak,
        r"ends while a copy may be in flight: nobody waited for the tma",
        ((f"{SYNC}  // the other tells", "  // the other tells"),),
    ),
    Planted(
        "a multicast to one CTA of two",
        "multicast",
        Deadlock,
        r"CTA 1 warp 0 at line \d+ waits for parity 0: mbarrier \+4096 of CTA 1 .*2048 transaction bytes outstanding",
        (("mov.b16 %rs1, 3;", "mov.b16 %rs1, 1;"),),
    ),
    Planted(
        "a multicast to CTAs that there are not",
        "multicast",
        Misuse,
        r"mask 0b111 in a cluster of 2",
        (("mov.b16 %rs1, 3;", "mov.b16 %rs1, 7;"),),
    ),
    Planted(
        "a multicast of which each CTA expects its own bytes",
        "multicast",
        Fault,
        r"nothing orders this and the write by tma|nobody wrote|transaction bytes",
        ((", 2048;", ", 1024;"),),
    ),
    Planted(
        "a multicast before the other's mbarriers are made",
        "multicast",
        Misuse,
        r"no mbarrier at|nothing orders that after its initialisation",
        ((f"MADE:\n  {SYNC}", "MADE:\n bar.sync 0;"),),
    ),
    Planted(
        "a multicast over what the other still reads",
        "multicast",
        Race,
        r"overwrites SMEM of CTA \d .* the read by CTA \d warp 0|reads SMEM .* orders this and the write by tma of CTA",
        (
            ("[%r3+4104], 2;", "[%r3+4104], 1;"),
            ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r33+4104];", ""),
            ("arrive.release.cluster.shared::cluster.b64 _, [%r34", "arrive.shared::cta.b64 _, [%r3"),
        ),
    ),
    Planted(
        "a CTA ends while the other arrives at its mbarrier",
        "multicast",
        Race,
        r"ends while nothing orders that after CTA \d warp 0 .*arrive|which has ended",
        ((f"{STORE}\n  {SYNC}", STORE),),
    ),
    Planted(
        "a load that the leader hears of before its mbarriers are made",
        "256 rows",
        Misuse,
        r"no mbarrier at .* of CTA 0|nothing orders that after its initialisation",
        ((f"{SYNC}\n  ld.shared", "bar.sync 0;\n  ld.shared"),),
    ),
    Planted(
        "the leader expects the bytes of one CTA",
        "256 rows",
        Fault,
        r"nobody wrote|nothing orders|transaction bytes",
        ((", 10240;", ", 5120;"),),
    ),
    Planted(
        "a load that completes on the other's mbarrier without .cta_group::2",
        "256 rows",
        Misuse,
        "a copy to CTA 1 that completes on CTA 0",
        (("bytes.cta_group::2", "bytes"),),
    ),
    Planted(
        "a multicast for the leader to the leader alone",
        "128 rows, multicast",
        Deadlock,
        r"mbarrier \+16384 of CTA 0 .*3072 transaction bytes outstanding",
        ((MASK, "mov.b16 %rs1, 1;"),),
    ),
    Planted(
        "a multicast of which each CTA hears itself",
        "128 rows, multicast",
        Deadlock,
        r"mbarrier \+16384 of CTA 0 .*3072 transaction bytes outstanding",
        (("multicast::cluster.cta_group::2", "multicast::cluster"),),
    ),
    Planted(
        "a product before the tiles are there",
        "128 rows",
        Fault,
        r"nobody wrote|nothing orders this and the write by tma",
        ((wait("FULL", 16384), ""),),
    ),
    Planted(
        "a commit to the leader alone",
        "256 rows",
        Deadlock,
        r"CTA 1 warp 0-3 at line \d+ wait for parity 0: mbarrier \+16392 of CTA 1 .*1 of 1 arrivals pending",
        ((".multicast::cluster.b64 [%r19], %rs1;", ".b64 [%r19];"),),
    ),
    Planted(
        "a commit to the other CTA alone",
        "256 rows",
        Deadlock,
        r"CTA 0 warp 0-3 at line \d+ wait for parity 0: mbarrier \+16392 of CTA 0 .*1 of 1 arrivals pending",
        ((MASK, "mov.b16 %rs1, 2;"),),
    ),
    Planted(
        "a commit to another mbarrier",
        "256 rows",
        Deadlock,
        r"mbarrier \+16392 of CTA 0 .*1 of 1 arrivals pending",
        (("add.s32 %r19, %r3, 16392;", "add.s32 %r19, %r3, 16384;"),),
    ),
    Planted(
        "D is read before the product is done",
        "128 rows",
        Fault,
        r"TMEM of CTA \d .* orders this and the (write|read) by tcgen05|register %r100, which is not defined",
        ((wait("DONE", 16392), ""),),
    ),
    Planted(
        "D is read without a fence after the wait",
        "128 rows",
        Race,
        r"TMEM of CTA \d .*nothing orders this and the write by tcgen05\.mma of CTA 0",
        (("tcgen05.fence::after_thread_sync;\n  bar.warp.sync", "bar.warp.sync"),),
    ),
    Planted(
        "TMEM is allocated by one CTA of the pair",
        "256 rows",
        Deadlock,
        "CTA 0 warp 0 at line .* waits for a warp of CTA 1 to allocate TMEM as well",
        (("@%p2 bra ALLOCATED;", "@%p2 bra ALLOCATED; @%p3 bra ALLOCATED;"),),
    ),
    Planted(
        "the CTAs of a pair allocate differently",
        "256 rows",
        Misuse,
        "the CTAs of a pair allocate TMEM differently: (64 columns and 128|128 columns and 64)",
        (("mov.b32 %r12, 64;", "shl.b32 %r12, %r10, 6; add.s32 %r12, %r12, 64;"),),
    ),
    Planted(
        "TMEM is not freed in the other CTA",
        "256 rows",
        Deadlock,
        "CTA 0 warp 0 at line .* waits for a warp of CTA 1 to free TMEM as well",
        (("@%p2 bra FREED;", "@%p2 bra FREED; @%p3 bra FREED;"),),
    ),
    Planted(
        "TMEM is freed in neither",
        "256 rows",
        Leak,
        "TMEM of CTA 0 columns 0..63, .* never freed",
        (("@%p2 bra FREED;", "bra FREED;"),),
    ),
    Planted(
        "TMEM is freed while others read it",
        "256 rows",
        Race,
        r"overwrites TMEM of CTA \d .* the read by tcgen05\.ld",
        ((f"before_thread_sync;\n  {SYNC}", "before_thread_sync;"),),
    ),
    Planted(
        "a CTA ends while the pair's product reads its memory",
        "256 rows",
        Fault,
        r"CTA 1, which has ended|to free TMEM as well",
        ((wait("DONE", 16392), f"@%p3 bra FREED;{wait('DONE', 16392)}"),),
    ),
    Planted(
        "tcgen05 of one CTA and of two in a kernel",
        "256 rows",
        Misuse,
        "of .cta_group::1 and of .cta_group::2",
        (("tcgen05.commit.cta_group::2", "tcgen05.commit.cta_group::1"),),
    ),
    Planted(
        "a pair's product of 64 rows",
        "128 rows",
        Misuse,
        "a product of 64 x 64 with .cta_group::2",
        (
            (
                f"{8 << 24 | 1 << 4 | 1 << 7 | 1 << 10 | N >> 3 << 17};",
                f"{4 << 24 | 1 << 4 | 1 << 7 | 1 << 10 | N >> 3 << 17};",
            ),
        ),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_finds(fault):
    """Whatever the order of events."""
    program = fault.planted()
    for seed in SEEDS:
        with pytest.raises(fault.fault, match=re.compile(fault.says, re.S)) as caught:
            program.interpret(seed)
        print(caught.value)


def test_refuses_a_launch_in_other_clusters():
    program, memory = parse(pair(EXCHANGE).ptx), new_memory()
    given = {"threads": 32, "smem_bytes": 0, "params": bytes(144), "memory": memory, "events": memory.events}
    with pytest.raises(Misuse, match="launched in clusters of 1, the kernel wants 2"):
        Machine(program, grid=2, cluster_size=1, **given)
    with pytest.raises(Misuse, match="a grid of 3 CTAs is not made of clusters of 2"):
        Machine(program, grid=3, **given)
