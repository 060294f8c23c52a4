"""The native library's plain C functions (ffi/introspect.cc, ffi/fwd_plan.h), and operands to run its kernels on."""

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from jax_dsv4_fmha import Span, _ffi, reference
from jax_dsv4_fmha._compare import compare


class FwdShape(NamedTuple):
    b: int
    s_q: int
    s_kv: int
    h_q: int
    h_kv: int
    d: int


class TensorMapSpec(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
        ("extents", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
    )


class _FwdPlan(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32),
        ("rows", TensorMapSpec),
        ("keys", TensorMapSpec),
        ("rows_extents", ctypes.c_int32 * 4),
        ("keys_extents", ctypes.c_int32 * 3),
        ("s_kv", ctypes.c_int32),
        ("scale_log2", ctypes.c_float),
        ("tiling", ctypes.c_int32 * 9),
    )


class _FwdParamBytes(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_uint32),
        ("sizes", ctypes.c_uint32 * 23),
        ("bytes", (ctypes.c_char * 128) * 23),
    )


@dataclass(frozen=True)
class FwdPlan:
    grid: int
    rows: TensorMapSpec
    keys: TensorMapSpec
    params: tuple[bytes, ...]  # as the kernel receives them; tensor maps are zeros


def library() -> ctypes.CDLL:
    native = _ffi.library()
    if native is None:
        pytest.skip("no native library")
    return native


def plan_fwd(
    shape: FwdShape,
    scale: float,
    *,
    tile_m: int,
    tile_n: int,
    shared_kv: bool,
    start: int = 0,
    stop: int = 0,
    sink: int = 0,
    lse: int = 0,
) -> FwdPlan:
    """What the forward handler launches for `shape`; ValueError where it refuses.  The last four are addresses."""
    plan, params, error = _FwdPlan(), _FwdParamBytes(), ctypes.create_string_buffer(512)
    status = library().dsv4_fmha_plan_fwd(
        (ctypes.c_int64 * 6)(*shape),
        ctypes.c_float(scale),
        tile_m,
        tile_n,
        int(shared_kv),
        (ctypes.c_void_p * 4)(start, stop, sink, lse),
        ctypes.byref(plan),
        ctypes.byref(params),
        error,
        ctypes.c_size_t(len(error)),
    )
    if status != 0:
        raise ValueError(error.value.decode())
    blobs = tuple(params.bytes[i].raw[: params.sizes[i]] for i in range(params.count))
    return FwdPlan(plan.grid, plan.rows, plan.keys, blobs)


def cubin(key: str) -> bytes:
    """The bytes that are embedded for a variant."""
    native, size = library(), ctypes.c_size_t()
    native.dsv4_fmha_cubin.restype = ctypes.c_void_p
    address = native.dsv4_fmha_cubin(key.encode(), ctypes.byref(size))
    assert address is not None, key
    return ctypes.string_at(address, size.value)


def fwd_operands(shape: FwdShape, dtype: str) -> tuple[np.ndarray[Any, Any], ...]:
    """q, k, v, start, stop, sink: causal, a window of 90 keys that ends with the last, one query that sees none."""
    b, s_q, s_kv, h_q, h_kv, d = shape
    rng = np.random.default_rng(0)

    def normal(std: float, *extents: int) -> np.ndarray[Any, Any]:
        return (std * rng.standard_normal(extents)).astype(np.dtype(dtype))

    q, k, v = normal(8, b, s_q, h_q, d), normal(0.125, b, s_kv, h_kv, d), normal(0.125, b, s_kv, h_kv, d)
    stop = np.tile(np.arange(s_q, dtype=np.int32) + (s_kv - s_q + 1), (b, 1))
    start = np.maximum(stop - 90, 0)
    start[0, 3] = stop[0, 3]
    return q, k, v, start, stop, rng.standard_normal(h_q).astype(np.float32)


def assert_right(got: tuple[Any, Any], q: Any, k: Any, v: Any, start: Any, stop: Any, sink: Any, scale: float) -> None:
    """Against the reference in fp32 from the same operands; v is None where it is k."""
    q, k, v = (None if x is None else np.asarray(x, np.float32) for x in (q, k, v))
    want = reference.fmha(q, k, v, span=Span(start, stop), sink=sink, scale=scale)
    for verdict in compare(got, want):
        assert verdict.passed, verdict
