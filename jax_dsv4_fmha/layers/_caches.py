"""Empty caches of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Cache, _check
from .._definitions.packed import LAYOUTS
from .._ops.indexer_keys import page_unit
from .outputs import LayerCache

if TYPE_CHECKING:
    from .attention import DSV4Attention

_OP = "DSV4Attention"
_KEYS = "index_fp8"  # the layout of index keys in packed caches
_IN_FP4 = {"v4_fp8": "v4_fp4", "v41_fp8": "v41_fp4"}  # the layout of entries, by that of latents


def empty(
    layer: DSV4Attention,
    b: int,
    max_length: int,
    dtype: Any,
    steps: int,
    block_table: jax.Array | None,
    page_tokens: int | None,
    pages: int | None,
) -> LayerCache:
    """As `DSV4Attention.cache` says."""
    for name, n in (("b", b), ("max_length", max_length), ("steps", steps)):
        _check.positive(_OP, name, n)
    near, far = layouts(layer, dtype)
    plain = dtype if near is None else jnp.bfloat16
    pool = pool_of(layer, b, max_length, block_table, page_tokens, pages)
    window = Cache.zeros(b, layer.window + steps - 1, layer.d, plain, layout=near)
    if layer.compressor is None:
        return LayerCache(window)

    def entries(d: int, layout: str | None, page: int) -> Cache:
        table = None if block_table is None else jnp.array(block_table)  # each has one, so all may be donated
        return Cache.zeros(pool[0], page, d, plain, table, layout=layout)

    cache = LayerCache(window, entries(layer.d, far, pool[1]), layer.compressor.state(b, steps))
    if layer.indexer is not None and layer.indexer.owns_keys:
        own = layer.indexer.compressor
        page, layout = pool[1], None
        if near is not None and own is not None and layer.indexer.d == LAYOUTS[_KEYS].d:
            unit = page_unit(block_table is not None and block_table.shape[1] != 1, packed=True)
            page = -(-page // unit) * unit if block_table is None else page
            layout = _KEYS if page % unit == 0 else None
        keys = entries(layer.indexer.d, layout, page)
        cache = cache._replace(keys=keys, key_tokens=None if own is None else own.state(b, steps))
    return cache


def pool_of(
    layer: DSV4Attention, b: int, max_length: int, block_table: Any, page_tokens: Any, pages: Any
) -> tuple[int, int]:
    """How many pages, of how many entries, make a cache of entries; without a table a page is a sequence."""
    ratio = max(layer.ratio, 1)
    sizes = {name: n for name, n in (("page_tokens", page_tokens), ("pages", pages)) if n is not None}
    for name, n in sizes.items():
        _check.positive(_OP, name, n)
        if block_table is None:
            raise _check.error(ValueError, _OP, name, n, "None without a block_table")
    if block_table is None:
        return b, -(-max_length // ratio)
    table = _check.operand(_OP, "block_table", block_table, "b n", {"b": b}, _check.INT)
    n = table.shape[1]
    page_tokens = page_tokens or -(-max_length // (ratio * n)) * ratio
    pages = pages or b * n
    if page_tokens % ratio:
        raise _check.error(ValueError, _OP, "page_tokens", page_tokens, f"a multiple of the ratio {ratio}")
    if n * page_tokens < max_length:
        got = f"{n} pages of {page_tokens} tokens for a sequence"
        raise _check.error(ValueError, _OP, "block_table", got, f"enough for max_length={max_length}")
    is_known = not isinstance(block_table, jax.core.Tracer) and getattr(block_table, "is_fully_addressable", True)
    if is_known and (most := int(np.asarray(block_table).max())) >= pages:
        raise _check.error(ValueError, _OP, "block_table", f"page {most}", f"pages below the pool's {pages}")
    return pages, page_tokens // ratio


def layouts(layer: DSV4Attention, dtype: Any) -> tuple[str | None, str | None]:
    """The layouts of latents and of entries in caches of this dtype; None where they are not packed."""
    near, _ = layer._formats
    of_model = {jnp.dtype(jnp.float8_e4m3fn): (near, near), jnp.dtype(jnp.float4_e2m1fn): (near, _IN_FP4[near])}
    wanted = f"bfloat16, float16, float32, {' or '.join(map(str, of_model))}"
    dtype = _check.dtype(_OP, "dtype", dtype, (*_check.FLOAT, *of_model), wanted)
    return of_model.get(dtype, (None, None))
