"""Insertion of entries into caches, interpreted: right answers, and planted faults."""

from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.kv_insert import Problem, judge, run
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import OutOfBounds, Race, Undefined
from jax_dsv4_fmha._definitions.packed import LAYOUTS
from kernels.abi import KvInsert
from tests.test_ptx_rope import a_lane_s_own_sum

BUILT = {v.key: v for v in native.built(KvInsert)}
TOKENS = {"lengths": (9, 0, 1, 30), "s": 2}  # with an idle place, and a sequence that begins; a ring that has run over
PAGED = {"lengths": (9, 0, 1, 7), "s": 2, "page": 4, "table": ((7, 2, 0), (9, 3, 4), (5, 1, 1), (6, -1, 8))}
BLOCKS = {"lengths": (8, 0, 5, 4), "s": 2, "ratio": 4, "blocks": 2}  # a block complete, idle, incomplete, and the first


LONG = {"lengths": (128, 0, 37, 200, 67), "s": 2, "ratio": 32, "steps": 4}  # some complete a block, some do not
# 2, none, 1, 3 new tokens; those after them are padding, which would complete a block or displace a token
RAGGED = {"s": 3, "counts": (2, 0, 1, 3)}
RAGGED_BLOCKS = {"lengths": (8, 6, 3, 5), "ratio": 4, "blocks": 2, **RAGGED}
RAGGED_LONG = {"lengths": (64, 62, 63, 66), "ratio": 32, "steps": 4, **RAGGED}
RAGGED_PAGED = {"lengths": (9, 6, 1, 7), "page": 4, "table": ((7, 2, 0), (9, 3, 4), (5, 1, 1), (6, -1, 8)), **RAGGED}


every_arch = pytest.mark.parametrize("arch", dict.fromkeys(v.arch for v in BUILT.values()))


def variant(arch="", **choices):
    """With these choices; of any architecture, or this one."""
    choices = {"running": False, "rope": False} | choices
    found = [v for v in BUILT.values() if arch in v.arch and choices.items() <= v.choices.items()]
    return found[0] if found else pytest.skip("not built")


@pytest.mark.parametrize("key", BUILT)
def test_is_right(key):
    v = BUILT[key]
    x = Problem.of(v, **LONG if v.running else BLOCKS if v.pooled else TOKENS)
    judge(x, run(x))


@pytest.mark.parametrize("packing", ["", "v4_fp8", "v32_fp8"])
def test_in_a_pool_of_pages(packing):
    """One sequence has no page for its entry."""
    choices = {"packing": packing, "pooled": False, "rope": packing == "v32_fp8"}
    x = Problem.of(variant(d=512, dtype="bfloat16", **choices), **PAGED)
    judge(x, run(x))


@pytest.mark.parametrize("key", [key for key, v in BUILT.items() if not v.packing])
def test_padding_leaves_no_trace(key):
    """Sequences with different numbers of new tokens."""
    v = BUILT[key]
    x = Problem.of(v, **RAGGED_LONG if v.running else RAGGED_BLOCKS if v.pooled else RAGGED_PAGED)
    judge(x, run(x))


@pytest.mark.parametrize(
    "sizes",
    [
        {"lengths": (256, 130), "s": 1, "ratio": 128},
        {"lengths": (9, 3), "s": 5, "ratio": 2, "has_ape": False},  # several blocks in a step
        {"lengths": (5, 2), "s": 9, "ratio": 4, "blocks": 2, "steps": 12},  # lengths of fewer tokens than the step's
    ],
    ids=str,
)
def test_blocks_of_other_sizes(sizes):
    x = Problem.of(variant(d=512, dtype="bfloat16", packing="", pooled=True), **sizes)
    judge(x, run(x))


@pytest.mark.parametrize(
    "sizes", [{"lengths": (5, 64), "s": 1, "ratio": 4}, {"lengths": (4, 9), "s": 4, "ratio": 4}], ids=str
)
def test_sums_of_short_blocks(sizes):
    """A ring of one token, and one as long as a block."""
    x = Problem.of(variant(dtype="bfloat16", packing="", running=True), **sizes)
    judge(x, run(x))


