"""The raw call of attention, and into how many parts it splits keys.

An op says where keys come from. Its operands are the keys, for each source which of them a query sees, and a sink:

    mha_fwd           k, v, start, stop, sink                              k and v [b, s_kv, h_kv, d]
    mha_fwd_paged     k, v, start, stop, k_pages, v_pages, sink            k and v [pages, page, h_kv, d]
    mha_fwd_paged_window  the same, of a window
    mha_fwd_paged_e4m3    the same, and scales before the sink             k and v float8_e4m3fn
    mla_span_fwd      kv, start, stop, sink                                kv [b, s_kv, h_kv, d], which is K and V
    mla_sparse_fwd    kv, indices, length, sink                            kv [b, s_kv, d], or a pool [s_kv, d]
    csa_fwd           window_kv, start, stop, kv, indices, length, sink    window_kv [b, s_w, d]
    hca_fwd           window_kv, start, stop, kv, start2, stop2, sink      kv [b, s_c, d]
    dsv4_decode       pool, indices, length, pool, indices, length, sink   the window's and the compressed cache's

- A span: query i sees the keys `start <= j < stop`, int32 `[b, s_q]` within `[0, s_kv]`.
- A selection: query i sees the keys that `indices[i, :length[i]]` name, int32 `[b, s_q, topk >= 1]` and `[b, s_q]`.
  An entry outside of `[0, s_kv)` is absent. Pools of `dsv4_decode`, and of `mla_sparse_fwd` with d_v, may be packed:
  uint8 `[pages, bytes]`, where index i means entry i % n of page i // n (`_definitions/packed.py`).
- Pages: key j of a sequence is key j % page of page `k_pages[j // page]`, int32 `[b, width]`, and its value the same of
  `v_pages`. What a query sees has pages, and a page a multiple of 8 keys.
- A window of a step over pages: a sequence has one query, `stop` is how many tokens it has and `start` how many up to
  the query's own, which sees the last `window` of these, at most 31 boxes and a key of pages; but nothing from a page
  on that is not there, and nothing where there is no such token.
- scales: float32 `[b, h_kv, 2]`, by which the codes of K and those of V are multiplied. A code of NaN may be any
  number.
- sink: float32 `[h_q]`, -inf for none.

A mode may change them:

- rotary: q is before its norm and RoPE, and o is after RoPE back. After the sink comes a table float32 `[b, s_q, 64]`,
  cos and sin of each pair in turn.
- precision: keys are codes, float8_e4m3fn, as `key_codes` makes them: of 528 bytes, or 656 for "e4m3_bf16_rope", with
  each key's unit at its end.
- d_v: the first so many of a key's numbers are its value, and o has no others.
- order "few_heads": `mla_span_fwd` with at most `FEW_HEADS` heads over kv `[b, s_kv, d]`, in `mla_sparse_fwd`'s order.
- order "by_columns": two kernels share out keys and then columns of few queries.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import library
from .call import call, extent
from .mode import BY_COLUMNS, Mode, name_of
from .split_kv import LARGEST, processors, split_count, whole_queries

ORDER = 2
"""The number of the canonical order of sums (docs/bits.md), in which no keys are split; ffi/forward.h refuses a
call for another one, and a call whose kernels do not have it."""

ROPE = extent("csa_fwd_turned", "table")
"""the dimensions of a head that kernels rotate, in a rotary mode"""

TILE = 64
"""heads, and keys, of a tile"""

FEW_HEADS = 32
"""with at most so many a query's sums have another order, of another kernel"""


