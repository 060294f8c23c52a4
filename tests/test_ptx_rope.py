"""RoPE in place, after a norm, their gradient, and quantized, interpreted: right answers, and planted faults."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.rope import IN_PLACE, Problem, judge, run
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import OutOfBounds, Race
from kernels.abi import IndexQuery, NormRope, Rope

BUILT = {v.key: v for family in (Rope, NormRope, IndexQuery) for v in native.built(family)}
OPS = ("rope", "rope_hadamard", "index_query", "norm_rope", "norm_rope_bwd")
PARAMS = {v.op: [p.name for p in v.params] for v in BUILT.values()}
every_arch = pytest.mark.parametrize("arch", dict.fromkeys(v.arch for v in BUILT.values()))
SHAPE = (2, 3, 7)  # rows that fill no CTA


@pytest.mark.parametrize("key", BUILT)
def test_is_right(key):
    x = Problem.of(BUILT[key], *SHAPE)
    judge(x, run(x))
    if BUILT[key].op in IN_PLACE:
        x = Problem.of(BUILT[key], 1, 45, 3, 128)  # more than one CTA, shorter rows, turned back
        judge(x, run(x, direction=-1), direction=-1)


def variant(op, arch, dtype="bfloat16"):
    return next(v for v in BUILT.values() if (v.op, v.arch, v.dtype) == (op, arch, dtype))


@every_arch
def test_codes_are_those_of_the_steps_apart(arch):
    """Bit for bit: what `rope_hadamard` writes, quantized by NumPy, for rows of all sizes, down to subnormals."""
    apart, at_once = (variant(op, arch) for op in ("rope_hadamard", "index_query"))
    x = Problem.of(at_once, *SHAPE)
    sizes = 2.0 ** -np.arange(x.x[..., 0].size).reshape(*x.x.shape[:3], 1)
    x = replace(x, x=(x.x * sizes).astype(x.x.dtype))
    rows = run(replace(x, variant=apart)).reshape(-1, x.x.shape[-1]).astype(np.float32)
    scales = np.maximum(np.abs(rows).max(-1, keepdims=True), np.float32(1e-4)) * np.float32(1 / 448)
    codes = np.clip(rows / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(run(x), np.concatenate([codes.view(np.uint8), scales.view(np.uint8)], 1))


def a_lane_s_own_sum(text):
    """Numbers from the lane 16 lanes away are lost."""
    pattern = r"shfl\.sync\.bfly\.b32\s+(%r\d+)(?:\|%p\d+)?, (%r\d+), 16,[^;]*;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, 0;", slice(0, 1))


def a_butterfly_s_other_half(text):
    """A number from the lane 8 lanes away is lost."""
    pattern = r"shfl\.sync\.bfly\.b32\s+(%r\d+)(?:\|%p\d+)?, (%r\d+), 8,[^;]*;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, 0;", slice(0, 1))


def half_of_the_maximum(text):
    """The last exchange of maxima is lost, so that lanes of a row have scales of their own: that of the first rows,
    after eight exchanges of a butterfly."""
    pattern = r"shfl\.sync\.bfly\.b32\s+(%r\d+)(?:\|%p\d+)?, (%r\d+), 8,[^;]*;"
    return edits.replace(text, pattern, lambda m: f"mov.b32 {m[1]}, 0;", slice(8, 9))


def one_row_too_many(text):
    """A row counts as there that is not."""
    of = next(op for op in ("norm_rope", "index_query", "rope") if op in text)  # rope_hadamard has rope's
    pattern = rf"(ld\.param\.b32\s+(%r\d+), {edits.parameter(text, PARAMS[of], 'rows')};)"
    return edits.replace(text, pattern, lambda m: f"{m[1]}\nadd.s32 {m[2]}, {m[2]}, 1;")


def stored_at_another_lane_s_place(text):
    """The first store of a thread goes 16 bytes further."""
    pattern = r"st\.global\.v([24])\.b32\s+\[(%rd\d+)(?:\+(\d+))?\]"
    return edits.replace(text, pattern, lambda m: f"st.global.v{m[1]}.b32 [{m[2]}+{int(m[3] or 0) + 16}]", slice(0, 1))


_STORED = {"rope_hadamard": (Race, "reads x bytes"), "index_query": (Race, "overwrites codes bytes")}
FAULTS = [
    *(
        PlantedFault("a lane's own sum", op, Wrong, "numbers are wrong", a_lane_s_own_sum)
        for op in ("norm_rope", "norm_rope_bwd")
    ),
    PlantedFault("a butterfly's other half", "rope_hadamard", Wrong, "numbers are wrong", a_butterfly_s_other_half),
    PlantedFault("a butterfly's other half", "index_query", Wrong, "scales are wrong", a_butterfly_s_other_half),
    PlantedFault("a lane that knows half of the maximum", "index_query", Wrong, "are wrong", half_of_the_maximum),
    *(PlantedFault("one row too many", op, OutOfBounds, "outside of every allocation", one_row_too_many) for op in OPS),
    *(
        PlantedFault("a store at another lane's place", op, error, says, stored_at_another_lane_s_place)
        for op in OPS
        for error, says in [_STORED.get(op, (Wrong, "numbers are wrong"))]
    ),
]


@every_arch
@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: f"{x.kernel}: {x}")
def test_fault(fault, arch):
    def run_with(fault, seed):
        x = Problem.of(variant(fault.kernel, arch), *SHAPE)
        judge(x, run(x, seed=seed, edit=fault.planted_in))

    fault.check(run_with, seeds=(0,))


@every_arch
def test_the_other_way_is_found(arch):
    """The direction is a number that the launch gives, so this fault is planted without an edit of the kernel."""
    x = Problem.of(variant("rope", arch), *SHAPE)
    with pytest.raises(Wrong, match="numbers are wrong"):
        judge(x, run(x, direction=-1))
