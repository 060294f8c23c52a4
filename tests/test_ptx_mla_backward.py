"""Hopper's backward kernels in the interpreter: right gradients in any order of events, and planted faults.

The interpreter must find each fault by a symptom that only this fault has.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import numpy as np
import pytest

from interpreter import edits, hardware
from interpreter.faults import PlantedFault
from interpreter.kernels import attention, gradients, mla_backward, native
from interpreter.kernels.launch import Kernel
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Deadlock, OutOfBounds, Race, Undefined
from kernels.abi import MlaBackward

BUILT = [v.key for v in native.built(MlaBackward) if v.arch == "sm_90a"]
ALL_KEYS = 1 << 30  # a width
SHAPES: dict[str, dict[str, int]] = {
    # two tiles of keys and a part of one; heads of several queries in a tile of rows where they see the same keys
    "tiles": {"b": 1, "s_q": 3, "s_kv": 149, "h_q": 8, "s_kv1": 81, "topk": 133, "width": ALL_KEYS},
    # a window that begins within a tile, two batch entries
    "window": {"b": 2, "s_q": 9, "s_kv": 134, "h_q": 8, "s_kv1": 32, "topk": 40},
    # rows that fill no tile, and keys that do not either
    "few": {"b": 1, "s_q": 3, "s_kv": 3, "h_q": 5, "s_kv1": 3, "topk": 3},
    # more tiles of rows than CTAs, two of a query where keys are gathered
    "turns": {"b": 1, "s_q": 2, "s_kv": 94, "h_q": 72, "s_kv1": 9, "topk": 65, "width": 64},
    # several heads of keys
    "groups": {"b": 1, "s_q": 7, "s_kv": 104, "h_q": 12, "h_kv": 2, "width": ALL_KEYS},
}
PROCESSORS = {"tiles": 2, "window": 2, "few": 1, "turns": 1, "groups": 2}


def is_like(variant: MlaBackward, case: str) -> bool:
    """Whether another variant, or another case, shows what this one could: of few heads, a tile has one query."""
    if variant.max_heads == 64 and not variant.gathers:  # as with a cluster, except how sums go out
        return case != "groups"
    return variant.max_heads == 16 and (case != "turns" or len(variant.sources) == 1)


TURNING = [  # what differs from the others is at the begin and the end of a tile of rows
    ("mla_span_bwd_turned_sm_90a_d512_bfloat16_h64", "groups"),
    ("csa_bwd_turned_sm_90a_d512_bfloat16_h64", "tiles"),
    ("csa_bwd_turned_sm_90a_d512_bfloat16_h64", "few"),
    ("hca_bwd_turned_sm_90a_d512_bfloat16", "tiles"),
]
RUNS = [run for run in TURNING if run[0] in BUILT] + [
    (v.key, case)
    for v in map(native.variant_of, BUILT)
    for case in SHAPES
    if (not v.turns and not v.deterministic and (case != "groups" or v.op == "mla_span_bwd") and not is_like(v, case))
    or ((v.name, case) == ("csa_bwd", "few") and not v.deterministic)
    or (v.deterministic and (v.op, case) in (("mla_span_bwd", "groups"), ("csa_bwd", "turns")))
    or (v.deterministic and (v.name, case) == ("mla_sparse_bwd_v512", "turns"))
    or (v.bounds and (v.op, case) in (("mla_sparse_bwd", "few"), ("hca_bwd", "window")))
]


@functools.cache
def kernel(key: str) -> Kernel:
    variant = native.variant_of(key)
    if key not in BUILT:
        pytest.skip(f"{key} is not built")
    return Kernel.of(variant)


@pytest.mark.parametrize(("key", "case"), RUNS)
def test_is_right_in_any_order(key, case):
    """dq has the same bits in every order; dkv differs as sums in another order do, or not at all."""
    variant, extents = kernel(key).variant, SHAPES[case]
    if variant.gathers:  # each query has its own tile of rows
        extents = {**extents, "s_q": min(extents["s_q"], 2), "h_q": min(extents["h_q"], variant.max_heads + 8)}
    x, results = gradients.operands(variant, **extents), []
    # a window is the largest case, and kernels that turn q add as others do
    for seed in range(1 if case == "window" or variant.turns else 2):
        run = mla_backward.launch(kernel(key), x, processors=PROCESSORS[case], seed=2 * RUNS.index((key, case)) + seed)
        results.append(run.run())
        mla_backward.judge(run, results[-1])
    if variant.bounds:
        for a, b in zip(results[0], results[-1], strict=True):
            np.testing.assert_array_equal(a, b)
        return
    (dq, *sums), (other_dq, *other_sums) = results[0], results[-1]
    np.testing.assert_array_equal(dq.view(np.uint16), other_dq.view(np.uint16))
    for a, b in zip(sums, other_sums, strict=True):
        if variant.deterministic:
            np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_span_ends_where_its_keys_do():
    """Nothing is added before the first key's gradient or after the last one's."""
    k = kernel("mla_span_bwd_sm_90a_d512_bfloat16")
    x = gradients.operands(k.variant, **SHAPES["few"] | {"s_kv": 70, "width": ALL_KEYS})
    run = mla_backward.launch(k, dataclasses.replace(x, attention=attention.beyond(x.attention)))
    run.operands = x
    mla_backward.judge(run, run.run())


def test_what_is_not_finite_marks_the_keys_that_see_it():
    """A bound is NaN where a row with NaN sees the key, and as always elsewhere; in many tiles of rows, whose marks add
    up to nothing."""
    k = kernel(BOUND)
    x = gradients.operands(k.variant, **SHAPES["window"])
    counts = x.attention.sources[0].counts
    of_batch = slice(0, 1), slice(2, 9)  # queries of several tiles of rows
    x.do[of_batch] = np.nan
    run = mla_backward.launch(k, x)
    (got,) = run.run()
    marked = np.isnan(got[..., 0, 0])
    assert marked[0, counts[of_batch].any((0, 1))].all() and not marked[1].any()
    x.do[of_batch] = 0
    want = gradients.bounds(x, run.scale)[0]
    assert (got[1] >= want[1]).all()


# ---- against the chip

COMPARED = (
    "mla_span_bwd_sm_90a_d512_bfloat16",
    "csa_bwd_sm_90a_d512_bfloat16_deterministic",
    "mla_sparse_bwd_v512_sm_90a_d576_bfloat16",
)


@pytest.mark.parametrize("key", COMPARED)
def test_agrees_with_hardware(key):
    """Up to the order of sums, and how the chip rounds exp2, which sometimes rounds P or dS another way."""
    recorded = hardware.RUNS[key]
    x = recorded.operands()
    run = mla_backward.launch(kernel(key), x, processors=1)
    for got, want in zip(recorded.kept(run.run()), hardware.recorded(recorded, x).results, strict=True):
        assert np.sum((got - want) ** 2) <= 1e-6 * np.sum(want**2)


# ---- faults

SPAN, SELECTION = "mla_span_bwd_sm_90a_d512_bfloat16", "mla_sparse_bwd_sm_90a_d512_bfloat16_h64"
BOTH = "csa_bwd_sm_90a_d512_bfloat16_h64"
FEW = "mla_sparse_bwd_sm_90a_d512_bfloat16_h16"
LATENT = "mla_sparse_bwd_v512_sm_90a_d576_bfloat16"
FIXED_LATENT = f"{LATENT}_deterministic"
FIXED = "mla_span_bwd_sm_90a_d512_bfloat16_deterministic"
BOUND = "mla_span_bounds_sm_90a_d512_bfloat16_deterministic"
TURNED = "mla_span_bwd_turned_sm_90a_d512_bfloat16_h64"
OF_FAULTS = {
    SPAN: {"b": 1, "s_q": 6, "s_kv": 150, "h_q": 8, "width": ALL_KEYS},  # one tile of rows, three of keys
    FIXED: {"b": 1, "s_q": 9, "s_kv": 100, "h_q": 8, "width": ALL_KEYS},  # two, which a cluster takes
    BOUND: {"b": 1, "s_q": 9, "s_kv": 100, "h_q": 8, "width": ALL_KEYS},
    SELECTION: {"b": 1, "s_q": 4, "s_kv": 300, "h_q": 8, "topk": 190},
    BOTH: {"b": 1, "s_q": 3, "s_kv": 150, "h_q": 8, "s_kv1": 70, "topk": 20, "width": ALL_KEYS},
    FEW: {"b": 1, "s_q": 3, "s_kv": 300, "h_q": 8, "topk": 150},
    LATENT: {"b": 1, "s_q": 2, "s_kv": 300, "h_q": 24, "topk": 150},
    FIXED_LATENT: {"b": 1, "s_q": 2, "s_kv": 200, "h_q": 24, "topk": 100},
    TURNED: {"b": 1, "s_q": 5, "s_kv": 94, "h_q": 50, "width": 64},  # several tiles of rows
}
BARRIERS = [  # in the order of their addresses
    *(f"{name}{piece}" for name in ("q_full", "q_empty", "k_full") for piece in range(4)),
    *("k_empty0", "k_empty1", "listed", "p_ds_full", "p_ds_empty", "published"),
    *("received_full0", "received_full1", "received_empty0", "received_empty1"),
]
OF_FEW = ["published", "q_full", "q_empty", "listed", "k_empty", *(f"k_full{piece}" for piece in range(4))]
PRODUCT = r"setp\.ne\.b32 p, (%r\d+), 0;\s*wgmma\.mma_async\.sync\.aligned\.m64n{}k16"
REDUCTION = r"red\.relaxed\.gpu\.global\.add\.v4\.f32 (\[[^\]]+\]), (\{[^}]+\});"


def barrier(text: str, name: str) -> int:
    made = edits.barriers(text)
    names = BARRIERS if len(made) == len(BARRIERS) else OF_FEW
    assert len(made) == len(names)
    return made[names.index(name)]


def without_waiting(*names: str, which: slice = slice(None)) -> Callable[[str], str]:
    return lambda text: edits.drop_waits(text, {barrier(text, name) for name in names}, which)


def lost(text: str) -> str:
    return edits.replace(text, r"@p " + REDUCTION, "", slice(5, 6))


def scaled_twice(text: str) -> str:
    """The factors of dS: scale and weight, scale and delta."""
    params = [p.name for p in native.variant_of(BOTH).params]
    scale = "|".join(re.findall(rf"ld\.param\.b32\s+(%r\d+), {edits.parameter(text, params, 'scale')};", text))
    again = rf"mul\.f32\s+(%r\d+), ({scale}), %r\d+;"
    return edits.replace(text, again, lambda m: f"{m[0]} mul.f32 {m[1]}, {m[1]}, {m[2]};")


def kept_over(text: str) -> str:
    """The first columns are added to the contents of right's registers, except for the first tile of keys."""
    of_left = text[: text.rindex("m64n256k16")].count("m64n32k16")
    of_right = slice(of_left, of_left + 1)
    not_first = re.findall(PRODUCT.format(256) + r"[^;]*\}, %rd\d+, %rd\d+, p", text)[0]
    return edits.replace(text, PRODUCT.format(32), lambda m: m[0].replace(f"{m[1]},", f"{not_first},", 1), of_right)


