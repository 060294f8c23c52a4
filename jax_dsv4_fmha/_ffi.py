"""The only loader of the native library: what it holds, and the raw calls into it.

Importing this module loads the library and registers its XLA custom calls.  It needs no GPU, initialises no backend,
and without a library there is simply nothing built.
"""

import ctypes
import functools
import importlib.util
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_TARGETS = ("fwd", "fwd_shared_kv", "sparse_fwd", "dsv4_sparse_fwd", "dsv4_dense_fwd")


@dataclass(frozen=True)
class Variant:
    """One kernel that is built in.  What it was compiled for, and what the compiler made of it."""

    key: str
    op: str
    arch: str
    d: int
    dtype: str
    shared_kv: bool
    threads: int
    registers: int
    """per thread, at launch"""
    smem_bytes: int
    spill_bytes: int
    cubin_bytes: int
    evidence: str
    """how it is known to be right, in words"""


def library_path() -> Path | None:
    """Where the native library is, or None: beside this file, or where an editable install keeps it."""
    spec = importlib.util.find_spec("jax_dsv4_fmha._native")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native library, or None where there is none."""
    path = library_path()
    if path is None:
        return None
    native = ctypes.CDLL(str(path))
    native.dsv4_fmha_manifest.restype = ctypes.c_char_p
    return native


@functools.cache
def manifest() -> dict[str, Any]:
    """What `kernels/build.py` wrote about this build: `toolchain` and `variants`."""
    native = library()
    if native is None:
        return {"toolchain": "", "variants": []}
    contents: dict[str, Any] = json.loads(native.dsv4_fmha_manifest())
    return contents


@functools.cache
def variants() -> tuple[Variant, ...]:
    """The kernels that are built in: () without a library, or where it was built without kernels."""
    names = [field.name for field in fields(Variant)]
    return tuple(Variant(**{name: row[name] for name in names}) for row in manifest()["variants"])


def built_for(op: str, *, d: int, dtype: str, shared_kv: bool) -> tuple[str, ...]:
    """The architectures that `op` is built for with these compile-time choices."""
    wanted = (op, d, dtype, shared_kv)
    return tuple(v.arch for v in variants() if (v.op, v.d, v.dtype, v.shared_kv) == wanted)


def local_architectures() -> tuple[str, ...]:
    """The architectures of this process's CUDA devices, each once, as "sm_90a"; () without any."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no such backend here
        return ()
    return tuple(dict.fromkeys(_architecture(device.compute_capability) for device in devices))


def _architecture(compute_capability: str) -> str:
    major, minor = compute_capability.split(".")
    return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")


# The kernels as they are: one CUDA device, no checks, no gradient, no batching or sharding rule. All return o like q,
# with the sink in its denominator, and lse float32 `[b, s_q, h_q]` without it. For operands that do not fit together,
# and for what is not built, a call raises jax.errors.JaxRuntimeError when it runs.


def fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    start: jax.Array,
    stop: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Over one interval of keys per query.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16.
      k: `[b, s_kv, h_kv, d]`, like q.
      v: like k; None means that V is K, which is another kernel.
      start, stop: int32 `[b, s_q]` within `[0, s_kv]`: query i sees the keys `start <= j < stop`.
      sink: float32 `[h_q]`, -inf for none.
      scale: finite and > 0.
    """
    if v is None:
        return _call("fwd_shared_kv", scale, q, k, start, stop, sink)
    return _call("fwd", scale, q, k, v, start, stop, sink)


def sparse_fwd(
    q: jax.Array, kv: jax.Array, indices: jax.Array, length: jax.Array, sink: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Over the keys that a query's row of indices names.

    Args:
      kv: `[b, s_kv, d]`, both K and V.
      indices: int32 `[b, s_q, topk]`, topk >= 1; an entry outside of `[0, s_kv)` is absent.
      length: int32 `[b, s_q]`, any value: entries from there on are absent too.
      q, sink, scale: as in `fwd`.
    """
    return _call("sparse_fwd", scale, q, kv, indices, length, sink)


def dsv4_sparse_fwd(
    q: jax.Array,
    window_kv: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    length: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Over an interval of `window_kv [b, s_w, d]` as in `fwd`, and keys of `kv [b, s_c, d]` as in `sparse_fwd`."""
    return _call("dsv4_sparse_fwd", scale, q, window_kv, start, stop, kv, indices, length, sink)


def dsv4_dense_fwd(
    q: jax.Array,
    window_kv: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    kv: jax.Array,
    start2: jax.Array,
    stop2: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Over two intervals, as in `fwd`: one of `window_kv [b, s_w, d]` and one of `kv [b, s_c, d]`."""
    return _call("dsv4_dense_fwd", scale, q, window_kv, start, stop, kv, start2, stop2, sink)


def _call(target: str, scale: float, q: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    results = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))
    o, lse = jax.ffi.ffi_call(f"dsv4_fmha_{target}", results)(q, *operands, scale=np.float32(scale))
    return o, lse


def _register() -> None:
    native = library()
    if native is None:
        return
    for target in _TARGETS:
        symbol = f"dsv4_fmha_{target}"
        stages = {
            "initialize": jax.ffi.pycapsule(native[f"{symbol}_initialize"]),
            "execute": jax.ffi.pycapsule(native[symbol]),
        }
        jax.ffi.register_ffi_target(symbol, stages, platform="CUDA")


_register()
