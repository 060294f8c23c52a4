"""A stand-in for FlashMLA: its API, with what it demands of operands, and its numbers by NumPy."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass
class Schedule:
    calls: int = 0


def array(x):
    return x if isinstance(x, jax.Array) else jnp.from_dlpack(x.contiguous())


def attention(q, keys, seen, sink, scale):
    """o `[n, h, d]` of queries `[n, h, d]` that see keys `[n, k, d]` where `seen [n, k]`, and their lse."""
    q, keys, sink = (np.asarray(x, np.float64) for x in (q, keys, sink))
    scores = np.where(seen[:, None], np.einsum("nhd,nkd->nhk", q, keys) * scale, -np.inf)
    most = np.maximum(scores.max(-1), sink)
    weights = np.exp(scores - most[..., None])
    total = weights.sum(-1) + np.exp(sink - most)
    o = np.einsum("nhk,nkd->nhd", weights, keys) / total[..., None]
    return jnp.asarray(o, jnp.bfloat16), jnp.asarray(most + np.log(weights.sum(-1)), jnp.float32)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    q, kv, indices = map(array, (q, kv, indices))
    (s, h, d), (n, one, _), topk = q.shape, kv.shape, indices.shape[2]
    assert q.dtype == kv.dtype == jnp.bfloat16 and indices.dtype == jnp.int32 and d_v == 512
    assert h % 64 == 0 and one == 1 and kv.shape == (n, 1, d) and indices.shape == (s, 1, topk) and topk % 128 == 0
    slots = np.asarray(indices[:, 0])
    seen = (slots >= 0) & (slots < n)
    o, lse = attention(q, kv[:, 0][np.where(seen, slots, 0)], seen, array(attn_sink), sm_scale)
    return o[..., :d_v], lse, lse


def get_mla_metadata():
    return Schedule(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
):
    assert isinstance(tile_scheduler_metadata, Schedule) and num_splits is None and not causal and head_dim_v == 512
    tile_scheduler_metadata.calls += 1
    q = array(q)
    b, s, h, d = q.shape
    if indices is None:
        assert not is_fp8_kvcache and attn_sink is None and extra_k_cache is None
        pages, lengths = array(k_cache)[array(block_table)], np.asarray(array(cache_seqlens))
        assert s == 1 and pages.shape == (b, pages.shape[1], 64, 1, d) and pages.dtype == jnp.bfloat16
        keys = pages.reshape(b, -1, d)
        seen = np.arange(keys.shape[1]) < lengths[:, None]
        o, lse = attention(q[:, 0], keys, seen, np.full(h, -np.inf), softmax_scale)
        return o[:, None, :, :512], lse[..., None]
    assert is_fp8_kvcache and block_table is None and cache_seqlens is None
    keys, seen, size = [], [], {512: 584, 576: 656}[d]
    caches = (k_cache, indices), (extra_k_cache, extra_indices_in_kvcache)
    for pages, slots in caches if d == 512 else caches[:1]:
        pages, slots = array(pages), np.asarray(array(slots))
        assert pages.dtype == jnp.uint8 and pages.shape[2:] == (1, size) and slots.shape[:2] == (b, s)
        assert slots.shape[2] % 64 == 0 and h in (64, 128)
        seen.append((slots >= 0).reshape(b * s, -1))
        keys.append(
            (entries if d == 512 else entries_of_576)(np.asarray(pages))[
                np.where(slots >= 0, slots, 0).reshape(b * s, -1)
            ]
        )
    sink = np.full(h, -np.inf) if attn_sink is None else array(attn_sink)
    o, lse = attention(q.reshape(b * s, h, d), np.concatenate(keys, 1), np.concatenate(seen, 1), sink, softmax_scale)
    return o.reshape(b, s, h, d)[..., :512], lse.reshape(b, s, h).swapaxes(1, 2)


def entries(pages):
    """float32 `[pages * n, 512]` of uint8 `[pages, n, 1, 584]`: codes and last 64 of all entries, then all scales."""
    count, n = pages.shape[:2]
    page = pages.reshape(count, -1)
    rows, scales = page[:, : n * 576].reshape(count, n, 576), page[:, n * 576 :].reshape(count, n, 8)[..., :7]
    codes = rows[..., :448].copy().view(jnp.float8_e4m3fn).astype(np.float32).reshape(count, n, 7, 64)
    values = codes * np.exp2(scales.astype(np.float32) - 127)[..., None]
    rope = rows[..., 448:].copy().view(jnp.bfloat16).astype(np.float32)
    return np.concatenate([values.reshape(count, n, 448), rope], -1).reshape(count * n, 512)


def entries_of_576(pages):
    """float32 `[pages * n, 576]` of uint8 `[pages, n, 1, 656]`: an entry's 512 codes, 4 scales in float32, and 64."""
    rows = pages.reshape(-1, 656)
    codes = rows[:, :512].copy().view(jnp.float8_e4m3fn).astype(np.float32).reshape(-1, 4, 128)
    values = (codes * rows[:, 512:528].copy().view(np.float32)[..., None]).reshape(-1, 512)
    rope = rows[:, 528:].copy().view(jnp.bfloat16).astype(np.float32)
    return np.concatenate([values.astype(jnp.bfloat16).astype(np.float32), rope], -1)
