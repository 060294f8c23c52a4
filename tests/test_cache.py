"""A `Cache`, contiguous and in pages: what is appended, where it is, and what is read again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Cache, dequantize_cache, quantize_cache
from jax_dsv4_fmha._definitions.packed import LAYOUTS
from tests.helpers import normal


def contents(cache):
    """The entries of each sequence: [b, capacity, d]."""
    held = dequantize_cache(cache.entries, cache.layout) if cache.is_packed else cache.entries
    entries = np.asarray(held, np.float32)
    table = np.arange(len(entries))[:, None] if cache.block_table is None else np.asarray(cache.block_table)
    return entries[table].reshape(len(table), -1, entries.shape[-1])


TABLE = jnp.array([[4, 0, 6], [2, 5, 1]], jnp.int32)
CACHES = {
    "contiguous": lambda *args, **kwargs: zeros(2, 9, *args, **kwargs),
    "paged": lambda *args, **kwargs: zeros(7, 3, *args, **kwargs, block_table=jnp.array(TABLE)),
}
KEPT = [("contiguous", "v4_fp8"), *(("paged", name) for name, layout in LAYOUTS.items() if layout.d in (512, 576))]
KEPT += [(kind, dtype) for kind in CACHES for dtype in (jnp.bfloat16, jnp.float32)]
"""Caches, and how their entries are kept: a dtype, or a layout."""


def zeros(pages, page, kept, block_table=None):
    how = {"layout": kept} if isinstance(kept, str) else {"dtype": kept}
    return Cache.zeros(pages, page, block_table=block_table, **how)


def name_of(x):
    return x if isinstance(x, str) else x.__name__


@pytest.mark.parametrize("kind, kept", KEPT, ids=name_of)
def test_append(kind, kept):
    """Steps of 1 to 3 entries, from a different position in each sequence, around a ring of 9; nothing else changes."""
    cache = CACHES[kind](kept)
    assert cache.capacity == 9
    append = jax.jit(Cache.append, donate_argnums=0)
    as_held = jax.jit(lambda x: dequantize_cache(quantize_cache(x, kept), kept) if cache.is_packed else x)
    last, model = np.array([0, 4]), contents(cache).copy()
    for step in range(12):
        n = step % 3 + 1
        new = normal(step, 2, n, model.shape[-1], dtype=jnp.bfloat16).astype(jnp.bfloat16 if cache.is_packed else kept)
        positions = last[:, None] + np.arange(n)
        cache = append(cache, new, jnp.asarray(positions, jnp.int32))
        model[np.arange(2)[:, None], positions % 9] = as_held(new)
        last += n
        np.testing.assert_array_equal(contents(cache), model)
    assert (model != 0).any(-1).all()
    if kind == "paged":
        np.testing.assert_array_equal(cache.entries[3], 0)  # nobody's page


def test_append_leaves_out():
    """Positions below 0, missing pages, and entries that would be overwritten at once."""
    cache = Cache(jnp.full((2, 2, 1), -1.0), jnp.array([[0, -1], [7, 1]], jnp.int32))
    new = jnp.arange(14.0).reshape(2, 7, 1)
    got = cache.append(new, jnp.array([[-5, -4, -3, -2, -1, 0, 2], [0, 1, 2, 3, 4, 5, 6]], jnp.int32))
    np.testing.assert_array_equal(got.entries[..., 0], [[5, -1], [13, 10]])


@pytest.mark.parametrize("kind, kept", [x for x in KEPT if x[1] != jnp.bfloat16], ids=name_of)
def test_take(kind, kept):
    """What was appended comes back, around a ring of 9; an entry that does not exist reads as 0."""
    cache = CACHES[kind](kept)
    d = cache.take().shape[-1]
    new = normal(0, 2, 11, d, dtype=jnp.bfloat16).astype(jnp.bfloat16 if cache.is_packed else kept)
    positions = jnp.arange(11, dtype=jnp.int32) + jnp.array([[0], [4]], jnp.int32)
    cache = jax.jit(Cache.append)(cache, new, positions)
    got = jax.jit(Cache.take)(cache, jnp.array([[10, 2, -1, 7], [14, 6, -9, 6]], jnp.int32))
    held = dequantize_cache(quantize_cache(new, kept), kept) if cache.is_packed else new
    assert got.dtype == held.dtype
    np.testing.assert_array_equal(jax.jit(Cache.as_held)(cache, new), held)
    np.testing.assert_array_equal(got[0], jnp.stack([held[0, 10], held[0, 2], jnp.zeros(d, held.dtype), held[0, 7]]))
    np.testing.assert_array_equal(got[1], jnp.stack([held[1, 10], held[1, 2], jnp.zeros(d, held.dtype), held[1, 2]]))
    np.testing.assert_array_equal(jax.jit(Cache.take)(cache), contents(cache))
    with pytest.raises(ValueError, match=r"Cache.take: positions: got int32\[3, 1\], wanted int32\[b=2, n\]"):
        cache.take(jnp.zeros((3, 1), jnp.int32))


@pytest.mark.parametrize("kind, kept", KEPT, ids=name_of)
def test_append_is_in_place(kind, kept):
    if kept == jnp.bfloat16 and jax.default_backend() == "cpu":
        pytest.skip("XLA scatters bfloat16 as float32 on a CPU")
    b = 100
    cache = zeros(b, 9, kept)
    if kind == "paged":
        cache = zeros(3 * b, 3, kept, jnp.arange(3 * b, dtype=jnp.int32).reshape(b, 3))
    append = jax.jit(Cache.append, donate_argnums=0)
    compiled = append.lower(
        cache,
        jnp.zeros((b, 1, cache.take().shape[-1]), jnp.bfloat16 if cache.is_packed else kept),
        jnp.zeros((b, 1), jnp.int32),
    ).compile()
    memory, size = compiled.memory_analysis(), cache.entries.nbytes
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size


def test_slots():
    at = jnp.array([[0, 2, 3, 8, 9, -1], [5, 6, 7, 0, 2**31 - 1, -(2**31)]], jnp.int32)
    paged = CACHES["paged"](jnp.bfloat16)
    np.testing.assert_array_equal(paged.slots(at), [[12, 14, 0, 20, -1, -1], [17, 3, 4, 6, -1, -1]])
    np.testing.assert_array_equal(
        CACHES["contiguous"](jnp.bfloat16).slots(at), [[0, 2, 3, 8, -1, -1], [5, 6, 7, 0, -1, -1]]
    )
    holes = Cache(paged.entries, TABLE.at[0, 0].set(7).at[1, 1].set(-1))
    np.testing.assert_array_equal(holes.slots(at), [[-1, -1, 0, 20, -1, -1], [-1, 3, 4, 6, -1, -1]])
