"""The only loader of the native library: what it holds, and the raw calls into it.

Importing this module loads the library and registers its XLA custom calls.  It needs no GPU, initialises no backend,
and without a library it reports no kernels.
"""

import ctypes
import functools
import importlib.util
import json
import struct
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _fixed_point
from ._split_kv import architecture, processors, split_count, whole_queries

# What this module calls. `_load` refuses a library of another version, which lacks some of it.
_TARGETS = (
    *("mha_fwd", "mla_span_fwd", "mla_sparse_fwd", "csa_fwd", "hca_fwd", "dsv4_decode"),
    *("mla_span_bwd", "mla_sparse_bwd", "csa_bwd", "hca_bwd", "mha_bwd", "mha_bwd_shared_kv"),
    *(
        "lightning_indexer",
        "paged_lightning_indexer",
        "indexer_scores",
        "indexer_topk",
        "indexer_scores_at",
        "indexer_scores_at_bwd",
    ),
    *("head_summed_probabilities", "rope", "norm_rope", "norm_rope_bwd"),
)

EXPORT_CHECKS = [jax.export.DisabledSafetyCheck.custom_call(f"dsv4_fmha_{target}") for target in _TARGETS]
"""`disabled_checks` of `jax.export.export` for programs with this package's ops: an artefact may contain its custom
calls.
"""

ANY = 2**31 - 1
"""The value of a limit in `Variant.choices` that does not limit"""


@dataclass(frozen=True)
class Variant:
    """A kernel in the library: what it was compiled for, and what the compiler made of it."""

    key: str
    op: str
    family: str
    """ops whose kernels take the same arguments and differ by the same choices"""
    arch: str
    choices: dict[str, Any]
    """Compile-time choices that a call must match, by name. A choice that begins with `max_` is a limit: a call gets
    the variant with the lowest limit that it keeps."""
    tile_m: int
    """rows of a tile: (query, head) pairs"""
    tile_n: int
    """keys of a tile"""
    unit: int
    """key tiles that split-KV shares out as one unit"""
    ctas: int
    """CTAs that run on an SM at a time"""
    splits: bool
    """whether the keys of a tile of rows may be split over CTAs"""
    threads: int
    registers: int
    """registers per thread, at launch"""
    smem_bytes: int
    spill_bytes: int
    cubin_bytes: int
    evidence: str
    """how we know that it is right, in words"""


def library_path() -> Path | None:
    """Where the native library is, or None: beside this file, or where an editable install keeps it."""
    spec = importlib.util.find_spec("jax_dsv4_fmha._native")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native library. None where there is none, or only a damaged one, which a RuntimeWarning reports."""
    path = library_path()
    if path is None:
        return None
    try:
        return _load(path)
    except OSError as e:
        wanted = "everything runs on the reference until it is built again, or removed"
        warnings.warn(f"{path} cannot be loaded: {e}; {wanted}", RuntimeWarning, stacklevel=2)
        return None


def _load(path: Path) -> ctypes.CDLL:
    if not _is_whole(path):  # loading it would kill the process
        raise OSError("its end is missing")
    native = ctypes.CDLL(str(path))
    functions = ("manifest", *_TARGETS, *(f"{target}_initialize" for target in _TARGETS))
    if missing := [name for name in functions if not hasattr(native, f"dsv4_fmha_{name}")]:
        raise OSError(f"it is of another version, and lacks dsv4_fmha_{missing[0]}")
    native.dsv4_fmha_manifest.restype = ctypes.c_char_p
    for row in _read_manifest(native)["variants"]:
        if missing := [field.name for field in fields(Variant) if field.name not in row]:
            raise OSError(f"it is of another version, and does not say the {missing[0]} of its kernels")
    return native


def _read_manifest(native: ctypes.CDLL) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(native.dsv4_fmha_manifest())
    return contents


def _is_whole(path: Path) -> bool:
    """Whether a 64-bit ELF file reaches to its section table, which is at the end; True for any other file."""
    with open(path, "rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return True
    (table,), (size, count) = struct.unpack("<Q", head[40:48]), struct.unpack("<HH", head[58:62])
    return path.stat().st_size >= table + size * count


@functools.cache
def manifest() -> dict[str, Any]:
    """What `kernels/build.py` wrote about this build: `toolchain` and `variants`."""
    native = library()
    if native is None:
        return {"toolchain": "", "variants": []}
    return _read_manifest(native)


@functools.cache
def variants() -> tuple[Variant, ...]:
    """The kernels that are built in: () without a library, or where it was built without kernels."""
    names = [field.name for field in fields(Variant)]
    return tuple(Variant(**{name: row[name] for name in names}) for row in manifest()["variants"])


def built_for(op: str, **choices: Any) -> tuple[str, ...]:
    """The architectures that `op` is built for with these compile-time choices."""
    return tuple(dict.fromkeys(v.arch for v in variants_for(op, **choices)))


def variants_for(op: str, **choices: Any) -> list[Variant]:
    """The kernels of `op` with these compile-time choices, with any limits."""
    return [v for v in variants() if v.op == op and choices.items() <= v.choices.items()]


def local_architectures() -> tuple[str, ...]:
    """The architectures of this process's CUDA devices, each once, as "sm_90a"; () without any."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no such backend here
        return ()
    return tuple(dict.fromkeys(architecture(device.compute_capability) for device in devices))


