"""Programs whose time is one unit's: what the interpreter's clocks take for granted of a chip, to be measured on one.

Each repeats something. The difference between two numbers of repeats is what a repeat takes: by a clock of the SM on a
chip, by `interpreter.clocks` without one. The body marks where the clock is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from interpreter import clocks
from interpreter.machine.copies import TensorMap
from interpreter.machine.handwritten import SYNC, Handwritten, wait
from tests.test_ptx_product_forms import product

BEGIN, END = "// the clock begins", "// the clock ends"
THREADS = 128


@dataclass(frozen=True)
class Rate:
    name: str
    unit: str
    program: Callable[[int], Handwritten]  # of so many repeats
    amount: float = 0.0  # of the unit that a repeat moves in a clock's time; 0: the unit is clocks
    few: int = 8
    many: int = 24
    everywhere: bool = False  # on a chip all SMs run it
    tells: str = ""  # what a miss would say

    def of(self, taken: Callable[[Handwritten], float]) -> float:
        """Returns the rate in its unit, where `taken` tells the clocks of a program."""
        few, many = (taken(self.program(n)) for n in (self.few, self.many))
        each = (many - few) / (self.many - self.few)
        return self.amount / each if self.amount else each

    def expected(self, target: str) -> float:
        return self.of(lambda x: clocks.run(replace(x, target=target).machine()).clocks)

    def measured(self, target: str, sms: int, rounds: int = 9) -> float:
        """Measures on the first CUDA device; of several runs the one in the middle counts."""

        def taken(x: Handwritten) -> float:
            x = timed(replace(x, target=target, ctas=sms if self.everywhere else x.ctas))
            runs = sorted(float(x.on_device().reshape(-1)[0]) for _ in range(rounds))
            return runs[rounds // 2]

        return self.of(taken)


def timed(x: Handwritten) -> Handwritten:
    """The first word of the result is what thread 0 read off its SM's clock."""
    assert BEGIN in x.body, x.body
    assert END in x.body, x.body
    body = x.body.replace(BEGIN, "mov.u64 %rd15, %clock64;").replace(END, "mov.u64 %rd16, %clock64;")
    store = """
  setp.ne.b32 %p8, %r7, 0;
  @%p8 bra KEPT;
  sub.s64 %rd16, %rd16, %rd15;
  cvt.u32.u64 %r198, %rd16;
  st.global.b32 [%rd4], %r198;
KEPT:
"""
    return replace(x, body=body + store)


# ---- products


def products(times: int, collector: bool = False, **form: object) -> Handwritten:
    """So many of them more, by one thread."""
    program, _ = product(**form)  # type: ignore[arg-type]
    lines = program.body.splitlines()
    (first, last) = (k for k, x in enumerate(lines) if x.strip().startswith("tcgen05.mma"))
    name, operands = lines[last].split(maxsplit=1)
    repeated = [f"  {name}{f'.collector::a::{does}' if collector else ''} {operands}" for does in ("fill", "use")]
    lines[last + 1 : last + 1] = [repeated[k % 2] for k in range(times)]
    lines.insert(first, BEGIN)
    return replace(program, body="\n".join(lines).replace("DONE;\n", f"DONE;\n  {END}\n", 1))


def loads(n: int) -> str:
    """16 bytes a lane by the warps 1 to 3, n times each."""
    load = "  ld.volatile.shared.v4.b32 {%r190, %r191, %r192, %r193}, [%r9];"
    lines = "\n".join([load] * n)
    return f"  @!%p2 bra LOADED;\n  shl.b32 %r9, %r1, 4;\n  add.s32 %r9, %r9, %r3;\n{lines}\nLOADED:"


def beside_loads(n: int) -> Handwritten:
    """Products of 128 x 128, with some eight loads of 512 bytes beside each."""
    program = products(n, m=128, n=128)
    return replace(program, body=program.body.replace("ISSUED:", f"ISSUED:\n{loads(8 * n // 3)}"))


