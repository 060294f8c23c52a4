"""Slots that a step's queries see, interpreted: right answers, and planted faults."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreter import edits
from interpreter.kernels import native
from interpreter.kernels.seen_slots import Pool, Problem, judge, run
from interpreter.kernels.verdict import Wrong
from jax_dsv4_fmha._host.seen_slots import seen_slots
from kernels.abi import SeenSlots

BUILT = {v.arch: v for v in native.built(SeenSlots)}
RING, PAGED_RING = Pool(11), Pool(12, 4, 9, ((7, 2, 0), (3, 8, 4), (5, 1, 6), (0, -1, 9)))  # -1 and 9 are no pages
PAGED = Pool(8, 2, 20, ((13, 2, 0, 5), (3, 18, 4, 1), (15, 11, 6, 7), (10, -1, 8, 20)))
LENGTHS = (37, 0, 3, 20)  # the window has run over; an idle place; one that begins
CASES = {
    "a window alone": {"s_q": 1, "window": 9, "of_window": RING},
    "chosen": {
        "s_q": 2, "window": 9, "of_window": PAGED_RING, "compressed": PAGED, "ratio": 4, "topk": 140,
        "first": (35, -2, 1, 18),
    },
    "chosen, without ratio": {"s_q": 1, "window": 9, "of_window": RING, "compressed": Pool(30), "topk": 7},
    "some of them": {
        "s_q": 1, "window": 9, "of_window": RING, "compressed": PAGED, "ratio": 4, "topk": 7,
        "topk_length": (3, 7, 0, 5),
    },
    "the last tokens": {"s_q": 3, "window": 9, "of_window": PAGED_RING, "compressed": PAGED, "ratio": 4, "topk": 7},
    "all that are past": {"s_q": 1, "window": 9, "of_window": PAGED_RING, "compressed": PAGED, "ratio": 4},
    "a ring of entries": {"s_q": 1, "window": 9, "of_window": RING, "compressed": Pool(5), "ratio": 2},
    "counted through all sequences": {
        "s_q": 2, "window": 9, "of_window": Pool(11, stride=11), "compressed": Pool(30, stride=33), "ratio": 4,
        "topk": 7, "first": (35, -2, 1, 18),
    },
    "no window": {
        "s_q": 2, "window": 0, "of_window": Pool(1), "compressed": PAGED, "ratio": 1, "topk": 140,
        "first": (35, -2, 1, 18),
    },
    "new tokens of different numbers": {
        "s_q": 3, "window": 9, "of_window": RING, "compressed": PAGED, "ratio": 4, "topk": 6, "first": (34, 0, 2, -5),
    },
}  # fmt: skip


def problem(case, arch="sm_90a"):
    if arch not in BUILT:
        pytest.skip("not built")
    return Problem(BUILT[arch], LENGTHS, **CASES[case])


@pytest.mark.parametrize("arch", BUILT)
@pytest.mark.parametrize("case", CASES)
def test_is_right(case, arch):
    x = problem(case, arch)
    judge(x, run(x))


FAULTS = {  # a case, numbers of the launch that are changed, and what is wrong then
    "the window begins a token late": ("a window alone", {"window": lambda n: n - 1}, "slots of the window"),
    "the ring is larger": ("a window alone", {"window_room": lambda n: n + 1}, "slots of the window"),
    "a page that does not exist": ("chosen", {"window_pages": lambda n: n + 1}, "slots of the window"),
    "entries not yet past": ("chosen", {"ratio": lambda n: n - 1}, "slots of entries"),
    "the pool's pages": ("all that are past", {"pages": lambda n: n + 1}, "slots of entries"),
    "all indices count": ("some of them", {"has_length": lambda _: 0}, "lengths of entries"),
    "entries of fewer tokens": ("all that are past", {"ratio": lambda n: n + 1}, "slots of entries"),
    "a ring that has not run over": ("a ring of entries", {"ratio": lambda n: 4 * n}, "slots of entries"),
    "slots of the sequence before": (
        "counted through all sequences",
        {"window_stride": lambda n: n - 1},
        "slots of the window",
    ),
    "entries of another sequence": (
        "counted through all sequences",
        {"stride": lambda _: 0},
        "slots of entries",
    ),
    "a query for all last tokens": ("the last tokens", {"s_q": lambda n: n + 1}, "slots of the window"),
    "where the new tokens begin": (
        "new tokens of different numbers",
        {"has_position": lambda _: 0},
        "slots of the window",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_number_is_found(fault):
    case, changed, says = FAULTS[fault]
    x = problem(case)
    with pytest.raises(Wrong, match=says):
        judge(x, run(x, **changed))


IN_THE_KERNEL = {  # a case, an instruction that is changed, and what is wrong then
    "no ring": ("a window alone", r"rem\.u32 (\s*%r\d+, %r\d+), (%r\d+);", r"mov.b32 \1;", "slots of the window"),
    "idle places": ("a window alone", r"selp\.b32 (\s*%r\d+, %r\d+), 0,", r"selp.b32 \1, 1,", "lengths of the window"),
    "the place on a page": (
        *("chosen", r"mad\.lo\.s32 (\s*%r\d+, %r\d+, %r\d+), %r\d+;", r"mad.lo.s32 \1, 0;"),
        "slots of the window",
    ),
}


@pytest.mark.parametrize("fault", IN_THE_KERNEL)
def test_a_fault_in_the_kernel_is_found(fault):
    case, pattern, to, says = IN_THE_KERNEL[fault]
    x = problem(case)
    with pytest.raises(Wrong, match=says):
        judge(x, run(x, edit=lambda text: edits.replace(text, pattern, lambda m: m.expand(to))))


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (Pool(13, 4, 9, ((7, 2, 0),) * 4), "room for 13 entries in 3 pages of 4"),
        (Pool(0), "window_table"),
        (Pool(12, 4, 0, ((7, 2, 0),) * 4), "pages"),
    ],
)
def test_the_launch_refuses(pool, says):
    with pytest.raises(ValueError, match=says):
        run(replace(problem("a window alone"), of_window=pool))


def test_the_launch_refuses_to_find_nothing():
    with pytest.raises(ValueError, match=r"window \+ n_far is 0"):
        run(replace(problem("a window alone"), window=0))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("case", CASES)
def test_kernel(case):
    """The same cases by custom calls of one program, so that none finds what another one left."""
    x = Problem(next(iter(BUILT.values())), LENGTHS, **CASES[case])
    pool, (near, far) = x.compressed or Pool(1), x.sizes
    lists = (x.lengths, x.of_window.array(x.b), pool.array(x.b), x.indices)
    lengths, *tables, indices = (jnp.asarray(numbers, jnp.int32) for numbers in lists)
    topk_length = jnp.asarray(x.topk_length, jnp.int32).reshape(x.b, 1, -1)
    topk_length = jnp.broadcast_to(topk_length, (x.b, x.s_q, topk_length.shape[2]))
    position = jnp.asarray(x.positions).reshape(x.b, x.s_q, -1) if x.first else jnp.zeros((x.b, x.s_q, 0), jnp.int32)
    pools = {f"window_{name}": n for name, n in x.of_window._asdict().items()} | pool._asdict()
    sizes = {name: n for name, n in pools.items() if "table" not in name} | {"window": near, "far": far}
    sizes["ratio"] = x.ratio

    @jax.jit
    def twice(lengths):
        calls = (
            seen_slots(n, position, *tables, indices, topk_length, **sizes) for n in (lengths, lengths + 1, lengths)
        )
        return list(calls)

    got, _, again = twice(lengths)
    judge(x, [np.asarray(y) for y in got])
    judge(x, [np.asarray(y) for y in again])
