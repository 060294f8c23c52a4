"""Raw calls of attention. All return o like q, with the sink in its denominator, and lse float32 `[b, s_q, h_q]`
without it.

`mla_span_fwd_turned`, `csa_fwd_turned` and `hca_fwd_turned` take q before its norm and RoPE, after the sink a table
float32 `[b, s_q, 64]`, cos and sin of each pair by turns, and `eps`, a keyword. They turn o back.

`csa_fwd_e4m3` and `hca_fwd_e4m3` multiply by products of e4m3. They take keys as codes, float8_e4m3fn, and after the
sink float32 `[b]`: a power of two that the codes of a batch entry's keys are multiplied with. With `_bf16_rope` a key
is 640 bytes, as `key_codes` makes them with rope, and the last 64 dimensions of its scores' products are of bfloat16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import library
from .call import call
from .split_kv import LARGEST, columns_pay, processors, split_count, whole_queries

ORDER = 2
"""The number of the canonical order of sums (docs/semantics.md), in which no keys are split; ffi/forward.h refuses a
call for another one, and a call whose kernels do not have it."""


TILE = 64
"""heads, and keys, of a tile"""

FEW_HEADS = 32
"""with at most so many a query's sums have another order, of another kernel"""


def mha_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    sink: jax.Array,
    *,
    scale: float,
    order: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attention over one interval of keys per query.

    Args:
      q: `[b, s_q, h_q, d]`, bfloat16 or float16.
      k, v: `[b, s_kv, h_kv, d]`, like q.
      start, stop: int32 `[b, s_q]` within `[0, s_kv]`: query i sees the keys `start <= j < stop`.
      sink: float32 `[h_q]`, -inf for none.
      scale: finite and > 0.
      order: of sums: 0 for any, or `ORDER`, which it is where start is 0.
    """
    splits = 1 if order else _splits_of_span("mha_fwd", q, k)
    return _call("mha_fwd", splits, scale, q, k, v, start, stop, sink, order=order)


def mla_span_fwd(
    q: jax.Array,
    kv: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    sink: jax.Array,
    *table: jax.Array,
    scale: float,
    op: str = "mla_span_fwd",
    order: int = 0,
    **eps: float,
) -> tuple[jax.Array, jax.Array]:
    """`mha_fwd` where one array `kv [b, s_kv, h_kv, d]` is both K and V.

    Args:
      order: as in `mha_fwd`; any interval has the order, with one KV head and a multiple of `TILE` heads.
    """
    splits = 1 if order else _splits_of_span(op, q, kv)
    return _call(op, splits, scale, q, kv, start, stop, sink, *table, order=order, **_norm(eps))


def mla_span_fwd_few_heads(
    q: jax.Array, kv: jax.Array, start: jax.Array, stop: jax.Array, sink: jax.Array, *, scale: float, order: int = ORDER
) -> tuple[jax.Array, jax.Array]:
    """`mla_span_fwd` with at most `FEW_HEADS` heads and keys `[b, s_kv, d]`, in the order of `mla_sparse_fwd`; keys are
    never split.
    """
    return _call("mla_span_fwd_few_heads", 1, scale, q, kv, start, stop, sink, order=order)


def mla_sparse_fwd(
    q: jax.Array, kv: jax.Array, indices: jax.Array, length: jax.Array, sink: jax.Array, *, scale: float, order: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys that a query's row of indices names.

    Args:
      kv: `[b, s_kv, d]`, both K and V; or a pool `[s_kv, d]` that all batch entries share.
      indices: int32 `[b, s_q, topk]`, topk >= 1; an entry outside of `[0, s_kv)` is absent.
      length: int32 `[b, s_q]`, any value: entries from there on are absent too.
      q, sink, scale, order: as in `mha_fwd`; any list has the order.
    """
    if order and (room := _by_columns("mla_sparse_fwd", q, (indices.shape[2],))):
        return _call_by_columns("mla_sparse_fwd", room, scale, q, kv, indices, length, sink, order=order)
    splits = 1 if order else _splits_of_queries("mla_sparse_fwd", q, indices.shape[2])
    return _call("mla_sparse_fwd", splits, scale, q, kv, indices, length, sink, order=order)


