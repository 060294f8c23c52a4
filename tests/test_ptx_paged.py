"""Attention over keys in pages: random places of sequences in pools, and faults planted in what finds the pages, and in
what makes numbers of codes. The cases of every kernel of attention are in test_ptx.py.
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import attention
from interpreter.kernels.launch import combine, launch
from interpreter.kernels.verdict import Wrong, judge
from interpreter.machine.hazards import Deadlock, OutOfBounds, Race
from tests.planted import KIB, SEEDS, Subject, constants, run_with, without
from tests.symptoms import EARLY, early, unfenced

STAGES = 2
PAGED = Subject(
    "mha_fwd_paged_sm_90a_d64_bfloat16",
    {"b": 2, "s_q": 2, "s_kv": 420, "h_q": 8, "h_kv": 2, "width": 250, "page": 16},
    " ".join(
        ["q_full0 q_full1 q_empty0 q_empty1"]
        + [f"{x}{i}" for x in ("k_full", "k_empty", "v_landed", "v_full", "v_empty") for i in range(STAGES)]
    ),
    {"q": 2 * 8 * KIB, "k": STAGES * 16 * KIB, "v": STAGES * 16 * KIB},
)
PLACES = 4  # of codes of a tile
CODES = Subject(
    "mha_fwd_paged_e4m3_sm_90a_d64_bfloat16",
    PAGED.case,
    " ".join(
        ["q_full q_empty"]
        + [f"{x}{i}" for x in ("k_full", "k_empty", "v_full", "v_empty") for i in range(STAGES)]
        + [f"{x}{i}" for x in ("codes_full", "codes_empty") for i in range(PLACES)]
    ),
    {"q": 8 * KIB, "k": STAGES * 16 * KIB, "v": STAGES * 16 * KIB, "codes": PLACES * 8 * KIB},
)
WINDOW = Subject(
    "mha_fwd_paged_window_sm_90a_d64_bfloat16",
    {"b": 5, "s_q": 1, "s_kv": 420, "h_q": 8, "h_kv": 2, "window": 100, "page": 16},
    PAGED.barriers,
    {"q": 2 * 8 * KIB, "k": STAGES * 18 * KIB, "v": STAGES * 18 * KIB},
)
MERGE = Subject("combine_sm_90a_bfloat16", {}, "", {})
SHIFTED = Subject(  # at d 256 codes become bfloat16
    "mha_fwd_paged_e4m3_sm_90a_d256_bfloat16", {**PAGED.case, "s_kv": 180, "width": 120}, "", {}
)
LOAD = r"ld\.global\.b32\s+(%r\d+), \[(%rd\d+)\];"
TABLE = rf"{LOAD}((?:\s*\.loc[^\n]*)*\s+add\.s64\s+%rd\d+, %rd\d+, %rd\d+;(?:\s*\.loc[^\n]*)*\s+){LOAD}"
COPY = r"cp\.async\.bulk\.tensor\.4d[^;]*;"


SLOW = [(64, 8), (64, 192), *((128, page) for page in (8, 24, 64, 192)), (256, 24), (256, 64)]
"""beside the cases of test_ptx.py, which have pages of 8 to 128 keys for every kernel"""


@pytest.mark.parametrize("codes", ["", "_e4m3"])
@pytest.mark.parametrize(("d", "page"), [(64, 24), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)])
def test_pages_of_any_size(d, page, codes):
    """Windows that begin and end anywhere in a box, for steps of several tokens; some sequences see one page."""
    kernel = Subject(f"mha_fwd_paged{codes}_sm_90a_d{d}_bfloat16", {}, "", {}).kernel
    for seed, width in enumerate((1, 9, 130, 1 << 30)):
        sizes = {"b": 2, "s_q": 1 + seed, "s_kv": 100 + 61 * seed, "h_q": 6, "h_kv": 3, "page": page, "width": width}
        x = attention.operands(kernel.variant, seed=seed, **sizes)
        run = launch(kernel, x, seed=seed, processors=2)
        judge(run.run(), x, run.scale)


@pytest.mark.parametrize("codes", ["", "_e4m3"])
@pytest.mark.parametrize(
    ("d", "page", "window"),
    [
        (64, 24, 130),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((64, 8, 249), (128, 64, 128), (128, 16, 1), (256, 192, 300))
        ),
    ],
)
def test_a_window_of_a_step(d, page, window, codes):
    """The kernel finds it: up to 32 boxes, tokens without room, a query without a token, and pages that are missing."""
    kernel = Subject(f"mha_fwd_paged{codes}_window_sm_90a_d{d}_bfloat16", {}, "", {}).kernel
    for splits, seed in ((1, 0), (1, 1), (2, 2)):
        sizes = {"b": 5, "s_q": 1, "s_kv": page * -(-500 // page), "h_q": 6, "h_kv": 2, "page": page, "window": window}
        x = attention.operands(kernel.variant, seed=seed, **sizes)
        run = launch(kernel, x, seed=seed, processors=2, splits=splits)
        results = run.run()
        if splits > 1:
            results = combine(MERGE.kernel, run, seed=seed).run()
        judge(results, x, run.scale)


def test_small_probabilities_count():
    """What 259 keys of 2^-26 add to a value of 0, beside a key of 1: float16 has no such number."""
    x = attention.operands(CODES.kernel.variant, b=1, s_q=1, s_kv=260, h_q=4, h_kv=2, page=8, width=1 << 30)
    keys, q = x.sources[0], np.zeros_like(x.q)
    start, counts = np.zeros_like(keys.seen_from), np.ones_like(keys.counts)
    k, v = np.zeros(keys.k.shape), np.ones(keys.v.shape)
    k[:, 7, :, 0], v[:, 7] = 1, 0
    keys = attention.Keys(k, v, start, keys.seen_to, counts)
    keys = attention.in_pages(np.random.default_rng(0), "pages_e4m3", keys, 8)
    q[..., 0] = np.repeat(18 * 8 / keys.k[:, 7, :, 0], 2, axis=-1)[:, None]  # logits of 18
    x = dataclasses.replace(x, q=q, sources=(keys,), sink=np.full_like(x.sink, -np.inf))
    run = launch(CODES.kernel, x, processors=1)
    o, _ = run.run()
    np.testing.assert_allclose(o.astype(np.float64), attention.answer(x, run.scale)[0], rtol=0.02)


def values_of_keys_pages(text: str) -> str:
    """V's pages by the table of K's; before that, the producer loads start and stop twice in this way."""

    def same_table(m: re.Match[str]) -> str:
        return f"ld.global.b32 {m[1]}, [{m[2]}];{m[3]}ld.global.b32 {m[4]}, [{m[2]}];"

    return edits.replace(text, TABLE, same_table, slice(2, 3))


def no_page_is_missing(text: str) -> str:
    """Each lane of a window's producer knows of its own box alone."""
    pattern = r"redux\.sync\.min\.s32\s+(%r\d+), (%r\d+), [^;]*;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, {m[2]};")