def forgetful_of_rope(text: str) -> str:
    """Right's products for RoPE's columns of dQ, the first 32 after its 256, are fresh with each tile of keys."""
    before = text[: text.rindex("m64n256k16")].count("m64n32k16")
    return edits.replace(
        text, PRODUCT.format(32), lambda m: m[0].replace(f"{m[1]},", "0,", 1), slice(before, before + 1)
    )


def delta_of_another_row(text: str) -> str:
    """A thread's second row has the delta of its first."""
    subtracted = re.findall(r"sub\.f32\s+%r\d+, %r\d+, (%r\d+);", text)
    (first, second) = list(dict.fromkeys(subtracted))[2:]  # the others shift exponents
    return edits.replace(text, rf"(sub\.f32\s+%r\d+, %r\d+, ){second};", lambda m: f"{m[1]}{first};")


def without_the_peer_s(text: str) -> str:
    """The first of right's chunks has the numbers of its own CTA alone."""
    sums = r"add\.f32\s+(%r\d+), (%r\d+), (%r\d+);"
    return edits.replace(text, sums, lambda m: f"mov.b32 {m[1]}, {m[2]};", slice(0, 8))


def unit_of_another_key(text: str) -> str:
    """The second of a thread's two keys has the unit of the first."""
    units = r"ld\.global\.nc\.f32 (%r\d+), \[(%rd\d+)\];"
    (_, address), _ = re.findall(units, text)
    return edits.replace(text, units, lambda m: f"ld.global.nc.f32 {m[1]}, [{address}];", slice(1, 2))