def csa_fwd(
    q: jax.Array,
    window_kv: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    length: jax.Array,
    sink: jax.Array,
    *table: jax.Array,
    scale: float,
    op: str = "csa_fwd",
    order: int = 0,
    **eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention over an interval of `window_kv [b, s_w, d]`, as in `mha_fwd`, and keys of `kv [b, s_c, d]`, or of a
    pool `[slots, d]`, as in `mla_sparse_fwd`, whose `order` it takes too.
    """
    keys = window_kv.shape[1], indices.shape[2]
    if order and (room := _by_columns(op, q, keys)):
        selections = (window_kv, start, stop, kv, indices, length)
        return _call_by_columns(op, room, scale, q, *selections, sink, order=order)
    splits = 1 if order else _splits_of_queries(op, q, sum(keys))
    operands = (window_kv, start, stop, kv, indices, length, sink, *table)
    return _call(op, splits, scale, q, *operands, order=order, **_norm(eps))


def hca_fwd(
    q: jax.Array,
    window_kv: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    kv: jax.Array,
    start2: jax.Array,
    stop2: jax.Array,
    sink: jax.Array,
    *table: jax.Array,
    scale: float,
    op: str = "hca_fwd",
    order: int = 0,
    **eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention over two intervals, as in `mla_span_fwd`: one of `window_kv [b, s_w, d]` and one of
    `kv [b, s_c, d]`.
    """
    b, s_q, h_q, _ = q.shape
    splits = 1 if order else _splits(op, q, b, s_q * h_q, window_kv.shape[1] + kv.shape[1])
    operands = (window_kv, start, stop, kv, start2, stop2, sink, *table)
    return _call(op, splits, scale, q, *operands, order=order, **_norm(eps))


mla_span_fwd_turned, csa_fwd_turned, hca_fwd_turned = (
    functools.partial(run, op=f"{run.__name__}_turned") for run in (mla_span_fwd, csa_fwd, hca_fwd)
)


csa_fwd_e4m3, hca_fwd_e4m3 = (functools.partial(run, op=f"{run.__name__}_e4m3") for run in (csa_fwd, hca_fwd))
csa_fwd_e4m3_bf16_rope, hca_fwd_e4m3_bf16_rope = (
    functools.partial(run, op=f"{run.__name__}_e4m3_bf16_rope") for run in (csa_fwd, hca_fwd)
)


def _norm(eps: dict[str, float]) -> dict[str, Any]:
    return {name: np.float32(x) for name, x in eps.items()}


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
    order: int = 0,
    packing: str = "",
) -> tuple[jax.Array, jax.Array]:
    """Attention over keys of two arrays or pools, as in `mla_sparse_fwd`: the window's and the compressed cache's.

    Pools are `[slots, d]` like q. With packing, q is bfloat16 and both are uint8 `[pages, bytes]`, where index i means
    entry i % n of page i // n (`_definitions/packed.py`).

    Args:
      order: as in `mla_sparse_fwd`.
      packing: the layout of both pools, "v4_fp8" or "v41_fp8"; or that of the second one, "v4_fp4" or "v41_fp4", where
        the first has the FP8 layout of the same model.
    """
    of_sources, shape = (window_indices.shape[2], indices.shape[2]), q.shape
    keys, whole = sum(of_sources), 0
    if order and (room := _by_columns("dsv4_decode", q, of_sources, packing=packing)):
        selections = (window_pool, window_indices, window_length, pool, indices, length)
        how: dict[str, Any] = {"order": order, "packing": packing}
        return _call_by_columns("dsv4_decode", room, scale, q, *selections, sink, **how)
    if not order and (q.shape[1] == 1 or window_pool.ndim == pool.ndim == 2):
        whole = _whole("dsv4_decode", q, keys, packing=packing)
    splits = 1 if order else _splits_of_queries("dsv4_decode", q, keys, whole, packing=packing)
    if whole and q.shape[1] != 1:  # all queries have keys of the same pools, so each may be a sequence
        q, window_indices, window_length, indices, length = (
            x.reshape(-1, 1, *x.shape[2:]) for x in (q, window_indices, window_length, indices, length)
        )
    selections = (window_pool, window_indices, window_length, pool, indices, length)
    o, lse = _call("dsv4_decode", splits, scale, q, *selections, sink, whole=whole, order=order, packing=packing)
    return o.reshape(shape), lse.reshape(shape[:-1])


def spans_have_order(q: jax.Array) -> bool:
    """Whether the kernels of spans take q in the canonical order: a tile of rows has heads of one query."""
    return q.shape[2] % TILE == 0


def spans_pay(q: jax.Array, *keys: Any) -> bool:
    """Whether they are to take it, with so many keys of each source: where `csa_fwd` would not share out keys and
    columns.
    """
    return spans_have_order(q) and not _by_columns("csa_fwd", q, keys)


def groups_pay(q: jax.Array) -> bool:
    """Whether `mla_span_fwd_few_heads` is to take q in the canonical order: queries in a row fill a tile of rows."""
    _, s_q, h_q, d = q.shape
    if not isinstance(s_q, int) or not isinstance(h_q, int) or h_q > FEW_HEADS or s_q * h_q < TILE:
        return False
    return bool(library.shipped_for("mla_span_fwd_few_heads", d=d, dtype=q.dtype.name))