def first_rows(text: str) -> str:
    """Every box of K is the first one of its page."""
    return edits.replace(text, COPY, lambda m: re.sub(r"(\{%r\d+, )%r\d+", r"\g<1>0", m[0]), slice(0, 1))


def one_head(text: str) -> str:
    """Keys of the first head for all of them."""
    return edits.replace(text, COPY, lambda m: re.sub(r"%r\d+(, %r\d+\}\])", r"0\1", m[0]), slice(0, 1))


def unaligned(text: str) -> str:
    """Tiles that begin with the first key that is seen, not with the first one of its box."""
    pattern = r"and\.b32\s+(%r\d+), (%r\d+), %r\d+;(\s+sub\.s32)"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, {m[2]};{m[3]}", slice(-1, None))


def beyond_the_last_key(text: str) -> str:
    """Lanes read the table for boxes after the last key that is seen too."""
    pattern = r"(shr\.s32\s+%r\d+, %r\d+, 3;\s+)setp\.ge\.s32\s+(%p\d+), (%r\d+), %r\d+;"
    return edits.replace(text, pattern, lambda m: f"{m[1]}setp.ne.b32 {m[2]}, {m[3]}, {m[3]};")


def one_scale(text: str) -> str:
    """K's scale for values too."""
    return edits.replace(text, r"(ld\.global\.b32\s+%r\d+, \[%rd\d+)\+4\];", lambda m: f"{m[1]}];")


def no_signs(text: str) -> str:
    return edits.replace(text, str(0x87F087F0 - 2**32), lambda m: str(0x07F007F0))


def half_the_shifted_codes(text: str) -> str:
    """Of four codes the first two, twice."""
    return constants(**{f"_{0xB3A2}": 0x9180})(text)


def half_the_codes(text: str) -> str:
    first = r"(mov\.b32\s+\{(%rs\d+), (%rs\d+)\}, %r\d+;\s+cvt\.rn\.f16x2\.e4m3x2\s+%r\d+, )\2(;\s+cvt\.[^,]*, )\3;"
    return edits.replace(text, first, lambda m: f"{m[1]}{m[2]}{m[4]}{m[2]};")


def no_units(text: str) -> str:
    """Logits as if a row of Q were in units of 1."""
    return edits.replace(text, r"sub\.s32(\s+%r\d+), 254, %r\d+;", lambda m: f"mov.b32{m[1]}, 127;")


UNSEEN = r"""setp\.lt\.s32\s+(%p\d+), (%r\d+), (%r\d+);
\s+setp\.ge\.s32\s+(%p\d+), \2, (%r\d+);
\s+or\.pred(\s+%p\d+), \1, \4;"""


def before_the_first(text: str) -> str:
    """Codes of values before the first key that is seen are no zeros."""
    return edits.replace(text, UNSEEN, lambda m: f"setp.ge.s32 {m[4]}, {m[2]}, {m[5]}; mov.pred{m[6]}, {m[4]};")


def after_the_last(text: str) -> str:
    return edits.replace(text, UNSEEN, lambda m: f"setp.lt.s32 {m[1]}, {m[2]}, {m[3]}; mov.pred{m[6]}, {m[1]};")