# The raw calls: one CUDA device, no checks, no gradient, no batching or sharding rule. If operands do not fit together,
# or no kernel is built for them, a call raises jax.errors.JaxRuntimeError when it runs.

# Attention. All return o like q, with the sink in its denominator, and lse float32 `[b, s_q, h_q]` without it.


def mha_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention over one interval of keys per query.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16.
      k, v: `[b, s_kv, h_kv, d]`, like q.
      start, stop: int32 `[b, s_q]` within `[0, s_kv]`: query i sees the keys `start <= j < stop`.
      sink: float32 `[h_q]`, -inf for none.
      scale: finite and > 0.
    """
    return _call("mha_fwd", _splits_of_span("mha_fwd", q, k), scale, q, k, v, start, stop, sink)


def mla_span_fwd(
    q: jax.Array, kv: jax.Array, start: jax.Array, stop: jax.Array, sink: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """`mha_fwd` where one array `kv [b, s_kv, h_kv, d]` is both K and V."""
    return _call("mla_span_fwd", _splits_of_span("mla_span_fwd", q, kv), scale, q, kv, start, stop, sink)


def mla_sparse_fwd(
    q: jax.Array, kv: jax.Array, indices: jax.Array, length: jax.Array, sink: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys that a query's row of indices names.

    Args:
      kv: `[b, s_kv, d]`, both K and V; or a pool `[s_kv, d]` that all batch entries share.
      indices: int32 `[b, s_q, topk]`, topk >= 1; an entry outside of `[0, s_kv)` is absent.
      length: int32 `[b, s_q]`, any value: entries from there on are absent too.
      q, sink, scale: as in `mha_fwd`.
    """
    return _call(
        "mla_sparse_fwd", _splits_of_queries("mla_sparse_fwd", q, indices.shape[2]), scale, q, kv, indices, length, sink
    )