def prefetching(text: str) -> str:
    """Sums come to L2 ahead, however few they are."""
    return edits.replace(text, r"(setp\.gt\.s64\s+%p\d+, %rd\d+, )33554432;", lambda m: f"{m[1]}0;")


def too_much(text: str) -> str:
    return edits.replace(prefetching(text), r"(prefetch\.L2\.global \[%rd\d+\], )2048;", lambda m: f"{m[1]}1048576;")


def too_soon(text: str) -> str:
    """A chunk goes out when the previous one is complete."""
    return edits.replace(
        text, r"wgmma\.wait_group\.sync\.aligned\s+2;", "wgmma.wait_group.sync.aligned 4;", slice(3, 4)
    )


def stored(text: str) -> str:
    return edits.replace(text, REDUCTION, lambda m: f"st.global.v4.f32 {m[1]}, {m[2]};")


def forgetful(text: str) -> str:
    """Left stores its part of a row's sum, of one tile of keys, and does not add it."""
    sums = (
        r"ld\.shared\.b32\s+(%r\d+), (\[%r\d+\+\d+\]);\s*add\.f32\s+(%r\d+), (%r\d+), \1;\s*st\.shared\.b32\s+\2, \3;"
    )
    return edits.replace(text, sums, lambda m: f"st.shared.b32 {m[2]}, {m[4]};")


