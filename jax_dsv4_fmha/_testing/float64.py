"""The ops once more, as loops over rows in float64 NumPy: the reference is checked against these.

They share only the meaning with the reference. Operands are NumPy arrays; a mask is written out as positions.
"""

import functools
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


def fmha(
    q: Array,
    k: Array,
    v: Array | None,
    start: Array,
    stop: Array,
    sink: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    s_kv = k.shape[1]

    def seen(n: int, i: int) -> list[int]:
        return list(range(max(0, start[n, i]), min(s_kv, stop[n, i])))

    group = q.shape[2] // k.shape[2]
    return _rows(q, lambda n, i, h: _take(k, k if v is None else v, n, seen(n, i), h // group), sink, scale)


def sparse_fmha(
    q: Array,
    kv: Array,
    indices: Array,
    sink: Array | None = None,
    scale: float | None = None,
    d_v: int | None = None,
) -> tuple[Array, Array]:
    kv = kv[:, :, None]
    return _rows(q, lambda n, i, h: _take(kv, kv[..., :d_v], n, _named(kv, indices, n, i), 0), sink, scale, d_v)


def dsv4_attention(
    q: Array,
    window_kv: Array,
    compressed_kv: Array | None = None,
    *,
    sink: Array | None = None,
    indices: Array | None = None,
    ratio: int | None = None,
    window: int = 128,
    q_offset: Any = 0,
    first_key: Any = 0,
    lengths: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    b, s_w = window_kv.shape[:2]
    q_offset, first_key = np.broadcast_to(q_offset, b), np.broadcast_to(first_key, b)
    window_kv = window_kv[:, :, None]
    compressed_kv = None if compressed_kv is None else compressed_kv[:, :, None]

    def keys(n: int, i: int, h: int) -> tuple[Array, Array]:
        p = int(q_offset[n]) + i
        s = s_w if lengths is None else min(s_w, int(lengths[n]))
        seen = [j for j in range(s) if max(p - window, -1) < first_key[n] + j <= p]
        near = _take(window_kv, window_kv, n, seen, 0)[0]
        if compressed_kv is None:
            return near, near
        if indices is not None:
            far_seen = _named(compressed_kv, indices, n, i)
            if ratio is not None:
                far_seen = [w for w in far_seen if w < (p + 1) // ratio]
        else:
            assert ratio is not None
            far_seen = [w for w in range(compressed_kv.shape[1]) if w < (p + 1) // ratio]
        both = np.concatenate([near, _take(compressed_kv, compressed_kv, n, far_seen, 0)[0]])
        return both, both

    return _rows(q, keys, sink, scale)


def dsv4_decode(
    q: Array,
    window_cache: Any,
    compressed_cache: Any = None,
    *,
    lengths: Array,
    sink: Array | None = None,
    indices: Array | None = None,
    ratio: int | None = None,
    window: int = 128,
    q_offset: Array | None = None,
    is_causal: bool = True,
    scale: float | None = None,
) -> tuple[Array, Array]:
    b, s_q, _, d = q.shape
    lengths = np.broadcast_to(lengths, b)
    first = lengths - s_q if q_offset is None else np.broadcast_to(q_offset, b)

    @functools.lru_cache(maxsize=1)  # the heads of a query see the same
    def keys(n: int, i: int) -> tuple[Array, Array]:
        p = int(first[n]) + i
        if not 0 <= p < lengths[n]:
            return np.zeros((0, d)), np.zeros((0, d))
        near = (
            range(p - window + 1, p + 1)
            if is_causal
            else range(int(first[n]) - window, min(int(first[n]) + s_q, int(lengths[n])))
        )
        seen = [_entry(window_cache, n, at, ring=True) for at in near if at >= 0]
        if compressed_cache is not None:
            if indices is not None:
                far = indices[n, i]
                if ratio is not None:
                    far = [w for w in far if w < (p + 1) // ratio]
            else:
                assert ratio is not None
                far = np.arange((p + 1) // ratio)
            seen += [_entry(compressed_cache, n, int(w), ring=False) for w in far]
        both = np.array([x for x in seen if x is not None], np.float64).reshape(-1, d)
        return both, both

    return _rows(q, lambda n, i, h: keys(n, i), sink, scale)


def mla_decode(
    q: Array,
    cache: Any,
    *,
    lengths: Array,
    indices: Array | None = None,
    d_v: int,
    sink: Array | None = None,
    q_offset: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    b, s_q, _, d = q.shape
    first = lengths - s_q if q_offset is None else np.broadcast_to(q_offset, b)

    @functools.lru_cache(maxsize=1)  # the heads of a query see the same
    def keys(n: int, i: int) -> tuple[Array, Array]:
        p = int(first[n]) + i
        named = np.arange(p + 1) if indices is None else indices[n, i]
        named = [at for at in named if 0 <= at <= p < lengths[n]]
        seen = [_entry(cache, n, int(at), ring=False) for at in named]
        both = np.array([x for x in seen if x is not None], np.float64).reshape(-1, d)
        return both, both[:, :d_v]

    return _rows(q, lambda n, i, h: keys(n, i), sink, scale, d_v)


def gqa_decode(
    q: Array,
    k_cache: Any,
    v_cache: Any,
    *,
    lengths: Array,
    window: int | None = None,
    sink: Array | None = None,
    q_offset: Array | None = None,
    scale: float | None = None,
    k_scale: Array | float = 1.0,
    v_scale: Array | float = 1.0,
) -> tuple[Array, Array]:
    b, s_q, h_q, d = q.shape
    h_kv = k_cache.entries.shape[-1] // d
    first = lengths - s_q if q_offset is None else np.broadcast_to(q_offset, b)

    @functools.lru_cache(maxsize=1)  # the heads of a query see the same
    def entries(n: int, i: int) -> tuple[Array, Array]:
        p, found = int(first[n]) + i, []
        for at in range(max(0, p + 1 - (window or p + 1)), p + 1 if 0 <= p < lengths[n] else 0):
            pair = [_entry(cache, n, at, ring=False) for cache in (k_cache, v_cache)]
            if pair[0] is None or pair[1] is None:
                break
            found.append(pair)
        k, v = np.array(found, np.float64).reshape(-1, 2, h_kv, d).swapaxes(0, 1)
        k_scales, v_scales = (np.asarray(x, np.float64)[..., None] for x in (k_scale, v_scale))
        return k * k_scales, v * v_scales

    def keys(n: int, i: int, h: int) -> tuple[Array, Array]:
        k, v = entries(n, i)
        return k[:, h * h_kv // h_q], v[:, h * h_kv // h_q]

    return _rows(q, keys, sink, scale)


def _entry(cache: Any, n: int, at: int, ring: bool) -> Array | None:
    """An entry of sequence n in float64, or None; in packed pages, read byte by byte."""
    held = cache.entries
    packed = held.dtype == np.uint8
    page = held.shape[1] // _BYTES[cache.layout] if packed else held.shape[1]
    table = np.arange(len(held))[:, None] if cache.block_table is None else cache.block_table
    capacity = page * table.shape[1]
    at = at % capacity if ring else at
    if not (0 <= at < capacity and 0 <= table[n, at // page] < len(held)):
        return None
    held, j = held[table[n, at // page]], at % page
    if not packed:
        return held[j].astype(np.float64)
    if cache.layout == "v4_fp8":
        data, scales = held[576 * j : 576 * (j + 1)], held[576 * page + 8 * j :][:7]
        return np.concatenate([_e4m3(data[:448]) * np.repeat(_ue8m0(scales), 64), data[448:].view(_BF16).astype(float)])
    if cache.layout == "v41_fp8":
        entry = held[528 * j : 528 * (j + 1)]
        return _e4m3(entry[:512]) * np.repeat(_ue8m0(entry[512:]), 32)
    if cache.layout == "v4_fp4":
        entry = held[368 * j : 368 * (j + 1)]
        values = _e2m1(entry[:224]) * np.repeat(_ue8m0(entry[224:238]), 32)
        return np.concatenate([values, entry[240:].view(_BF16).astype(float)])
    if cache.layout == "v32_fp8":
        entry = held[656 * j : 656 * (j + 1)]
        codes, scales = _e4m3(entry[:512]).astype(np.float32), np.repeat(entry[512:528].view("<f4"), 128)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.concatenate([(codes * scales).astype(_BF16), entry[528:].view(_BF16)]).astype(np.float64)
    entry = held[288 * j : 288 * (j + 1)]
    return _e2m1(entry[:256]) * np.repeat(_e4m3(entry[256:]), 16)


_BF16 = np.dtype(ml_dtypes.bfloat16)
_BYTES = {"v4_fp8": 584, "v4_fp4": 368, "v41_fp8": 528, "v41_fp4": 288, "v32_fp8": 656}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _e4m3(codes: Array) -> Array:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _e2m1(pairs: Array) -> Array:
    return np.array([*_E2M1, *(-x for x in _E2M1)])[np.stack([pairs & 15, pairs >> 4], -1).ravel()]


def _ue8m0(scales: Array) -> Array:
    return np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127))


def _named(kv: Array, indices: Array, n: int, i: int) -> list[int]:
    row = indices[n, i]
    return [j for j in row if 0 <= j < kv.shape[1]]


def _take(k: Array, v: Array, n: int, seen: Iterable[int], h: int) -> tuple[Array, Array]:
    seen = np.array(list(seen), np.int64)
    return k[n, seen, h].astype(np.float64), v[n, seen, h].astype(np.float64)


def _rows(q: Array, keys: Any, sink: Array | None, scale: float | None, d_v: int | None = None) -> tuple[Array, Array]:
    b, s_q, h_q, d = q.shape
    o, lse = np.zeros((*q.shape[:-1], d_v or d)), np.full(q.shape[:-1], -np.inf)
    for n, i, h in np.ndindex(b, s_q, h_q):
        k, v = keys(n, i, h)
        if len(k):
            s = k @ q[n, i, h].astype(np.float64) * (d**-0.5 if scale is None else scale)
            lse[n, i, h] = s.max() + np.log(np.exp(s - s.max()).sum())
            denominator = lse[n, i, h] if sink is None else np.logaddexp(lse[n, i, h], np.float64(sink[h]))
            o[n, i, h] = np.exp(s - denominator) @ v
    return o, lse