@every_arch
def test_histories_leave_no_trace(arch):
    """Tokens in one step or one by one, with others that are taken back: an entry has the same bits."""
    v = variant(arch, dtype="bfloat16", packing="", running=True)
    x = Problem.of(v, (16,), 1, ratio=16, steps=4)
    rows = np.random.default_rng(1).standard_normal((16, x.joined.shape[2])).astype(np.float32)

    def after(steps):
        """The cache and the ring after steps (first token, how many, whether they are the right ones)."""
        y, pages = replace(x, state=x.state * 0, folded=x.folded * 0), None
        for first, count, right in steps:
            given = rows[first : first + count] if right else -rows[first : first + count]
            angle = x.angle[:, : -(-count // 16)]
            y = replace(y, joined=given[None], bounds=np.asarray([[first + count]], np.int32), angle=angle)
            pages, state, sums, folded = run(y)
            y = replace(y, state=state.copy(), sums=sums.copy(), folded=folded.copy())
        return pages

    one_by_one = after([(i, 1, True) for i in range(16)])
    drafts = [(0, 4, True), (4, 4, False), (4, 1, True), (5, 4, False), (5, 3, True)]
    drafted = after([*drafts, (8, 4, True), (12, 3, False), (12, 4, True)])
    np.testing.assert_array_equal(one_by_one, drafted)


def test_garbage_in_the_ring_is_not_pooled():
    """The first block's entry has no block before it, whatever is in its slots."""
    x = Problem.of(variant(d=512, dtype="bfloat16", packing="", pooled=True), (4,), 1, ratio=4, blocks=2)
    x.state[:, 4:] = np.nan
    judge(x, run(x))


@pytest.mark.parametrize("packing", ["v4_fp8", pytest.param("v41_fp8", marks=pytest.mark.rest)])
@pytest.mark.parametrize("value", [0.0, np.nan, 1e38])
def test_codes_at_the_ends(packing, value):
    """A row of zeros, of NaN, and one whose weights take it to the greatest numbers."""
    x = Problem.of(variant(d=512, dtype="bfloat16", packing=packing, pooled=False), (3, 5), 1)
    if value == 1e38:
        x.norm[:] = value
    else:
        x.rows[0, 0, 7] = value if value else 0
        x.rows[0] *= value
    pages, exactly = run(x)[0], run(x.unpacked)[0]
    layout = LAYOUTS[packing]
    for n, at in ((0, 2), (1, 4)):
        entry = exactly[n, at * 1024 : (at + 1) * 1024].view(x.variant.dtype)
        for start, part in zip(layout.starts(at, x.page), layout.encode(entry), strict=True):
            np.testing.assert_array_equal(pages[n, start : start + part.size], np.asarray(part))


def test_scales_of_groups():
    """Four groups of 128 numbers, some of which are tiny, zeros or not finite; RoPE's are as they are."""
    x = Problem.of(variant(d=512, dtype="bfloat16", packing="v32_fp8", rope=True), (3, 5, 2, 8), 1, seed=3)
    x.norm[:128] *= 1e-9
    x.norm[128:256] = np.array([1e-35, 0, np.nan, np.inf], np.float32).repeat(32)
    for n, zeros in enumerate((slice(128, 256), slice(192, 256), slice(0, 0), slice(130, 140))):
        x.rows[n, 0, zeros] = 0
    pages, exactly, layout = run(x)[0], run(x.unpacked)[0], LAYOUTS["v32_fp8"]
    for n, at in ((0, 2), (1, 4), (2, 1), (3, 7)):
        entry = exactly[n, at * 1152 : (at + 1) * 1152].view(x.variant.dtype)
        (wanted,) = layout.encode(entry)
        np.testing.assert_array_equal(pages[n, at * 656 : (at + 1) * 656], np.asarray(wanted))
        scales = np.asarray(wanted)[512:528].view(np.float32)
        assert np.isnan(scales[1]) and np.isfinite(scales[[0, 2, 3]]).all()
    x.norm[128:256] = 1e-35
    tiny = run(x)[0][0, 2 * 656 + 512 :][:16].view(np.float32)
    assert tiny[1] == np.float32(2**-100) * np.float32(1 / 448)  # the least


def greatest_of_fewer_lanes(text):
    """The greatest number of a group is that of 4 lanes, where 8 lanes share a scale."""
    pattern = r"shfl\.sync\.bfly\.b32\s+(%r\d+)(?:\|%p\d+)?, (%r\d+), 4,[^;]*;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, {m[2]};", slice(-1, None))


def rope_without_turns(text):
    """RoPE's numbers stay as they are: of cos and sin, which a lane has of its pair alone, sin is 0."""
    pattern = r"(ld\.global\.v2\.b32\s+\{%r\d+, (%r\d+)\}, \[[^]]*\];)"
    return edits.replace(text, pattern, lambda m: f"{m[1]} mov.b32 {m[2]}, 0;", slice(-1, None))


def codes_beyond_scales(text):
    """RoPE's numbers begin where the scales do: 512 and 3, which an aligned address drops."""
    return edits.replace(text, r"(add\.s64\s+%rd\d+, %rd\d+), 531;", lambda m: f"{m[1]}, 515;")


def without_barrier(which):
    def edit(text):
        return edits.replace(text, r"\s*(?:bar\.sync|barrier\.sync)\s+0;", lambda m: "", slice(which, which + 1))

    edit.__doc__ = f"Barrier {which} of the CTA is missing."
    return edit


def run_with(arch, choices, sizes):
    def check(fault, seed):
        x = Problem.of(variant(arch, **choices), **sizes)
        judge(x, run(x, seed=seed, edit=fault.planted_in))

    return check


POOLED, PLAIN = {"d": 512, "dtype": "bfloat16", "packing": "", "pooled": True}, {"d": 512, "dtype": "bfloat16"}
PLAIN |= {"packing": "", "pooled": False}
RUNNING = POOLED | {"running": True}
BESIDE, IN_656 = ({"d": 512, "dtype": "bfloat16", "packing": x, "rope": True} for x in ("", "v32_fp8"))
FAULTS = [
    (PlantedFault("a lane's own sum", "kv_insert", Wrong, "is wrong: off by", a_lane_s_own_sum), PLAIN, TOKENS),
    (PlantedFault("a lane's own sum, of latents", "kv_insert", Wrong, "off by", a_lane_s_own_sum), BESIDE, TOKENS),
    (PlantedFault("no turns", "kv_insert", Wrong, "is wrong: off by", rope_without_turns), BESIDE, TOKENS),
    (PlantedFault("a half's scale", "kv_insert", Wrong, "bytes are wrong", greatest_of_fewer_lanes), IN_656, PAGED),
    (PlantedFault("no room for scales", "kv_insert", Wrong, "bytes are wrong", codes_beyond_scales), IN_656, PAGED),
    *(
        (PlantedFault(f"no barrier {i}", "kv_insert", error, says, without_barrier(i)), POOLED, BLOCKS)
        for i, (error, says) in enumerate(
            [
                (Race, "reads state .* while nothing orders this and the write"),
                (Undefined, "ld.shared.* reads SMEM .* which nobody wrote"),
                (Race, "ld.shared.* while nothing orders this and the write"),
            ]
        )
    ),
]


@every_arch
@pytest.mark.parametrize(
    ("fault", "choices", "sizes"), FAULTS, ids=lambda x: str(x) if isinstance(x, PlantedFault) else ""
)
def test_fault(fault, choices, sizes, arch):
    fault.check(run_with(arch, choices, sizes), seeds=(0,))


@pytest.mark.parametrize(
    ("name", "edit", "error", "says", "sizes"),
    [
        ("ring", lambda n: n - 1, Wrong, "rows of the state are wrong", BLOCKS),
        ("ratio", lambda n: n - 1, Wrong, "rows of the state are wrong", BLOCKS),
        ("page", lambda n: n - 1, Wrong, "bytes are wrong|is wrong", PAGED),
        ("pages", lambda n: n + 40, OutOfBounds, "outside of every allocation", PAGED | {"table": ((7, 2, 30),) * 4}),
        ("has_ape", lambda n: 0, Wrong, "rows of the state are wrong", BLOCKS),
        ("n_bounds", lambda n: 1, Wrong, "rows of the state are wrong", RAGGED_BLOCKS),
        ("n_bounds", lambda n: 1, Wrong, "entry 7 of sequence 0 is wrong", RAGGED_PAGED),
        ("n_bounds", lambda n: 1, Wrong, "tokens are folded", RAGGED_LONG),
    ],
)
def test_wrong_number_of_a_launch(name, edit, error, says, sizes):
    choices = PLAIN if "ratio" not in sizes else RUNNING if "steps" in sizes else POOLED
    x = Problem.of(variant(**choices), **sizes)
    with pytest.raises(error, match=says):
        judge(x, run(x, **{name: edit}))
