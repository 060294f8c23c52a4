"""CUTLASS's examples of GEMMs: C[m, n, l] = sum of A[m, k, l] B[n, k, l]. Operands are small integers: C is exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...cute.record import allocated, placed, tensor
from ...machine.state import Array
from . import OPERAND, RESULT, TYPES, Case, example

BF16 = TYPES["bfloat16"]


def integers(rows: int, columns: int, batch: int, rows_first: bool, dtype: Any) -> Array:
    """[rows, columns, batch]; `rows_first`: these are contiguous."""
    x = np.random.default_rng([rows, columns, rows_first]).integers(-3, 4, (batch, rows, columns)).astype(dtype)
    return placed(x.transpose(0, 2, 1)).transpose(2, 1, 0) if rows_first else placed(x).transpose(1, 2, 0)


def result(m: int, n: int, batch: int, m_first: bool, dtype: Any) -> Array:
    x = allocated((batch, n, m) if m_first else (batch, m, n), dtype)
    return x.transpose(2, 1, 0) if m_first else x.transpose(1, 2, 0)


def case(kernel: Any, a: Array, b: Array, c: Array, majors: tuple[str, str, str], persistent: bool) -> Case:
    from cutlass.cute.runtime import make_fake_stream

    first = [int(major == "k" or (major == "n" and x is c)) for major, x in zip(majors, (a, b, c), strict=True)]
    args = [tensor(x, leading=mode) for x, mode in zip((a, b, c), first, strict=True)]
    wanted = np.einsum("mkl,nkl->mnl", a.astype(np.float64), b.astype(np.float64)).astype(c.dtype).astype(np.float64)
    return Case(
        kernel,
        [*args, make_fake_stream()],
        {"a": (a, OPERAND), "b": (b, OPERAND), "c": (c, RESULT)},
        {"c": wanted},
        0.0,
        static=[(3, 2)] if persistent else [],  # clusters at a time
    )


def blackwell(
    *,
    tile: tuple[int, int] = (128, 128),
    cluster: tuple[int, int] = (1, 1),
    pair: bool = False,
    mnkl: tuple[int, int, int, int] = (256, 128, 128, 1),
    a_major: str = "k",
    b_major: str = "k",
    c_major: str = "n",
    dtype: str = "bfloat16",
    c_dtype: str = "float32",
    tma_store: bool = True,
    file: str = "dense_gemm.py",
    kernel: str = "DenseGemmKernel",
) -> Case:
    import cutlass

    m, n, k, batch = mnkl
    a = integers(m, k, batch, a_major == "m", TYPES[dtype])
    b = integers(n, k, batch, b_major == "n", TYPES[dtype])
    c = result(m, n, batch, c_major == "m", TYPES[c_dtype])
    made = getattr(example(f"blackwell/{file}"), kernel)(cutlass.Float32, pair, tile, cluster, tma_store)
    return case(made, a, b, c, (a_major, b_major, c_major), "persistent" in file)


def mixed(
    *,
    tile: tuple[int, int, int],
    cluster: tuple[int, int] = (1, 1),
    pair: bool = False,
    mnkl: tuple[int, int, int, int],
    b_major: str = "k",
) -> Case:
    """A of 8-bit integers, which warps convert into tensor memory."""
    import cutlass

    m, n, k, batch = mnkl
    a = integers(m, k, batch, False, np.int8)
    b = integers(n, k, batch, b_major == "n", BF16)
    c = result(m, n, batch, False, BF16)
    module = example("blackwell/mixed_input_gemm/mixed_input_gemm.py")
    made = module.MixedInputGemmKernel(0, 0, cutlass.Float32, pair, tile, cluster, True, False)
    found = case(made, a, b, c, ("k", b_major, "n"), True)
    first, *others = found.args
    return replace(found, args=[first, None, *others], static=[(4, 2)])  # without scales


def hopper(*, cluster: tuple[int, int], mnkl: tuple[int, int, int, int] = (512, 256, 128, 1)) -> Case:
    import cutlass

    m, n, k, batch = mnkl
    a, b = (integers(rows, k, batch, False, BF16) for rows in (m, n))
    c = result(m, n, batch, False, np.float32)
    made = example("hopper/dense_gemm.py").HopperWgmmaGemmKernel(cutlass.Float32, (128, 128), cluster)
    return case(made, a, b, c, ("k", "k", "n"), False)
