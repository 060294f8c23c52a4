"""The decode suite of `bench`: which steps it times, on which operands, and how XLA alone would compute them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.cache import Cache
from .._definitions.packed import LAYOUTS, quantize_cache
from .._dispatch.sources import SelectionSource
from .._ops.decode import dsv4_decode, seen_slots
from .._testing.cases import Case

_PAGE = 64
_ENTRIES = 16384  # of the compressed cache, for each sequence


def step(h_q: int, topk: int, b: int, *features: str) -> Case:
    """Two new tokens in a layer of ratio 4."""
    return Case(
        "dsv4_decode", b, 2, 4 * _ENTRIES, h_q, 1, 512, shared_kv=True, sink="normal", ratio=4, topk=topk, page=_PAGE,
        features=features,
    )  # fmt: skip


def dense(*features: str) -> Case:
    """One new token that sees the window and all of a long cache."""
    return Case(
        "dsv4_decode", 16, 1, 32768, 128, 1, 512, shared_kv=True, sink="normal", ratio=1, page=_PAGE, features=features
    )


def name(c: Case) -> str:
    entries = c.s_kv // c.ratio
    keys = f"top-k {c.topk} of {entries}" if c.topk else f"{entries} of ratio {c.ratio}"
    return f"window {c.window} + {keys}"


def work(c: Case) -> tuple[float, float]:
    """As `bench.work`: an entry counts for every query that selects it, but the window once for a sequence."""
    rows, far = c.b * c.s_q * c.h_q, c.topk or c.s_kv // c.ratio
    near = c.window + c.s_q - 1
    of_window, of_far = (2 * c.d if layout is None else LAYOUTS[layout].entry for layout in c.layouts)
    read = c.b * (near * of_window + far * (c.s_q if c.topk else 1) * of_far + c.s_q * 4 * c.topk)
    return 4.0 * c.d * rows * (c.window + far), float(read + rows * (4 * c.d + 4))


def operands(c: Case, key: jax.Array) -> dict[str, Any]:
    """Sequences at the end of their room, in pages in random order, and indices that are random permutations."""
    keys = iter(jax.random.split(key, 8))

    def cache(entries: int, layout: str | None) -> Cache:
        pages = -(-entries // c.page)
        table = jax.random.permutation(next(keys), c.b * pages).astype(jnp.int32).reshape(c.b, pages)
        held = jax.random.normal(next(keys), (c.b * pages, c.page, c.d), c.dtype)
        return Cache(held, table) if layout is None else Cache(quantize_cache(held, layout), table, layout)

    entries = c.s_kv // c.ratio
    arrays: dict[str, Any] = {
        "q": jax.random.normal(next(keys), (c.b, c.s_q, c.h_q, c.d), c.dtype),
        "window_cache": cache(c.window + c.s_q - 1, c.layouts[0]),
        "compressed_cache": cache(entries, c.layouts[1]),
        "lengths": jnp.full((c.b,), c.s_kv, jnp.int32),
        "sink": jax.random.normal(next(keys), (c.h_q,)),
    }
    if c.topk:
        rows = _permutations(next(keys), c.b * c.s_q, entries, c.topk)
        arrays["indices"] = rows.reshape(c.b, c.s_q, c.topk)
    return arrays


def _permutations(key: jax.Array, rows: int, n: int, some: int) -> jax.Array:
    """int32 [rows, some]: in each row another permutation of n, a power of two, by a hash that is one to one."""
    bits = n.bit_length() - 1
    x = jnp.arange(some, dtype=jnp.uint32)
    for factor in jax.random.bits(key, (4, rows, 1)) | 1:
        x = x * factor % n
        x ^= x >> (bits + 1) // 2
    return x.astype(jnp.int32)


def call(c: Case, **operands: Any) -> Any:
    return dsv4_decode(**operands, ratio=c.ratio, window=c.window, implementation="cubin")


def layers(c: Case, q: jax.Array, layers: list[dict[str, Any]]) -> jax.Array:
    """One call after the other, each with the previous one's o as its q; all read pages at the places of the first."""
    first = layers[0]
    for layer in layers:
        caches = {
            name: dataclasses.replace(layer[name], block_table=first[name].block_table)
            for name in ("window_cache", "compressed_cache")
        }
        q, _ = call(c, **layer | caches | {"q": q, "lengths": first["lengths"]})
    return q


def xla(
    c: Case, *, q: Any, window_cache: Cache, compressed_cache: Cache, lengths: Any, sink: Any, indices: Any = None
) -> Any:
    """The usual way in jnp: gather the entries, two products and a softmax between them."""
    sources = seen_slots(c.s_q, window_cache, compressed_cache, lengths, indices, None, c.ratio, c.window)
    keys = jnp.concatenate([_gather(x) for x in sources], 2)
    there = [(x.indices >= 0) & (jnp.arange(x.indices.shape[2]) < x.length[..., None]) for x in sources]
    seen = jnp.concatenate(there, 2)
    s = jnp.einsum("bshd,bsnd->bshn", q, keys, preferred_element_type=jnp.float32) * c.d**-0.5
    s = jnp.concatenate(
        [jnp.where(seen[:, :, None], s, -jnp.inf), jnp.broadcast_to(sink[:, None], (*q.shape[:-1], 1))], -1
    )
    p = jax.nn.softmax(s)[..., :-1].astype(q.dtype)
    return jnp.einsum("bshn,bsnd->bshd", p, keys)


def _gather(source: SelectionSource) -> Any:
    pool, slots = source.keys[0], source.indices
    if not source.is_packed:
        return pool[slots]
    how = LAYOUTS[source.layout]
    page = how.page_entries(pool.shape[1])

    def read(start: Any, size: int) -> Any:
        return jax.vmap(lambda page, at: jax.lax.dynamic_slice(pool, (page, at), (1, size))[0])(
            (slots // page).ravel(), start.ravel()
        ).reshape(*slots.shape, size)

    return how.decode(*map(read, how.starts(slots % page, page), how.parts))