def attention(
    op: str,
    mode: Mode,
    q: jax.Array,
    *operands: jax.Array,
    scale: float,
    order: int = 0,
    packing: str | None = None,
    eps: float | None = None,
    most: int | None = None,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention in one call: o like q, with the sink in its denominator, and lse float32 `[b, s_q, h_q]` without it.

    Args:
      op, mode: of the kernels; the operands are as this module says.
      q: `[b, s_q, h_q, d]`, bfloat16 or float16; bfloat16 with packed keys.
      scale: finite and > 0.
      order: of sums: 0 for any, or `ORDER`. `mha_fwd` has that where start is 0, `mla_span_fwd` and `hca_fwd` with one
        KV head and a multiple of `TILE` heads, others for any operands.
      packing: of `dsv4_decode`: "" for pools like q, the layout of both pools, "v4_fp8" or "v41_fp8", or that of the
        second one, "v4_fp4" or "v41_fp4", where the first has the FP8 layout of the same model; of `mla_sparse_fwd`
        with d_v: "" or "v32_fp8".
      eps: of the norm, in a rotary mode.
      most: how many keys the queries of a sequence see at most, where that is known: fewer are split into fewer parts.
      window: of `mha_fwd_paged_window`.
    """
    attributes: dict[str, Any] = {"scale": np.float32(scale), "order": np.int64(order)}
    attributes |= {} if packing is None else {"packing": packing}
    attributes |= {} if eps is None else {"eps": np.float32(eps)}
    attributes |= {} if window is None else {"window": np.int64(window)}
    target = name_of(op, mode)
    if mode == BY_COLUMNS:
        results = _left_by_columns(q, tiles_of(keys_of(op, operands)))
        o, lse, *_ = call(target, results, q, *operands, **attributes)
        return o, lse
    whole, splits = parts(op, mode, q, operands, order=order, packing=packing, most=most)
    shape = q.shape
    if whole and shape[1] != 1:  # all queries have keys of the same pools, so each may be a sequence
        *sources, sink = operands
        listed = (x.reshape(-1, 1, *x.shape[2:]) if i % 3 else x.reshape(x.shape[-2:]) for i, x in enumerate(sources))
        q, operands = q.reshape(-1, 1, *shape[2:]), (*listed, sink)
    # scratch results for the parts of all but the `whole` first sequences, which the same call merges
    of_parts = (q.shape[0] - whole, *q.shape[1:-1], splits if splits > 1 else 0)
    d_v = mode.d_v or q.shape[-1]
    results = (
        jax.ShapeDtypeStruct((*q.shape[:-1], d_v), q.dtype),
        *(jax.ShapeDtypeStruct(x, jnp.float32) for x in (q.shape[:-1], (*of_parts, d_v), of_parts)),
    )
    o, lse, *_ = call(target, results, q, *operands, **attributes)
    return (o, lse) if q.shape == shape else (o.reshape(*shape[:-1], d_v), lse.reshape(shape[:-1]))


def _left_by_columns(q: jax.Array, room: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The results of a call "by_columns": o, lse, and what its two kernels leave for one another, with room for so many
    tiles of keys.
    """
    (b, s_q, h_q, d), f32 = q.shape, jnp.float32
    of_rows = (b, s_q, -(-h_q // TILE), room)
    return (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(q.shape[:-1], f32),
        *(jax.ShapeDtypeStruct((*of_rows, n), f32) for n in (TILE * TILE, TILE)),
        jax.ShapeDtypeStruct((b, s_q, room, TILE, d), q.dtype),
        jax.ShapeDtypeStruct((b, s_q), jnp.int32),
    )


def _sources(op: str, operands: Sequence[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """The keys of each source, and its starts or its indices."""
    operands = operands[1:] if op.startswith("mha_fwd") else operands  # v is like k
    count = (
        1 if op.startswith("mha_fwd") else len(operands) // 3
    )  # after the sources comes a sink, and one more operand at most
    return list(zip(operands[: 3 * count : 3], operands[1 : 3 * count : 3], strict=True))


def keys_of(op: str, operands: Sequence[jax.Array]) -> list[Any]:
    """The keys that a query may see of each source, at most."""
    if op.startswith("mha_fwd_paged"):
        _, pool, _, _, table, *_ = operands
        return [pool.shape[1] * table.shape[1]]
    return [seen.shape[2] if seen.ndim == 3 else keys.shape[1] for keys, seen in _sources(op, operands)]


def tiles_of(keys: Sequence[int]) -> int:
    """The tiles of so many keys of each source."""
    return sum(-(-n // TILE) for n in keys)


class Parts(NamedTuple):
    """The split of a call's keys, which depends on shapes and the chip alone."""

    whole: int
    """how many of the first queries, or sequences of one query, have whole keys"""
    splits: int
    """into how many parts the keys of the others are split; 1 where an extent is not known"""


def parts(
    op: str,
    mode: Mode,
    q: jax.Array,
    operands: Sequence[jax.Array],
    *,
    order: int = 0,
    packing: str | None = None,
    most: int | None = None,
) -> Parts:
    """Computes the split of keys in a call of `attention`; without a kernel that splits them there is one part."""
    (b, s_q, h_q, _), sources, whole = q.shape, _sources(op, operands), 0
    choices = {} if packing is None else {"packing": packing}
    v = None if order or mode == BY_COLUMNS else _splitting(name_of(op, mode), q, **choices)
    if v is None:
        return Parts(0, 1)
    keys, chip = sum(keys_of(op, operands)), processors(v.arch)
    if any(seen.ndim == 3 for _, seen in sources):  # a tile of rows has heads of one query
        are_lists = all(seen.ndim == 3 for _, seen in sources)
        if are_lists and (s_q == 1 or all(b == 1 or pool.ndim == 2 for pool, _ in sources)):
            whole = _whole(v, q, keys)
        groups, rows = b * s_q - whole, h_q
    else:
        h_kv = sources[0][0].shape[2] if sources[0][0].ndim == 4 else 1
        groups, rows, chip = b * h_kv, s_q * h_q // h_kv, chip * v.ctas
    if not all(isinstance(x, int) for x in (groups, rows, keys)):
        return Parts(whole, 1)
    keys = keys if most is None else min(keys, most)
    return Parts(whole, split_count(groups * _row_tiles(v, rows), -(-keys // v.tile_n), v.unit, chip))


def _whole(v: library.BuiltVariant, q: jax.Array, keys: Any) -> int:
    """`whole_queries` of an op whose keys differ from query to query. Its model has one CTA an SM, where the kernels
    for few heads have two.
    """
    b, s_q, h_q, _ = q.shape
    if v.ctas > 1 or not all(isinstance(x, int) for x in (b, s_q, h_q, keys)):
        return 0
    return whole_queries(b * s_q, _row_tiles(v, h_q), -(-keys // v.tile_n), v.unit, processors(v.arch))


def _splitting(name: str, q: jax.Array, **choices: str) -> library.BuiltVariant | None:
    """The kernel that may split the keys of q's heads: of a device that is here, if there is one."""
    built = [
        v
        for v in library.variants_for(name, d=q.shape[3], dtype=q.dtype.name, **choices)
        if v.splits and v.choices["max_heads"] >= q.shape[2]
    ]
    local, order = library.local_architectures(), list(LARGEST)
    return min(built, key=lambda v: (v.arch not in local, order.index(v.arch), v.choices["max_heads"]), default=None)


def _row_tiles(v: library.BuiltVariant, rows: int) -> int:
    """The tiles of rows that share no tile with others: a cluster has one for each of its CTAs."""
    return -(-rows // (v.tile_m * v.cluster)) * v.cluster
