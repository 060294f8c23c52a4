"""Rules of the manual that a B200 does not need: each is a switch of its own; without it the chip's way is taken."""

import re
from dataclasses import replace

import numpy as np
import pytest

from interpreter.edits import replacing
from interpreter.machine.handwritten import SYNC, Handwritten, wait
from interpreter.machine.hazards import Fault, Leak, Misuse, Race
from interpreter.machine.rules import CHIP, MANUAL, Rule
from tests.test_ptx_forms import BULK
from tests.test_ptx_product_forms import PRODUCTS, product

SEEDS = range(6)
WAIT_LD = "tcgen05.wait::ld.sync.aligned;"
DENSE, D = product()
PAIR, D_OF_PAIR = product(**PRODUCTS["a pair's 256 rows, A in TMEM"])


def edited(program, *pairs):
    return replace(program, body=replacing(*pairs)(program.body))


def with_half_again(program):
    """The products once more, of the first half of B's columns, onto the first half of D's."""
    both = [x for x in program.body.splitlines() if "tcgen05.mma" in x]
    descriptor = 1 << 4 | 1 << 7 | 1 << 10 | 32 >> 3 << 17 | 128 >> 4 << 24
    again = "\n".join([f"mov.b32 %r17, {descriptor};", *both]).replace("%r14", "%r17")
    return edited(program, (both[1], f"{both[1]}\n{again}"))


def by_cp_async(program):
    """With cp.async in place of loads and stores, and an mbarrier of the copies in place of fences and barriers."""
    at = range(0, program.source.nbytes, 512)
    copies = " ".join(f"cp.async.ca.shared.global [%r4+{x}], [%rd6+{x}], 4;" for x in at)
    loads = next(x for x in program.body.splitlines() if "ld.global" in x)
    barrier = "mbarrier.init.shared::cta.b64 [%r3+32768], 1;"
    synced = f"  tcgen05.fence::before_thread_sync;\n  {SYNC}\n  tcgen05.fence::after_thread_sync;\n  @%p1 bra ISSUED;"
    arrives = "  cp.async.mbarrier.arrive.noinc.shared.b64 [%r3+32784];"
    return edited(
        program,
        (loads, copies),
        ("  fence.proxy.async.shared::cta;\n  @%p1 bra MADE;", "  @%p1 bra MADE;"),
        (barrier, f"{barrier}\n  mbarrier.init.shared::cta.b64 [%r3+32784], 128;"),
        (synced, f"{arrives}\n{wait('COPIED', 32784)}  @%p1 bra ISSUED;"),
    )


def with_another_commit(program):
    """One before, which arrives at an mbarrier of the other CTA that nobody waits for."""
    barrier, commit = "mbarrier.init.shared::cta.b64 [%r3+32768], 1;", "  add.s32 %r15, %r3, 32768;\n"
    form = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
    another = f"  mov.b16 %rs2, 2;\n  add.s32 %r15, %r3, 32784;\n  {form} [%r15], %rs2;\n"
    return edited(
        program,
        (barrier, f"{barrier}\n  mbarrier.init.shared::cta.b64 [%r3+32784], 1;"),
        (commit, another + commit),
    )


COPIED = f"""
  setp.ne.b32 %p1, %r1, 0;
  setp.ge.s32 %p2, %r1, 32;
  @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r3+4096], 32;
MADE:
  bar.sync 0;
  @!%p2 bra READ;
  st.shared.b32 [%r4+1024], %r1;
  cp.async.ca.shared.global [%r4], [%rd3], 4;
  cp.async.mbarrier.arrive.noinc.shared.b64 [%r3+4096];
  bra STORED;
READ:
  {wait("COME", 4096)}
  ld.shared.b32 %r8, [%r4+1152];
  ld.shared.b32 %r9, [%r4+128];
  add.s32 %r8, %r8, %r9;
  st.global.b32 [%rd5], %r8;
STORED:
"""

LOADED = f"""
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra ISSUED;
  mbarrier.init.shared::cta.b64 [%r3], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;
  add.s32 %r8, %r3, 1024;
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r8], [%rd2], 128, [%r3];
ISSUED:
  bar.sync 0;
  {wait("COME", 0)}
  ld.shared.b32 %r9, [%r4+1024];
  st.global.b32 [%rd5], %r9;
"""

EARLY_END = f"""
  mov.u32 %r8, %cluster_ctarank;
  xor.b32 %r9, %r8, 1;
  mapa.shared::cluster.u32 %r10, %r4, %r9;
  {SYNC}
  st.shared::cluster.b32 [%r10], %r1;
  st.global.b32 [%rd5], %r1;
  barrier.cluster.arrive.relaxed.aligned;
  barrier.cluster.wait.aligned;
"""