def eight_rows(text: str) -> str:
    """No warp has more than eight rows."""
    return edits.replace(text, r"setp\.lt\.s32(\s+%p\d+), (%r\d+), 9;", lambda m: f"setp.eq.b32{m[1]}, {m[2]}, {m[2]};")


def not_swizzled(text: str) -> str:
    """A chunk of 16 bytes is where its number says, in every row."""
    pattern = r"xor\.b32(\s+%r\d+), %r\d+, (%r\d+);(\s+shl\.b32\s+%r\d+, %r\d+, 4;\s+and\.b32\s+%r\d+, %r\d+, 112;)"
    return edits.replace(text, pattern, lambda m: f"mov.b32{m[1]}, {m[2]};{m[3]}")


def unfenced_numbers(text: str) -> str:
    """No fence after the numbers that products read; the first one follows zeros in Q."""
    return edits.drop(text, r"fence\.proxy\.async\.shared::cta", slice(1, None))


def transaction_bytes(change: int) -> Callable[[str], str]:
    pattern = r"mov\.b32\s+(%r\d+), 16384;(\s*mbarrier\.arrive\.expect_tx)"
    return lambda text: edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, {16384 + change};{m[2]}")


NOT_CLEARED = r"st\.shared\.v4\.b32\s+\[[^\]]*\], \{0, 0, 0, 0\}"  # of Q's rows twice, then before and after

FAULTS = [
    PlantedFault("values by the pages of keys", PAGED, Wrong, r"^o is wrong in .*lse is right", values_of_keys_pages),
    PlantedFault("every box is its page's first", PAGED, Wrong, r"lse is wrong", first_rows, case={"page": 24}),
    PlantedFault(
        "keys of the first head", PAGED, Wrong, r"lse is wrong in \d+ of \d+ rows, first in .* head 4 ", one_head
    ),
    PlantedFault("tiles that begin within a box", PAGED, Wrong, r"lse is wrong", unaligned),
    PlantedFault(
        "pages of unseen keys are looked up",
        PAGED,
        OutOfBounds,
        r"ld\.global[^\n]*\n\s+loads 4 bytes [^\n]*outside of every allocation",
        beyond_the_last_key,
    ),
    PlantedFault(
        "keys before the first one that is seen are not cleared",
        PAGED,
        Wrong,
        r"^o is wrong in .*nan.*lse is right",
        without(NOT_CLEARED, slice(2, 3)),
    ),
    PlantedFault(
        "keys after the last one that is seen are not cleared",
        PAGED,
        Wrong,
        r"^o is wrong in .*nan.*lse is right",
        without(NOT_CLEARED, slice(3, 4)),
    ),
    PlantedFault("a window goes on after a missing page", WINDOW, Wrong, r"lse is wrong", no_page_is_missing),
    PlantedFault("K's scale for V", CODES, Wrong, r"^o is wrong in .*lse is right", one_scale),
    PlantedFault("codes without signs", SHIFTED, Wrong, r"lse is wrong", no_signs),
    PlantedFault("half of the shifted codes twice", SHIFTED, Wrong, r"lse is wrong", half_the_shifted_codes),
    PlantedFault("half of the codes twice", CODES, Wrong, r"lse is wrong", half_the_codes),
    PlantedFault("rows of Q without their units", CODES, Wrong, r"lse is wrong", no_units),
    PlantedFault("rows after the eighth are left out", CODES, Wrong, r"lse is wrong", eight_rows, case={"s_q": 3}),
    PlantedFault(
        "codes before the first key that is seen", CODES, Wrong, r"^o is wrong in .*nan.*lse is right", before_the_first
    ),
    PlantedFault(
        "codes after the last key that is seen", CODES, Wrong, r"^o is wrong in .*nan.*lse is right", after_the_last
    ),
    PlantedFault("chunks that are not swizzled", CODES, Wrong, r"lse is wrong", not_swizzled),
    PlantedFault("numbers without a fence", CODES, Race, unfenced("[kv]", r"st\.shared"), unfenced_numbers),
    PlantedFault(
        "codes are converted before they are there",
        CODES,
        EARLY,
        early(r"ld\.shared", "codes", r"cp\.async\.bulk|tma"),
        CODES.without_wait("codes_full0"),
    ),
    PlantedFault(
        "scores before K is converted", CODES, EARLY, early(r"wgmma", "k", r"st\.shared"), CODES.without_wait("k_full0")
    ),
    PlantedFault("a box too few", PAGED, Deadlock, r"2048 transaction bytes outstanding", transaction_bytes(2048)),
    PlantedFault("a box too many", PAGED, EARLY, early(r"wgmma|st\.shared", "[kv]", r"tma"), transaction_bytes(-2048)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name.replace(" ", "-"))
def test_is_found(fault):
    fault.check(run_with, seeds=SEEDS)


@pytest.mark.faults
@pytest.mark.parametrize("subject", [PAGED, WINDOW, CODES], ids=str)
def test_nothing_is_found_without_a_fault(subject):
    subject.judge_as_it_is()