def beside_shuffles(n: int) -> Handwritten:
    """Products of 128 x 128, with some 32 shuffles beside each, by the warps 1 to 3."""
    program = products(n, m=128, n=128)
    given = [f"  mov.b32 %r{190 + k}, %r1;" for k in range(8)]
    lines = [f"  shfl.sync.bfly.b32 %r{190 + k % 8}, %r{190 + k % 8}, 1, 31, -1;" for k in range(32 * n // 3)]
    beside = "\n".join(["  @!%p2 bra SHUFFLED;", *given, *lines, "SHUFFLED:"])
    return replace(program, body=program.body.replace("ISSUED:", f"ISSUED:\n{beside}"))


def beside_copies(n: int) -> Handwritten:
    """Products of 128 x 128, with a copy of 2 KiB from memory beside each, all by one thread of warp 1."""
    program = products(n, m=128, n=128)
    size = 2048
    source = np.concatenate([program.given, np.zeros(size // 4, np.uint32)])
    copy = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
    lines = "\n".join(
        f"  {copy} [%r3+{8192 + size * k if k < 12 else 34816 + size * (k - 12)}], [%rd14], {size}, [%r3+32784];"
        for k in range(n)
    )
    beside = f"""
  setp.ne.b32 %p5, %r1, 32;
  @%p5 bra COPIED;
  add.s64 %rd14, %rd2, {4 * len(program.given)};
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+32784], {size * n};
{lines}
  {wait("COPIES", 32784)}
COPIED:
"""
    made = "  mbarrier.init.shared::cta.b64 [%r3+32784], 1;\n  fence.mbarrier_init"
    body = program.body.replace("  fence.mbarrier_init", made, 1).replace("ISSUED:", f"ISSUED:\n{beside}")
    return replace(program, body=body, source=source)


# ---- other units


CHAINS = 50  # of exponentials of exponentials, no two of which begin alike: ptxas computes nothing twice


def exponentials(n: int, warps: int = 8) -> Handwritten:
    """A program of n exponentials of every lane; each hangs on the one before it in its chain alone."""
    chains = [f"%r{20 + k}" for k in range(CHAINS)]
    given = "\n".join(f"sub.s32 {x}, {-k}, %r1;\ncvt.rn.f32.s32 {x}, {x};" for k, x in enumerate(chains))
    body = "\n".join(f"ex2.approx.ftz.f32 {x}, {x};" for x in (chains[k % CHAINS] for k in range(n)))
    used = "\n".join(f"add.f32 %r19, %r19, {x};" for x in chains)
    parts = (given, "bar.sync 0;", BEGIN, body, "mov.b32 %r19, 0;", used, "bar.sync 0;", END)
    return Handwritten("\n".join([*parts, "st.global.b32 [%rd5], %r19;"]), threads=32 * warps)


def ring(n: int, size: int = 8192, stages: int = 7) -> Handwritten:
    """n chunks from memory by bulk copies, `stages` of them under way."""
    bars = [61440 + 8 * k for k in range(stages)]

    def issue(k: int) -> str:
        bar, place = f"[%r3+{bars[k % stages]}]", f"[%r3+{size * (k % stages)}], [%rd2+{size * (k % 16)}]"
        return f"""
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, {bar}, {size};
  @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes {place}, {size}, {bar};"""

    steps = [issue(k) for k in range(min(n, stages))]
    for k in range(n):
        steps += [wait(f"CHUNK{k}", bars[k % stages], k // stages % 2)] + (
            [issue(k + stages)] if k + stages < n else []
        )
    made = "\n".join(f"@%p1 mbarrier.init.shared::cta.b64 [%r3+{bar}], 1;" for bar in bars)
    body = f"""
setp.eq.s32 %p1, %r1, 0;
{made}
fence.mbarrier_init.release.cluster;
bar.sync 0;
{BEGIN}
{"".join(steps)}
{END}
st.global.b32 [%rd5], %r1;
"""
    return Handwritten(body, source=np.zeros(16 * size // 4, np.uint32))


def to_a_peer(n: int, size: int = 1024) -> Handwritten:
    """n copies from each CTA of two into the other's shared memory."""
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    body = f"""
  mov.u32 %r10, %cluster_ctarank;
  xor.b32 %r11, %r10, 1;
  mapa.shared::cluster.u32 %r13, %r3, %r11;
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+61440], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+61440], {size * n};
MADE:
  {" ".join(f"st.shared.b32 [%r4+{at}], %r1;" for at in range(0, size, 4 * THREADS))}
  fence.proxy.async.shared::cta;
  {SYNC}
  {BEGIN}
  @%p1 bra SENT;
  {" ".join(f"{copy} [%r13+{size * (1 + k)}], [%r3], {size}, [%r13+61440];" for k in range(n))}
SENT:
  {wait("COME", 61440)}
  {END}
  st.global.b32 [%rd5], %r1;
  {SYNC}
"""
    return Handwritten(body, threads=THREADS, ctas=2, cluster=2)


def gathers(n: int) -> Handwritten:
    """n times four rows of 128 bytes, anywhere in 64."""
    rows = np.random.default_rng(0).integers(0, 64, (n, 4))
    form = "shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    lines = "\n".join(
        f"  cp.async.bulk.tensor.2d.{form} [%r3+{512 * k}], [%rd7, {{0, {', '.join(map(str, x))}}}], [%r3+61440];"
        for k, x in enumerate(rows)
    )
    body = f"""
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+61440], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+61440], {512 * n};
  mov.b64 %rd7, map;
  cvta.param.u64 %rd7, %rd7;
  {BEGIN}
{lines}
MADE:
  bar.sync 0;
  {wait("COME", 61440)}
  {END}
  st.global.b32 [%rd5], %r1;
"""
    words = np.zeros((64, 32), np.uint32)
    return Handwritten(
        body, words, tensor=lambda at: TensorMap(at, 4, (32, 1), (32, 64), (128,), 128), target="sm_100a"
    )


def tmem_loads(n: int, columns: int = 32) -> Handwritten:
    """Four loads of 32 columns and a wait, n times by each of four warps. ptxas keeps loads that are used in part."""
    words = [", ".join(f"%r{20 + columns * part + k}" for k in range(columns)) for part in range(4)]
    used = "\n".join(f"  add.s32 %r19, %r19, %r{20 + columns * part};" for part in range(4))
    loads = "\n".join(f"  tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{x}}}, [%r18];" for x in words)
    body = f"""
  setp.ge.s32 %p2, %r1, 32;
  @%p2 bra ALLOCATED;
  mov.b32 %r12, 64;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3+32776], %r12;
ALLOCATED:
  bar.sync 0;
  ld.shared.b32 %r13, [%r3+32776];
  and.b32 %r18, %r1, 96;
  shl.b32 %r18, %r18, 16;
  add.s32 %r18, %r18, %r13;
  {" ".join(f"mov.b32 %r{20 + k}, %r1;" for k in range(columns))}
  tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r18], {{{words[0]}}};
  tcgen05.wait::st.sync.aligned;
  {BEGIN}
  mov.b32 %r19, 0;
{chr(10).join([f"{loads}{chr(10)}  tcgen05.wait::ld.sync.aligned;{chr(10)}{used}"] * n)}
  {END}
  st.global.b32 [%rd5], %r19;
  tcgen05.fence::before_thread_sync;
  bar.sync 0;
  tcgen05.fence::after_thread_sync;
  @%p2 bra FREED;
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r13, %r12;
FREED:
"""
    return Handwritten(body, threads=THREADS, target="sm_100a")


def repeated(**form: object) -> Callable[[int], Handwritten]:
    return lambda times: products(times, **form)  # type: ignore[arg-type]


INTERVAL = "the tensor pipe's rate, or shared memory's for its operands"
TOGETHER = "whether {} and operands of products share shared memory's 128 bytes a clock"
COMMENT = "12 + N / 4 clocks, which a comment in others' source says"
RATES = (
    Rate("product, 128 x 64", "clocks", repeated(m=128, n=64), tells=INTERVAL),
    Rate("product, 128 x 128", "clocks", repeated(m=128, n=128), tells=INTERVAL),
    Rate("product, 128 x 128 in 8 bits", "clocks", repeated(kind="f8f6f4", m=128, n=128), tells=INTERVAL),
    Rate(
        "product, 128 x 64, A kept by the collector",
        "clocks",
        repeated(m=128, n=64, collector=True),
        tells="whether an A that is kept is not read again; the clocks read it",
    ),
    Rate("product of one CTA with 64 rows, .ws, 64 x 128", "clocks", repeated(m=64, n=128, ws=True), tells=COMMENT),
    Rate("the same, A in TMEM", "clocks", repeated(m=64, n=128, ws=True, a_in_tmem=True), tells=COMMENT),
    *(
        Rate(
            f"product of a pair, {m} x 128, A in TMEM",
            "clocks",
            repeated(m=m, n=128, group=2, a_in_tmem=True),
            tells=INTERVAL,
        )
        for m in (128, 256)
    ),
    Rate(
        "product, 128 x 128, beside warps' loads", "clocks", beside_loads, few=9, tells=TOGETHER.format("warps' loads")
    ),
    Rate("product, 128 x 128, beside shuffles", "clocks", beside_shuffles, few=9, tells=TOGETHER.format("shuffles")),
    Rate("product, 128 x 128, beside copies", "clocks", beside_copies, tells=TOGETHER.format("copies")),
    Rate("four loads of 32 columns of TMEM, and a wait", "clocks", tmem_loads, tells="TMEM's rate, assumed"),
    Rate("gathers of four rows", "bytes a clock", gathers, amount=512, few=16, many=80, tells="gather4's rate"),
    Rate(
        "exp2",
        "clocks a warp, of two in a quarter",
        exponentials,
        few=50,
        many=100,
        tells="the exponential unit's rate",
    ),
    Rate("copies out of L2, all SMs", "bytes a clock", ring, 8192, few=16, many=48, everywhere=True, tells="L2's rate"),
    Rate("copies to a peer", "bytes a clock", to_a_peer, 1024, many=40, tells="the rate between two CTAs of a cluster"),
)
"""Those for sm_90a run on Hopper and Blackwell."""