def _by_columns(op: str, q: jax.Array, keys: tuple[Any, ...], packing: str = "") -> int:
    """The tiles of keys that a query may see of so many keys of each source, where two kernels that share out keys and
    columns are to attend to q; else 0.
    """
    b, s_q, h_q, d = q.shape
    choices = {"d": d, "dtype": q.dtype.name, "packing": packing}
    archs = {v.arch for v in library.variants_for(f"{op}_by_columns", **choices)}
    if not archs or h_q <= FEW_HEADS or not all(isinstance(x, int) for x in (b, s_q, h_q, *keys)):
        return 0
    tiles = sum(-(-n // TILE) for n in keys)
    pays = columns_pay(b * s_q * -(-h_q // TILE), tiles, processors(next(iter(archs))))
    return tiles if pays else 0


def _call_by_columns(
    op: str, room: int, scale: float, q: jax.Array, *operands: jax.Array, **attributes: Any
) -> tuple[jax.Array, jax.Array]:
    """With room for so many tiles of keys."""
    (b, s_q, h_q, d), f32 = q.shape, jnp.float32
    of_rows = (b, s_q, -(-h_q // TILE), room)
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:-1], f32),
        *(jax.ShapeDtypeStruct((*of_rows, n), f32) for n in (TILE * TILE, TILE)),
        jax.ShapeDtypeStruct((b, s_q, room, TILE, d), q.dtype),
        jax.ShapeDtypeStruct((b, s_q), jnp.int32),
    )
    attributes["order"] = np.int64(attributes["order"])
    o, lse, *_ = call(f"{op}_by_columns", results, q, *operands, scale=np.float32(scale), **attributes)
    return o, lse


def _whole(op: str, q: jax.Array, keys: int, **choices: str) -> int:
    """`whole_queries` of an op whose keys differ from query to query. Its model has one CTA an SM, where the kernels
    for few heads have two.
    """
    b, s_q, h_q, _ = q.shape
    v = _splitting(op, q, **choices)
    if v is None or v.ctas > 1 or not all(isinstance(x, int) for x in (b, s_q, h_q, keys)):
        return 0
    return whole_queries(b * s_q, _row_tiles(v, h_q), -(-keys // v.tile_n), v.unit, processors(v.arch))


def _splits_of_span(op: str, q: jax.Array, k: jax.Array) -> int:
    """`_splits` of an op over one span of k."""
    (b, s_q, h_q, _), (_, s_kv, h_kv, _) = q.shape, k.shape
    return _splits(op, q, b * h_kv, s_q * h_q // h_kv, s_kv)


def _splits_of_queries(op: str, q: jax.Array, keys: int, whole: int = 0, **choices: str) -> int:
    """`_splits` of an op whose keys differ from query to query, so a tile of rows has heads of one query; for all but
    the `whole` first queries.
    """
    b, s_q, h_q, _ = q.shape
    return _splits(op, q, b * s_q - whole, h_q, keys, **choices)


def _splits(op: str, q: jax.Array, groups: int, rows: int, keys: int, **choices: str) -> int:
    """`split_count` for groups of rows that share no tile, with the keys of one group; 1 where an extent is not
    known.
    """
    v = _splitting(op, q, **choices)
    if v is None or not all(isinstance(x, int) for x in (groups, rows, keys)):
        return 1
    return split_count(groups * _row_tiles(v, rows), -(-keys // v.tile_n), v.unit, processors(v.arch))


def _splitting(op: str, q: jax.Array, **choices: str) -> library.BuiltVariant | None:
    """The kernel that may split the keys of q's heads: of a device that is here, if there is one."""
    built = [
        v
        for v in library.variants_for(op, d=q.shape[3], dtype=q.dtype.name, **choices)
        if v.splits and v.choices["max_heads"] >= q.shape[2]
    ]
    local, order = library.local_architectures(), list(LARGEST)
    return min(built, key=lambda v: (v.arch not in local, order.index(v.arch), v.choices["max_heads"]), default=None)


def _row_tiles(v: library.BuiltVariant, rows: int) -> int:
    """The tiles of rows that share no tile with others: a cluster has one for each of its CTAs."""
    return -(-rows // (v.tile_m * v.cluster)) * v.cluster


def _call(
    target: str,
    splits: int,
    scale: float,
    q: jax.Array,
    *operands: jax.Array,
    whole: int = 0,
    order: int = 0,
    **attributes: Any,
) -> tuple[jax.Array, jax.Array]:
    # scratch results for the parts of all but the `whole` first sequences, which the same call merges
    parts = (q.shape[0] - whole, *q.shape[1:-1], splits if splits > 1 else 0)
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape[:-1], (*parts, q.shape[-1]), parts)),
    )
    o, lse, *_ = call(target, results, q, *operands, scale=np.float32(scale), order=np.int64(order), **attributes)
    return o, lse
