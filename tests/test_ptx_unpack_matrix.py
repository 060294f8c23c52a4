"""Matrices in FP8 written as arrays, interpreted: every number's bits, odd sizes, any scales, and planted faults."""

import ml_dtypes
import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.unpack_matrix import Problem, judge, run
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Fault
from kernels.abi import UnpackMatrix

BUILT = {v.key: v for v in native.built(UnpackMatrix)}
KERNEL = BUILT.get("unpack_matrix_sm_90a")

needs_kernels = pytest.mark.skipif(KERNEL is None, reason="without kernels")

CASES = {
    "a block": (1, 128, 128),
    "several matrices of several CTAs": (3, 192, 640),
    "rows and columns that fill no block": (2, 72, 136),
    "a row, 8 columns": (1, 1, 8),
    "an odd number of rows, slabs that fill no CTA": (2, 65, 328),
}


@pytest.mark.parametrize("key", BUILT)
@pytest.mark.parametrize("case", CASES)
def test_is_right(case, key):
    x = Problem.of(*CASES[case])
    judge(x, run(BUILT[key], x))


@needs_kernels
def test_is_what_the_definition_unpacks():
    x = Problem.of(2, 200, 264)
    want = np.asarray(x.packed.unpacked(ml_dtypes.bfloat16)).swapaxes(1, 2)
    assert run(KERNEL, x).tobytes() == want.tobytes()


@needs_kernels
def test_a_code_that_is_no_number():
    """It makes the 64 x 64 numbers around it NaN, as in the definition, and no others."""
    x = Problem.of(1, 128, 256)
    x.codes.view(np.uint8)[0, 70, 130] = 0x7F
    is_nan = np.isnan(run(KERNEL, x).astype(np.float32))[0]
    assert is_nan[64:, 128:192].all() and is_nan.sum() == 64 * 64


def test_the_launch_refuses():
    sizes = {"matrices": 1, "rows": 128, "columns": 128, "tiles": 2, "slabs": 2, "slab_bytes": 4112}
    changes = (
        ({"matrices": 0}, "m is 0"),
        ({"rows": 129}, "rows is 129, .*128"),
        ({"columns": 136}, "columns is 136, .*128"),
        ({"columns": 100}, "columns is 100, wanted a multiple of 8"),
        ({"slab_bytes": 4096}, "slab_bytes is 4096, wanted 4112"),
        ({"matrices": 2**30}, "m \\* tiles \\* slabs is"),
        ({"tiles": 2**26}, "tiles is"),
    )
    for changed, says in changes:
        with pytest.raises(ValueError, match=says):
            native.plan_unpack_matrix(sizes | changed, tile_m=64, tile_n=256)


def changed(to):
    """An edit of the bytes of matrices `[m, tiles, slabs, 4112]`."""

    def edit(data):
        data = data.copy()
        to(data, data.copy())
        return data

    return edit


@changed
def neighbouring_scale(data, old):
    data[:, :, 1, 4096:] = old[:, :, 2, 4096:]


@changed
def exchanged_bytes(data, old):
    data[:, :, 0, 16], data[:, :, 0, 17] = old[:, :, 0, 17], old[:, :, 0, 16]


@changed
def exchanged_nibbles(data, old):
    data[:, :, 0, 4095] = old[:, :, 0, 4095] << 4 | old[:, :, 0, 4095] >> 4


@changed
def neighbouring_tile(data, old):
    data[:, 0] = old[:, 1]


WHOLE, CUT = "several matrices of several CTAs", "rows and columns that fill no block"


def of_launch(name, case, raises=Wrong, says="numbers are wrong", **parameters):
    return case, PlantedFault(name, "unpack_matrix_sm_90a", raises, says, parameters=parameters)


def in_kernel(name, pattern, becomes, case=WHOLE):
    def edit(text):
        return edits.replace(text, pattern, becomes)

    return case, PlantedFault(name, "unpack_matrix_sm_90a", Wrong, "numbers are wrong", edit)


FAULTS = [
    of_launch("the scale of the neighbouring slab", WHOLE, data=neighbouring_scale),
    of_launch("two bytes exchanged", WHOLE, data=exchanged_bytes),
    of_launch("two nibbles exchanged", WHOLE, data=exchanged_nibbles),
    of_launch("the tile of the neighbouring rows", WHOLE, data=neighbouring_tile),
    of_launch("a row less", CUT, rows=lambda n: n - 1),
    of_launch("8 columns less", CUT, columns=lambda n: n - 8),
    of_launch("a row more", CUT, (Wrong, Fault), "", rows=lambda n: n + 1),
    of_launch("a slab less of a tile", WHOLE, slabs=lambda n: n - 1),
    of_launch("a tile less of a matrix", WHOLE, tiles=lambda n: n - 1),
    in_kernel(
        "lanes of a quad exchange with the wrong ones", r"(bfly\.b32\s+%r\d+, %r\d+), 2,", lambda m: f"{m[1]}, 1,"
    ),
    in_kernel(
        "the other row of two", r"and\.b32(\s+%r\d+), (%r\d+), -2014279696;", lambda m: f"shr.u32{m[1]}, {m[2]}, 1;"
    ),
    in_kernel("a code for a scale", r"\+4096\]", "+4092]"),
    in_kernel("bits of a scale below its exponent are lost", *edits.LOST_BITS),
]


@pytest.mark.faults
@needs_kernels
@pytest.mark.parametrize(("case", "planted"), FAULTS, ids=[str(planted) for _, planted in FAULTS])
def test_a_fault_is_found(case, planted):
    x = Problem.of(*CASES[case])

    def run_with(planted, seed):
        judge(x, run(KERNEL, x, seed=seed, edit=planted.planted_in, **planted.parameters))

    found = planted.findings(run_with, (0,))
    assert all(planted.symptoms_of(error) for error in found), found
