"""Clocks: what is bound by what, in programs written by hand; and kernels that were made slower."""

import dataclasses

import numpy as np
import pytest

from interpreter import clocks, edits
from interpreter.clocks.architecture import BLACKWELL, HOPPER, constants_of
from interpreter.clocks.timing import period_of
from interpreter.kernels import long
from interpreter.kernels.launch import Kernel, launch
from interpreter.kernels.native import variant_of
from interpreter.machine.handwritten import Handwritten, wait
from interpreter.machine.hazards import Deadlock, Race
from kernels.abi import ANY, Forward
from kernels.variants import VARIANTS
from tests.test_ptx_product_forms import product

MUFU = HOPPER["mufu"].value
BULK = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"


def clocks_of(program):
    return clocks.run(program.machine()).clocks


def exponentials(count, threads, chain=False):
    """Of every thread, independent or each of the one before."""
    source = (lambda n: f"%r{20 + n - 1}" if n else "%r1") if chain else lambda n: "%r1"
    body = "\n".join(f"ex2.approx.ftz.f32 %r{20 + n}, {source(n)};" for n in range(count))
    return Handwritten(f"mov.b32 %r1, 0;\n{body}\nst.global.b32 [%rd5], %r{20 + count - 1};", threads=threads)


def test_exponentials_take_their_units_time():
    slope = (clocks_of(exponentials(60, 128)) - clocks_of(exponentials(20, 128))) / 40
    assert MUFU <= slope <= 1.2 * MUFU


def test_two_warps_share_a_quarters_exponential_unit():
    one, two = (clocks_of(exponentials(100, threads)) - clocks_of(exponentials(20, threads)) for threads in (128, 256))
    assert one == pytest.approx(80 * MUFU * HOPPER["pace"].value, rel=0.05)
    assert two == pytest.approx(160 * MUFU, rel=0.05)


def test_a_chain_takes_latencies():
    apart, chained = (
        clocks_of(exponentials(60, 32, chain)) - clocks_of(exponentials(20, 32, chain)) for chain in (False, True)
    )
    assert apart == pytest.approx(40 * MUFU * HOPPER["pace"].value, rel=0.1)
    assert chained == pytest.approx(40 * HOPPER["mufu latency"].value, rel=0.1)


@pytest.mark.parametrize("times", [8, 24])
def test_a_chain_of_products_is_bound_by_the_tensor_pipe_or_shared_memory(times):
    program, _ = product()
    mma = [x for x in program.body.splitlines() if "tcgen05.mma" in x][-1]
    more = dataclasses.replace(program, body=program.body.replace(mma, "\n".join([mma] * (1 + times))))
    few, many = (clocks.run(x.machine()) for x in (program, more))
    x = many.sm.pipe.done[-1].demand
    assert len(many.sm.pipe.done) == len(few.sm.pipe.done) + times
    assert many.clocks - few.clocks == pytest.approx(times * max(x.tensor, x.smem), rel=0.05)


def ring(stages, chunks=12, size=1024):
    """Copies by TMA, of which so many are in flight."""
    bars = range(32768, 32768 + 8 * stages, 8)

    def issue(n):
        bar, to = bars[n % stages], size * (n % stages)
        return f"""
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3+{bar}], {size};
  @%p1 {BULK} [%r3+{to}], [%rd2+{size * n}], {size}, [%r3+{bar}];"""

    def arrived(n):
        return wait(f"CHUNK{n}", bars[n % stages], n // stages % 2)

    made = "\n".join(f"@%p1 mbarrier.init.shared::cta.b64 [%r3+{bar}], 1;" for bar in bars)
    steps = [issue(n) for n in range(stages)]
    for n in range(chunks):
        steps += [arrived(n)] + ([issue(n + stages)] if n + stages < chunks else [])
    body = f"setp.eq.s32 %p1, %r1, 0;\n{made}\nfence.mbarrier_init.release.cluster;\nbar.sync 0;" + "".join(steps)
    return Handwritten(f"{body}\nst.global.b32 [%rd5], %r1;", source=np.zeros(chunks * size // 4, np.int32))


def test_a_ring_hides_latency_with_enough_stages_and_not_with_one():
    one, two, six = (clocks_of(ring(stages)) for stages in (1, 2, 6))
    latency = HOPPER["tma latency"].value
    assert one > 12 * latency
    assert two == pytest.approx(one / 2, rel=0.1)
    assert six < one / 4


def test_conflicts_of_banks_take_longer():
    def stores(shift):
        body = "\n".join(f"st.shared.b32 [%r8+{4 * n}], %r1;" for n in range(16))
        return Handwritten(f"shl.b32 %r8, %r1, {shift};\nadd.s32 %r8, %r8, %r3;\n{body}\nst.global.b32 [%rd5], %r1;")

    alone, conflicting = (clocks.run(stores(shift).machine()).sm.smem.busy["st.shared"] for shift in (2, 9))
    assert (alone, conflicting) == (16, 16 * 32)


def test_what_is_wrong_is_found_by_clocks_too():
    with pytest.raises(Race, match="two lanes"):
        clocks.run(Handwritten("st.shared.b32 [%r3], %r1;\nst.global.b32 [%rd5], %r1;").machine())
    never = Handwritten(f"""
  setp.eq.s32 %p1, %r1, 0;
  @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
  bar.sync 0;
  {wait("NEVER", 0)}""")
    with pytest.raises(Deadlock, match="waits for parity 0"):
        clocks.run(never.machine())


def test_a_turn_is_the_least_that_repeats():
    assert period_of("abcabcabca") == 3
    assert period_of("aaaa") == 1
    assert period_of("abcdefg") == 0


def test_every_number_has_a_source():
    assert set(HOPPER) == set(BLACKWELL)
    assert all(x.value >= 0 and x.unit and x.source for x in (*HOPPER.values(), *BLACKWELL.values()))
    assert constants_of("sm_100f") is BLACKWELL and constants_of("sm_90a") is HOPPER
    with pytest.raises(LookupError, match="no clocks are known of sm_80"):
        constants_of("sm_80")


@pytest.mark.parametrize("op", ["mla_span_fwd_v512", "mla_sparse_fwd_v512", "mla_span_fwd"])
def test_values_of_a_long_run_are_numbers_of_its_keys(op):
    variant = next(v for v in VARIANTS if isinstance(v, Forward) and v.name == op and v.max_heads == ANY)
    (source,) = long.operands(variant, 64, 128).sources
    assert source.v.shape[-1] == variant.d_v == 512
    np.testing.assert_array_equal(source.v, source.k[..., :512])


def test_a_kernel_with_every_exponential_twice_is_slower():
    kernel = Kernel.of(variant_of("mha_fwd_sm_90a_d64_bfloat16"))
    twice = edits.replace(kernel.ptx, r"ex2\.approx[^;]*;", lambda m: f"{m[0]} {m[0]}")
    x = long.operands(kernel.variant, kernel.facts["tile_m"], 640)
    usual, slower = (
        clocks.run(launch(dataclasses.replace(kernel, ptx=ptx), x, processors=1).machine) for ptx in (kernel.ptx, twice)
    )
    assert slower.clocks > 1.2 * usual.clocks
    assert 0.4 < usual.steady().tensor / usual.steady().clocks < 0.9
    text = str(usual)
    assert all(
        x in text for x in ("clocks", "mufu", "SMEM by cause", "steady state: tensor pipe", "64x128", "longest chain")
    )