# A rule: a program that breaks it, what is raised and said, and what it answers without the rule.
BREACHES = {
    Rule.TMEM_FENCES: (
        edited(DENSE, (f"{wait('DONE', 32768)}\n  tcgen05.fence::after_thread_sync;", wait("DONE", 32768))),
        Race,
        r"no tcgen05\.fence::after_thread_sync",
        D,
    ),
    Rule.WAIT_LD: (
        edited(DENSE, (WAIT_LD, ""), ("STORED:\n", f"STORED:\n  {WAIT_LD}\n")),
        Race,
        "nothing waited for it",
        D,
    ),
    Rule.LD_ORDER: (edited(DENSE, (WAIT_LD, "")), Race, "nothing orders this and the read by tcgen05.ld", D),
    Rule.PRODUCT_ORDER: (with_half_again(DENSE), Race, "nothing orders this and the write by tcgen05.mma", D),
    Rule.COMMIT_ORDER: (
        with_another_commit(PAIR),
        Race,
        r"CTA 1 ends while nothing orders that after tcgen05\.commit|CTA 1, which has ended",
        D_OF_PAIR,
    ),
    Rule.EXPECTED_BYTES: (
        Handwritten("""
  st.global.b32 [%rd5], %r1;
  setp.ne.b32 %p1, %r1, 0;
  @%p1 bra DONE;
  mbarrier.init.shared::cta.b64 [%r3], 1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
DONE:
"""),
        Leak,
        "ends with 512 transaction bytes outstanding",
        np.arange(32),
    ),
    Rule.LAST_STORES: (
        Handwritten(
            BULK.format(copy="cp.async.bulk.global.shared::cta.bulk_group [%rd4], [%r3], 128;").replace(
                "cp.async.bulk.wait_group 0;", ""
            )
        ),
        Leak,
        "ends while TMA may still read shared memory",
        np.arange(32),
    ),
    Rule.NAMED_BARRIERS: (
        Handwritten(
            "setp.ge.s32 %p1, %r1, 32;\n  @%p1 bra DONE;\n  bar.arrive 1, 64;\nDONE:\n  st.global.b32 [%rd5], %r1;",
            threads=64,
        ),
        Leak,
        "named barrier 1 ends with 32 of 64 threads arrived",
        np.arange(64),
    ),
    Rule.OWN_LANES: (
        edited(DENSE, ("and.b32 %r18, %r1, 96;", "mov.b32 %r18, 0;")),
        Misuse,
        r"32x32b at lane 0 by a warp that may access lanes (32|64|96)\.\.",
        D,
    ),
    Rule.CP_ASYNC_PROXY: (
        by_cp_async(DENSE),
        Race,
        r"no fence\.proxy\.async after the generic write by cp\.async",
        D,
    ),
    Rule.OWN_STORES: (
        Handwritten(COPIED, threads=64),
        Race,
        r"while nothing orders this and the write by warp 1 .*st\.shared",
        np.concatenate([2 * np.arange(32, 64), np.full(32, 0xFFFFFFFF)]),
    ),
    Rule.INIT_FENCE: (
        Handwritten(LOADED),
        Misuse,
        "no fence.mbarrier_init or fence.proxy.async between the initialisation",
        np.arange(32),
    ),
    Rule.RELAXED_END: (
        Handwritten(EARLY_END, ctas=2, cluster=2),
        Race,
        r"CTA \d ends while nothing orders that after .*st\.shared::cluster",
        np.tile(np.arange(32), 2),
    ),
    Rule.DESCRIPTOR_VERSION: (
        replace(DENSE, body=re.sub(r"\b\d{14,}\b", lambda m: str(int(m[0]) & ~(7 << 46)), DENSE.body)),
        Misuse,
        "with 0b000 in bits 46 to 48",
        D,
    ),
}
IMPLIED = {Rule.LD_ORDER: {Rule.WAIT_LD}}  # a rule: those that a program which breaks it breaks as well


def test_every_rule_is_tested():
    assert set(BREACHES) == set(Rule) == MANUAL and not CHIP


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_a_rule_is_a_switch_of_its_own(rule):
    program, raises, says, want = BREACHES[rule]
    for seed in SEEDS:
        implied = IMPLIED.get(rule, set())
        with pytest.raises(raises, match=says):
            program.interpret(seed, MANUAL - implied)
        with pytest.raises(raises, match=says):
            program.interpret(seed, CHIP | {rule})
        for rules in (MANUAL - {rule} - implied, CHIP):
            got = program.interpret(seed, rules)
            np.testing.assert_array_equal(got.view(np.float32) if want.dtype == float else got, want)


@pytest.mark.parametrize(
    ("lost", "raises"),
    [
        ("tcgen05.commit", Fault),
        ("tcgen05.wait::st", Race),
        ("fence.proxy.async", Race),
        ("tcgen05.dealloc", Leak),
    ],
)
def test_the_chip_still_needs_order(lost, raises):
    """Without any rule, what no rule is about is still found."""
    program = product(**PRODUCTS["ws, 64 rows, an A in TMEM for each half of the columns"])[0]
    body = "\n".join(x for x in program.body.splitlines() if not x.strip().startswith(lost))
    for seed in SEEDS:
        with pytest.raises(raises):
            replace(program, body=body).interpret(seed, CHIP)