def late(writer: str, place: str) -> str:
    """Written over while still read, or perhaps: whichever access comes second sees it."""
    return (
        rf"(?s){writer}.*overwrites SMEM[^\n]* bytes {place}\.\.\d+ while nothing orders this and the"
        rf"|reads SMEM[^\n]* bytes {place}\.\.\d+ while nothing orders this and the write by [^\n]*{writer}"
    )


FAULTS = [
    PlantedFault(
        "a reduction is lost",
        SPAN,
        Wrong,
        r"^dkv0: a reduction is lost: columns \d+\.\.\d+ of key \d+ were added to",
        lost,
    ),
    PlantedFault(
        "dS is scaled twice",
        SPAN,
        Wrong,
        r"dq is wrong in .*: everywhere 0\.044\d+ times what it should be",
        scaled_twice,
    ),
    PlantedFault(
        "the gradient of a tile of keys is kept over to the next",
        BOTH,
        Wrong,
        r"^(?!.*dq is wrong).*dkv0 is wrong .*: keys from 64 on have in columns 0\.\.31 besides their own what those "
        r"from 0 on have in columns 320\.\.351",
        kept_over,
    ),
    PlantedFault(
        "delta of another row",
        SPAN,
        Wrong,
        r"dq is wrong in .* first in query 1, head 0: what it is with the delta of query 0, head 0",
        delta_of_another_row,
    ),
    PlantedFault(
        "sums after the last key's come to L2",
        BOTH,
        OutOfBounds,
        r"prefetches .*dkv",
        too_much,
    ),
    PlantedFault(
        "a chunk goes out before its products are complete",
        SPAN,
        Race,
        r"(?s)line \d+: .*reads register %r\d+ while the wgmma of line \d+ may still write it",
        too_soon,
    ),
    PlantedFault(
        "P and dS are read before they are written",
        SPAN,
        (Race, Undefined),
        r"(?s)(ldmatrix|wgmma).*reads SMEM.*(nothing orders this and the write by .*stmatrix|which nobody wrote)",
        without_waiting("p_ds_full"),
    ),
    PlantedFault(
        "keys come in while dQ reads those before",
        SELECTION,
        Race,
        late(r"cp\.async", r"1[3-9]\d{4}"),  # where K is
        without_waiting("k_empty0", "k_empty1"),
    ),
    PlantedFault(
        "Q comes in while the chunks of the rows before read it",
        SELECTION,
        Race,
        late(r"cp\.async", r"(\d{4,5}|1[0-2]\d{4})"),
        without_waiting("q_empty0", "q_empty1", "q_empty2", "q_empty3"),
    ),
    PlantedFault(
        "a sum is stored, not added to",
        SELECTION,
        Race,
        r"(?s)st\.global\.v4\.f32.*overwrites dkv0 bytes.*nothing orders this and the write by",
        stored,
        case={"processors": 2},
    ),
    PlantedFault(
        "what the peer sends is read before it is there",
        SPAN,
        (Race, Undefined),
        r"(?s)ld\.shared\.v4.*reads SMEM.*(nothing orders this and the write by .*st\.async|which nobody wrote)",
        without_waiting("received_full0", "received_full1"),
    ),
    PlantedFault(
        "a chunk is sent over one that the peer has not read",
        SPAN,
        Race,
        late(r"st\.async", r"\d+"),
        without_waiting("received_empty0", "received_empty1"),
    ),
    PlantedFault(
        "a chunk is sent over one that goes out in fixed point",
        FIXED,
        Race,
        late(r"st\.async", r"\d+"),
        without_waiting("received_empty0", "received_empty1"),
    ),
    PlantedFault(
        "what the peer sends is left out of a sum in fixed point",
        FIXED,
        Wrong,
        r"^(?!.*dq is wrong).*dkv0 is wrong in .* keys, 0\.\.99, columns 0\.\.63$",  # both CTAs' first chunks
        without_the_peer_s,
    ),
    PlantedFault(
        "a key has the unit of another one",
        FIXED,
        Wrong,
        r"^(?!.*dq is wrong).*dkv0 is wrong in \d+ of 100 keys, \d+\.\.\d+, columns 0\.\.511$",
        unit_of_another_key,
    ),
    PlantedFault(
        "what is added for an absent key is not 0",
        FIXED,
        Wrong,
        r"^(?!.*dq is wrong).*dkv0 is wrong in 1 of 100 keys, (\d+)\.\.\1, ",
        lambda text: edits.replace(text, r"(cvt\.rni\.s32\.f32 x, %r\d+;)", lambda m: f"{m[1]} add.s32 x, x, 9999;"),
    ),
    PlantedFault(
        "a bound leaves out half of its rows",
        BOUND,
        Wrong,
        r"^bound0 is wrong of \d+ of 100 keys, first of \(0, 0, 0\): ",
        lambda text: edits.replace(
            text, r"shfl\.sync\.bfly\.b32\s+(%r\d+), %r\d+, 4, 31, -1;", lambda m: f"mov.b32 {m[1]}, 0;"
        ),
    ),
    PlantedFault(
        "RoPE's columns of dQ forget the keys before",
        LATENT,
        Wrong,
        r"^dq is wrong in \d+ of 48 rows, columns 544\.\.575, first",
        forgetful_of_rope,
    ),
    PlantedFault(
        "P and dS are written over while chunks of RoPE's columns read dS",
        LATENT,
        Race,
        late(r"stmatrix", r"2[12]\d{4}"),
        without_waiting("p_ds_empty"),
    ),
    PlantedFault(
        "a chunk in fixed point is written over P that is not loaded",
        FIXED_LATENT,
        Race,
        r"(?s)st\.shared.*overwrites SMEM[^\n]* while nothing orders this and the read by [^\n]*ldmatrix"
        r"|ldmatrix.*reads SMEM[^\n]* while nothing orders this and the write by [^\n]*st\.shared",
        lambda text: edits.replace(text, r"bar\.sync\s+2, 128;", ""),
    ),
    PlantedFault(
        "RoPE's numbers of keys come in late",
        LATENT,
        (Race, Undefined),
        r"(?s)wgmma.*reads SMEM.*(nothing orders this and the write by .*cp\.async|which nobody wrote)",
        without_waiting("k_full3"),
    ),
    PlantedFault(
        "the slab that is turned comes in while the rows before need it",
        TURNED,
        Race,
        r"(?s)cp\.async.*overwrites SMEM[^\n]* while nothing orders this and the read by [^\n]*(ldmatrix|wgmma)"
        r"|(ldmatrix|wgmma).*reads SMEM[^\n]* while nothing orders this and the write by [^\n]*cp\.async",
        without_waiting("q_empty3"),
    ),
    PlantedFault(
        "left takes a row's norm before right has it",
        TURNED,
        Race,
        r"(?s)(ld|st)\.shared\.\w+ .*nothing orders this and the (read|write) by [^\n]*(ld|st)\.shared",
        lambda text: edits.replace(text, r"bar\.sync\s+1, 256;", ""),
    ),
    PlantedFault(
        "the producer turns what is not there",
        TURNED,
        (Race, Undefined),
        r"(?s)ld\.shared\.v4\.f32.*reads SMEM.*(cp\.async|which nobody wrote)",
        lambda text: edits.replace(text, r"cp\.async\.wait_group\s+[0-3];", ""),
    ),
    PlantedFault(
        "a row's sum forgets the keys before",
        TURNED,
        Wrong,
        # in those whose keys are not in the last tile alone
        r"^dq is wrong in 1[0-4]\d of 250 rows, .*: what it is where the norm's scale is a constant",
        forgetful,
    ),
    PlantedFault(
        "what the norm takes off stays on",
        TURNED,
        Wrong,
        r"^dq is wrong in 1[89]\d of 250 rows, .*: what it is where the norm's scale is a constant",
        lambda text: edits.replace(text, r"(mul\.f32\s+%r\d+, %r\d+, )0fBB000000;", lambda m: f"{m[1]}0f00000000;"),
    ),
    PlantedFault(
        "of few heads, dS is read before all of it is written",
        FEW,
        (Race, Undefined),
        r"(?s)wgmma.*reads SMEM.*(nothing orders this and the write by .*stmatrix|which nobody wrote)",
        lambda text: edits.replace(text, r"bar\.sync\s+1, 128;", "", slice(0, 1)),
    ),
    PlantedFault(
        "of few heads, keys come in while dQ reads those before",
        FEW,
        Race,
        late(r"cp\.async", r"\d+"),
        without_waiting("k_empty"),
    ),
    PlantedFault(
        "of few heads, Q comes in while the chunks of the query before read it",
        FEW,
        Race,
        late(r"cp\.async", r"\d+"),
        without_waiting("q_empty"),
    ),
    PlantedFault(
        "nobody says that a chunk of Q is free",
        SELECTION,
        Deadlock,
        r"(?s)nothing can go on.*warp 0-3 at line \d+.*mbarrier",
        lambda text: edits.replace(text, r"@p mbarrier\.arrive\.shared::cta\.b64 _[^;]*;", ""),
    ),
]


@functools.cache
def of_faults(key: str) -> gradients.Operands:
    return gradients.operands(kernel(key).variant, **OF_FAULTS[key])


def run_with(fault, seed):
    k = kernel(fault.kernel)
    edited = dataclasses.replace(k, ptx=fault.planted_in(k.ptx))
    run = mla_backward.launch(edited, of_faults(fault.kernel), seed=seed, **{"processors": 1, **(fault.case or {})})
    mla_backward.judge(run, run.run())


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_found(fault):
    fault.check(run_with)


@pytest.mark.faults
@pytest.mark.parametrize("key", OF_FAULTS)
def test_without_a_fault_nothing_is_found(key):
    run = mla_backward.launch(kernel(key), of_faults(key), processors=1)
    mla_backward.judge(run, run.run())


def test_prefetches_sums_of_keys_that_exist():
    k = kernel(BOTH)
    run = mla_backward.launch(dataclasses.replace(k, ptx=prefetching(k.ptx)), of_faults(BOTH), processors=1)
    mla_backward.judge(run, run.run())
