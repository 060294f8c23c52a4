"""The backward kernels for K and V apart in the interpreter: right gradients, and planted faults.

The interpreter must find each fault by a symptom that only this fault has.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from interpreter import dense_backward, edits, gradients, native
from interpreter.hazards import Deadlock, Fault, Misuse, Race, Undefined
from interpreter.launch import Kernel
from kernels.abi import DenseBackward

BUILT = [v for v in native.built(DenseBackward) if v.op == "key_gradients"]
ALL_KEYS = 1 << 30  # a width
SHAPES: dict[str, dict[str, int | None]] = {
    # several heads of keys, boxes that fill no tile of rows; the last tile of keys is not whole
    "groups": {"b": 1, "s_q": 18, "s_kv": 150, "h_q": 14, "h_kv": 2, "width": ALL_KEYS},
    # a window, two batch entries, tiles of rows that see nothing of a tile of keys
    "window": {"b": 2, "s_q": 40, "s_kv": 150, "h_q": 4, "width": 20},
    # spans in no order
    "random": {"b": 1, "s_q": 70, "s_kv": 140, "h_q": 2, "h_kv": 2, "width": None},
    # more tiles of rows than stages
    "turns": {"b": 1, "s_q": 70, "s_kv": 40, "h_q": 4, "width": ALL_KEYS},
    # less than a tile of anything
    "few": {"b": 1, "s_q": 3, "s_kv": 3, "h_q": 5, "width": ALL_KEYS},
}
RUNS = [
    *(("bfloat16", d, case, False) for d in (64, 128, 256) for case in ("groups", "window")),
    *(("float16", 64, case, False) for case in ("random", "few")),
    *(("float16", d, "few", True) for d in (128, 256)),
]


@functools.cache
def kernels(d: int, dtype: str) -> dict[str, Kernel]:
    found = {op: f"{op}_sm_90a_d{d}_{dtype}" for op in ("key_gradients", "row_gradients")}
    if found["key_gradients"] not in [v.key for v in BUILT]:
        pytest.skip(f"{found['key_gradients']} is not built")
    return {op: Kernel.of(native.variant_of(key)) for op, key in (found | {"row_spans": "row_spans_sm_90a"}).items()}


@functools.cache
def operands(d: int, dtype: str, case: str, shared_kv: bool = False) -> gradients.Operands:
    variant = dataclasses.replace(native.variant_of(f"fwd_sm_90a_d{d}_{dtype}"), shared_kv=shared_kv)
    return gradients.operands(variant, **SHAPES[case])


def test_every_kernel_is_among_them():
    assert {(v.d, v.dtype) for v in BUILT} <= {(d, dtype) for dtype, d, _, _ in RUNS} | {
        (128, "float16"),
        (256, "float16"),
    }


@pytest.mark.parametrize(("dtype", "d", "case", "shared_kv"), RUNS)
def test_is_right(dtype, d, case, shared_kv):
    found, x = kernels(d, dtype), operands(d, dtype, case, shared_kv)
    got = dense_backward.run(found, x, d**-0.5, seed=d)
    gradients.assert_right(got, x, d**-0.5)


def test_is_the_same_bits_in_any_order():
    found, x = kernels(64, "bfloat16"), operands(64, "bfloat16", "window")
    first, second = (dense_backward.run(found, x, 0.125, seed=seed) for seed in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


# ---- faults

BARRIERS = [
    "keys",
    *(f"{name}{stage}" for name in ("landed", "told", "empty") for stage in range(3)),
    "p_full",
    "p_empty",
]
ROW_BARRIERS = [
    f"{name}{stage}"
    for name in ("rows_full", "rows_empty", "k_landed", "k_full", "k_empty", "v_full", "v_empty")
    for stage in range(2)
]


@dataclasses.dataclass
class Fate:
    name: str
    fault: type[Fault] | tuple[type[Fault], ...] | type[AssertionError]
    says: str
    edit: Callable[[str], str]
    op: str = "key_gradients"
    case: str = "window"


def without_waiting(*names: str, of: list[str] = BARRIERS) -> Callable[[str], str]:
    def edit(text: str) -> str:
        made = edits.barriers(text)
        assert len(made) == len(of)
        return edits.drop_waits(text, {made[of.index(name)] for name in names})

    return edit


def seen_too_little(text: str) -> str:
    """The least stop of a tile of rows is taken for its greatest."""
    return edits.replace(text, r"redux\.sync\.max\.s32", "redux.sync.min.s32")


FATES = [
    Fate(
        "products read K before it landed",
        (Race, Undefined),
        r"(?s)wgmma.*reads SMEM.*(cp\.async\.bulk|which nobody wrote)|tensor\.4d.*overwrites.*the read by wgmma",
        without_waiting("keys"),
    ),
    Fate(
        "products, or what zeroes rows, find Q before it landed",
        (Race, Undefined),
        r"(?s)wgmma.*reads SMEM.*(cp\.async\.bulk|which nobody wrote)"
        r"|tensor\.5d.*overwrites SMEM.*(the read by wgmma|the write by .*st\.shared\.v4)",
        without_waiting("landed0", "landed1", "landed2"),
    ),
    Fate(
        "lse is read before it is there",
        (Race, Undefined),
        r"(?s)ld\.shared.*reads SMEM.*(st\.shared|which nobody wrote)",
        without_waiting("told0", "told1", "told2"),
    ),
    Fate(
        "Q comes in while products read the one before",
        (Race, Misuse),  # or its arrival while the previous ones are awaited
        r"(?s)(cp\.async\.bulk|st\.shared).*overwrites SMEM.*nothing orders this and the|an arrival too many",
        without_waiting("empty0", "empty1", "empty2"),
        case="turns",
    ),
    Fate(
        "a row that sees nothing is not zeroed",
        AssertionError,
        r"^dk: \d+ of \d+ wrong, first at .*: nan",
        lambda text: edits.drop(text, r"st\.shared\.v4\.b32\s+\[%r\d+\], \{0, 0, 0, 0\}"),
    ),
    Fate(
        "a tile of rows is not visited",
        AssertionError,
        r"^dk: \d+ of \d+ wrong",
        seen_too_little,
        op="row_spans",
        case="random",
    ),
    Fate(
        "nobody says that a stage is free",
        Deadlock,
        r"(?s)nothing can go on.*mbarrier",
        lambda text: edits.drop(text, r"mbarrier\.arrive\.shared\.b64", slice(-1, None)),
        case="turns",
    ),
    Fate(
        "dS is multiplied by K before it is cleared",
        (Race, Undefined, AssertionError),
        r"(?s)(wgmma.*reads SMEM|dq: \d+ of \d+ wrong, first at .*: nan)",
        without_waiting("k_full0", "k_full1", of=ROW_BARRIERS),
        op="row_gradients",
    ),
]


@pytest.mark.parametrize("fate", FATES, ids=lambda fate: fate.name)
def test_a_fault_is_found(fate):
    found, x = dict(kernels(64, "bfloat16")), operands(64, "bfloat16", fate.case)
    found[fate.op] = dataclasses.replace(found[fate.op], ptx=fate.edit(found[fate.op].ptx))
    with pytest.raises(fate.fault, match=fate.says):
        gradients.assert_right(dense_backward.run(found, x, 0.125), x, 0.125)
