"""The native library's plain C functions, for the tests (ffi/introspect.cc, ffi/fwd_plan.h)."""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from jax_dsv4_fmha import _ffi


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
        ("scale_log2", ctypes.c_float),
        ("scalars", ctypes.c_int32 * 10),
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