def csa_fwd(
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
    """Attention over an interval of `window_kv [b, s_w, d]`, as in `mha_fwd`, and keys of `kv [b, s_c, d]`, or of a
    pool `[slots, d]`, as in `mla_sparse_fwd`.
    """
    splits = _splits_of_queries("csa_fwd", q, window_kv.shape[1] + indices.shape[2])
    return _call("csa_fwd", splits, scale, q, window_kv, start, stop, kv, indices, length, sink)


def hca_fwd(
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
    """Attention over two intervals, as in `mha_fwd`: one of `window_kv [b, s_w, d]` and one of `kv [b, s_c, d]`."""
    b, s_q, h_q, _ = q.shape
    splits = _splits("hca_fwd", q, b, s_q * h_q, window_kv.shape[1] + kv.shape[1])
    return _call("hca_fwd", splits, scale, q, window_kv, start, stop, kv, start2, stop2, sink)


def dsv4_decode(
    q: jax.Array,
    window_pool: jax.Array,
    window_indices: jax.Array,
    window_length: jax.Array,
    pool: jax.Array,
    indices: jax.Array,
    length: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
    op: str = "dsv4_decode",
) -> tuple[jax.Array, jax.Array]:
    """Attention over keys of two pools, both as in `mla_sparse_fwd`: the window's and the compressed cache's.

    Both are `[slots, d]` like q. In the ops "dsv4_decode_fp8", "dsv4_decode_v41_fp8" and "dsv4_decode_v41_fp4", q is
    bfloat16 and both are uint8 `[pages, bytes]`, where index i means entry i % n of page i // n, in the layouts v4_fp8,
    v41_fp8 and, for the second pool of the last, v41_fp4 (`_packed.py`).
    """
    keys, shape = window_indices.shape[2] + indices.shape[2], q.shape
    whole = _whole(op, q, keys) if window_pool.ndim == pool.ndim == 2 else 0
    splits = _splits_of_queries(op, q, keys, whole)
    if whole:  # all queries have keys of the same pools, so each may be a sequence
        q, window_indices, window_length, indices, length = (
            x.reshape(-1, 1, *x.shape[2:]) for x in (q, window_indices, window_length, indices, length)
        )
    selections = (window_pool, window_indices, window_length, pool, indices, length)
    o, lse = _call("dsv4_decode", splits, scale, q, *selections, sink, whole=whole, op=op)
    return o.reshape(shape), lse.reshape(shape[:-1])


def _whole(op: str, q: jax.Array, keys: int) -> int:
    """`whole_queries` of an op whose keys differ from query to query. Its model has one CTA an SM, where the kernels
    for few heads have two.
    """
    b, s_q, h_q, _ = q.shape
    v = _splitting(op, q)
    if v is None or v.ctas > 1 or not all(isinstance(x, int) for x in (b, s_q, h_q, keys)):
        return 0
    return whole_queries(b * s_q, -(-h_q // v.tile_m), -(-keys // v.tile_n), v.unit, processors(v.arch))


def _splits_of_span(op: str, q: jax.Array, k: jax.Array) -> int:
    """`_splits` of an op over one span of k."""
    (b, s_q, h_q, _), (_, s_kv, h_kv, _) = q.shape, k.shape
    return _splits(op, q, b * h_kv, s_q * h_q // h_kv, s_kv)


def _splits_of_queries(op: str, q: jax.Array, keys: int, whole: int = 0) -> int:
    """`_splits` of an op whose keys differ from query to query, so a tile of rows has heads of one query; for all but
    the `whole` first queries.
    """
    b, s_q, h_q, _ = q.shape
    return _splits(op, q, b * s_q - whole, h_q, keys)


def _splits(op: str, q: jax.Array, groups: int, rows: int, keys: int) -> int:
    """`split_count` for groups of rows that share no tile, with the keys of one group; 1 where an extent is not
    known.
    """
    v = _splitting(op, q)
    if v is None or not all(isinstance(x, int) for x in (groups, rows, keys)):
        return 1
    return split_count(groups * -(-rows // v.tile_m), -(-keys // v.tile_n), v.unit, processors(v.arch))


def _splitting(op: str, q: jax.Array) -> Variant | None:
    """The kernel that may split the keys of q's heads: of a device that is here, if there is one."""
    built = [
        v
        for v in variants_for(op, d=q.shape[3], dtype=q.dtype.name)
        if v.splits and v.choices["max_heads"] >= q.shape[2]
    ]
    local = local_architectures()
    return min(built, key=lambda v: (v.arch not in local, v.choices["max_heads"]), default=None)


def _call(
    target: str, splits: int, scale: float, q: jax.Array, *operands: jax.Array, whole: int = 0, **attributes: str
) -> tuple[jax.Array, jax.Array]:
    # scratch results for the parts of all but the `whole` first sequences, which the same call merges
    parts = (q.shape[0] - whole, *q.shape[1:-1], splits if splits > 1 else 0)
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape[:-1], (*parts, q.shape[-1]), parts)),
    )
    o, lse, *_ = jax.ffi.ffi_call(f"dsv4_fmha_{target}", results)(q, *operands, scale=np.float32(scale), **attributes)
    return o, lse


# Gradients of attention. All take do like q, and lse, weight and delta of every row of q, float32 `[b, s_q, h_q]`, as
# `_transforms` defines them. Rows whose lse is -inf see no key; their other numbers may be anything.


def _latent_bwd(
    op: str,
    q: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    weight: jax.Array,
    delta: jax.Array,
    *sources: jax.Array,
    scale: float,
    deterministic: bool = False,
) -> tuple[jax.Array, ...]:
    """The gradient of a call over sources whose keys are values too: dq like q, and a float32 gradient like each
    source's keys.

    Sums over queries and heads are in no fixed order. With deterministic their result does not depend on the order, and
    is NaN where any dq is not finite.

    Args:
      op: the forward call is `mla_span_fwd` for "mla_span_bwd", and `mla_sparse_fwd`, `csa_fwd` or `hca_fwd` for
        "mla_sparse_bwd", "csa_bwd" or "hca_bwd".
      sources: of each source three arrays, as the forward call takes them: its keys, and start and stop, or indices and
        length.
    """
    keys = sources[::3]
    sums: list[jax.ShapeDtypeStruct] = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in keys]
    resolution = jnp.zeros(0, jnp.float32)
    if deterministic:
        sums = [jax.ShapeDtypeStruct((*x.shape, 2), jnp.uint32) for x in keys]
        resolution = _fixed_point.resolution(q, do, lse, delta, keys, scale)
    call = jax.ffi.ffi_call(f"dsv4_fmha_{op}", (jax.ShapeDtypeStruct(q.shape, q.dtype), *sums))
    dq, *dkv = call(q, do, lse, weight, delta, resolution, *sources, scale=np.float32(scale))
    return dq, *(in_order(_fixed_point.to_float32(x, resolution, dq) if deterministic else x) for x in dkv)


mla_span_bwd, mla_sparse_bwd, csa_bwd, hca_bwd = (
    functools.partial(_latent_bwd, op) for op in ("mla_span_bwd", "mla_sparse_bwd", "csa_bwd", "hca_bwd")
)


def mha_bwd(
    q: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    weight: jax.Array,
    delta: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    deterministic: bool = True,
) -> tuple[jax.Array, ...]:
    """The gradient of `mha_fwd` over `k` and `v [b, s_kv, h_kv, d]`: (dq, dk, dv), in q's dtype; (dq, dk + dv) without
    v.

    If deterministic, the results have the same bits on every run; else one kernel sums dq up in no fixed order.
    """
    keys = (k,) if v is None else (k, v)
    seen = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] * (q.shape[2] // k.shape[2]), 2), jnp.int32)
    of_rows = jax.ShapeDtypeStruct(q.shape, q.dtype if deterministic else jnp.float32)
    results = (of_rows, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in keys), seen)
    target = "dsv4_fmha_mha_bwd" + "_shared_kv" * (v is None)
    call = jax.ffi.ffi_call(target, results)
    dq, *of_keys, _ = call(q, do, lse, weight, delta, *keys, start, stop, scale=np.float32(scale))
    if not deterministic:
        dq = (np.float32(scale) * in_order(dq)).astype(q.dtype)
    return dq, *of_keys


def in_order(sums: Any) -> Any:
    """The columns of sums that kernels add to as their accumulators have them: of 16 columns four lanes have two of
    the first eight and two of the others each, and four of a lane lie together."""
    if sums.shape[-1] % 16:  # there is no kernel: the call raises an error when it runs
        return sums
    return sums.reshape(*sums.shape[:-1], -1, 4, 2, 2).swapaxes(-3, -2).reshape(sums.shape)


# The lightning indexer


WORKSPACE = 2**29
"""bytes of scores that exist at a time, unless a block of queries has more"""


def lightning_indexer(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    topk: int,
    return_scores: bool,
) -> tuple[jax.Array, jax.Array]:
    """The `topk` entries with the greatest scores, ascending, then -1; and their scores, -inf at -1.

    Args:
      q: `[b, s_q, h, 128]`, bfloat16, float16 or float8_e4m3fn; k: `[b, s_c, 128]`, like q.
      weights: float32 `[b, s_q, h]`; k_scale: float32 `[b, s_c]`, read only with float8_e4m3fn.
      start, stop: int32 `[b, s_q]` within `[0, s_c]`: query i sees the entries `start <= j < stop`.

    Returns:
      int32 and float32 `[b, s_q, topk]`; without return_scores the second is `[b, s_q, 0]`.
    """
    results = _chosen(q, k.shape[1], False, topk, return_scores)
    call = jax.ffi.ffi_call("dsv4_fmha_lightning_indexer", results)
    indices, values, _ = call(q, k, weights, k_scale, start, stop)
    return indices, values


def paged_lightning_indexer(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    table: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    topk: int,
    return_scores: bool,
) -> tuple[jax.Array, jax.Array]:
    """`lightning_indexer` with keys in pages: entry j of a batch entry is number j % page of page table[j // page].

    Args:
      pool: `[1, pages, page, 128]`, like q; or with float8_e4m3fn uint8 `[1, pages, page * 132]`: the page's keys, then
        their scales, float32. Where sequences have several pages, page is a multiple of 8, with scales of 32; where
        they have one, with scales of 4. Or `[b, …]`, a pool for each batch entry.
      table: int32 `[b, width]`. An entry on no page of the pool counts as a key of zeros.
      start, stop: within `[0, width * page]`.
    """
    each, pages, width, *_ = pool.shape
    if each != 1:
        first = jnp.arange(each, dtype=jnp.int32)[:, None] * pages
        table = jnp.where((table >= 0) & (table < pages), first + table, -1)
    pool = pool.reshape(-1, *pool.shape[2:])
    page = width // 132 if pool.dtype == jnp.uint8 else width
    results = _chosen(q, page * table.shape[1], True, topk, return_scores)
    call = jax.ffi.ffi_call("dsv4_fmha_paged_lightning_indexer", results)
    indices, values, _ = call(q, pool, weights, table, start, stop)
    return indices, values


def _chosen(q: jax.Array, s_c: Any, paged: bool, topk: int, return_scores: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The results of an indexer's call, and its workspace of scores."""
    b, s_q, h, _ = q.shape
    queries, tile = _score_block(h, q.dtype, paged)
    stride, blocks = -(-s_c // tile) * tile, 256
    if isinstance(s_c, int):
        blocks = max(1, WORKSPACE // (4 * stride * queries))
    if isinstance(b, int) and isinstance(s_q, int):
        wanted = b * -(-s_q // queries)
        blocks = -(-wanted // -(-wanted // blocks))  # the same number of queries each time
    return (
        jax.ShapeDtypeStruct((b, s_q, topk), jnp.int32),
        jax.ShapeDtypeStruct((b, s_q, topk if return_scores else 0), jnp.float32),
        jax.ShapeDtypeStruct((blocks * queries, stride), jnp.float32),
    )


def _score_block(h: int, dtype: Any, paged: bool) -> tuple[int, int]:
    """The queries that a CTA scores at a time, and the entries; without a kernel the call says so when it runs."""
    for v in variants_for("indexer_scores", heads=h, dtype=dtype.name, paged=paged):
        return v.tile_m // h, v.tile_n
    return 1, 1


def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    skip: int,
) -> jax.Array:
    """The scores that `lightning_indexer` chooses by: float32 `[b, s_q, s]`, s_c made up to whole tiles of 128.

    What a query does not see has a score of any kind; of a query that sees `skip` entries or fewer, skip >= 1, all do.
    """
    b, s_q, h, _ = q.shape
    queries, tile = _score_block(h, q.dtype, False)
    rows, stride = -(-s_q // queries) * queries, -(-k.shape[1] // tile) * tile
    result = jax.ShapeDtypeStruct((b * rows, stride), jnp.float32)
    call = jax.ffi.ffi_call("dsv4_fmha_indexer_scores", result)
    scores: jax.Array = call(q, k, weights, k_scale, start, stop, skip=np.int64(skip))
    return scores.reshape(b, rows, stride)[:, :s_q]


def indexer_topk(
    scores: jax.Array, start: jax.Array, stop: jax.Array, *, topk: int, return_scores: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The choice of `lightning_indexer` from given scores float32 `[b, s_q, s]`, where s is a multiple of 4."""
    shape = scores.shape[:2]
    results = (
        jax.ShapeDtypeStruct((*shape, topk), jnp.int32),
        jax.ShapeDtypeStruct((*shape, topk if return_scores else 0), jnp.float32),
    )
    indices, values = jax.ffi.ffi_call("dsv4_fmha_indexer_topk", results)(scores, start, stop)
    return indices, values


def head_summed_probabilities(
    q: jax.Array, k: jax.Array, lse: jax.Array, indices: jax.Array, *, scale: float
) -> jax.Array:
    """Σ_h exp(scale q·k - lse) at given keys, float32 `[b, s_q, topk]`.

    Args:
      q: `[b, s_q, h_q, 512]`, bfloat16 or float16; k: `[b, s_kv, 512]`, like q.
      lse: float32 `[b, s_q, h_q]`, with the sink; a head with ±inf adds nothing.
      indices: int32 `[b, s_q, topk]`; the result is 0 at an index outside of `[0, s_kv)`.
    """
    result = jax.ShapeDtypeStruct(indices.shape, jnp.float32)
    p: jax.Array = jax.ffi.ffi_call("dsv4_fmha_head_summed_probabilities", result)(
        q, k, lse, indices, scale=np.float32(scale)
    )
    return p


def indexer_scores_at(q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array) -> tuple[jax.Array]:
    """The indexer's scores at given entries: float32 `[b, s_q, topk]`, -inf at absent ones.

    Args:
      q, k, weights: as in `lightning_indexer`; the scores of float8_e4m3fn are without k's scales.
      indices: int32 `[b, s_q, topk]`; an index outside of `[0, s_c)` is absent.
    """
    results = (jax.ShapeDtypeStruct(indices.shape, jnp.float32),)
    (scores,) = jax.ffi.ffi_call("dsv4_fmha_indexer_scores_at", results)(q, k, weights, indices)
    return (scores,)


def indexer_scores_at_bwd(
    q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array, dscores: jax.Array
) -> tuple[jax.Array, ...]:
    """Gradients of `indexer_scores_at` for the cotangent dscores, float32 `[b, s_q, topk]`, which is ignored at absent
    entries: dq like q, dk in float32, a sum in no fixed order, and dweights.
    """
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k, weights)),
    )
    return tuple(jax.ffi.ffi_call("dsv4_fmha_indexer_scores_at_bwd", results)(q, k, weights, indices, dscores))


def rope(x: jax.Array, table: jax.Array, *, direction: int) -> tuple[jax.Array]:
    """x `[b, s, h, d]`, bfloat16 or float16, with its last 64 numbers rotated, in pairs; in place, where XLA need not
    keep x.

    Args:
      table: float32 `[b, s, 64]`: cos and sin of each pair, by turns; direction: 1, or -1 to rotate back.
    """
    call = jax.ffi.ffi_call("dsv4_fmha_rope", (jax.ShapeDtypeStruct(x.shape, x.dtype),), input_output_aliases={0: 0})
    (y,) = call(x, table, direction=np.float32(direction))
    return (y,)


def norm_rope(x: jax.Array, table: jax.Array, *, eps: float) -> tuple[jax.Array]:
    """`rope` of x `[b, s, h, 512]` / sqrt(mean(x²) + eps), as a new array."""
    call = jax.ffi.ffi_call("dsv4_fmha_norm_rope", (jax.ShapeDtypeStruct(x.shape, x.dtype),))
    (y,) = call(x, table, eps=np.float32(eps))
    return (y,)


def norm_rope_bwd(x: jax.Array, table: jax.Array, dy: jax.Array, *, eps: float) -> tuple[jax.Array]:
    """The gradient of `norm_rope` in x, for the cotangent dy like x."""
    call = jax.ffi.ffi_call("dsv4_fmha_norm_rope_bwd", (jax.ShapeDtypeStruct(x.shape, x.dtype),))
    (dx,) = call(x, table, dy, eps=np.float32(eps))
    return (dx,)


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
