"""Empty caches of a layer."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Cache, _check
from .._definitions.packed import LAYOUTS
from .._ops.indexer_keys import page_unit
from ._shape import LayerShape, formats
from .outputs import LayerCache, check_pages

_OP = "DSV4Attention"
_FP8, _FP4 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float4_e2m1fn)
_KEYS = {_FP8: "index_fp8", _FP4: "index_fp4"}  # the layouts of index keys
_IN_FP4 = {"v4_fp8": "v4_fp4", "v41_fp8": "v41_fp4"}  # the layout of entries, by that of latents


def empty(
    layer: LayerShape,
    b: int,
    max_length: int,
    dtype: Any,
    keys: Any,
    steps: int,
    block_table: jax.Array | None,
    page_tokens: int | None,
    pages: int | None,
) -> LayerCache:
    """Makes the cache that `DSV4Attention.cache` describes."""
    for name, n in (("b", b), ("max_length", max_length), ("steps", steps)):
        _check.positive(_OP, name, n)
    near, far = layouts(layer, dtype)
    plain = dtype if near is None else jnp.bfloat16
    of_keys = layout_of_keys(layer, keys, plain, near is not None)
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
        of_keys, page = that_kernels_take(_OP, keys, of_keys, block_table, pool[1], plain, "page_tokens")
        made = entries(layer.indexer.d, of_keys, page)
        cache = cache._replace(keys=made, key_tokens=None if own is None else own.state(b, steps))
    return cache


def that_kernels_take(
    op: str, keys: Any, layout: str | None, block_table: Any, page: int, plain: Any, sizes: str
) -> tuple[str | None, int]:
    """The layout of index keys, and the entries of a page of them: pages that kernels take, where the caller says
    nothing about `keys` or has no pages. sizes: the option that says how large pages are.
    """
    unit = page_unit(block_table is not None and block_table.shape[1] != 1, packed=True)
    if layout is not None and block_table is None:
        page = -(-page // unit) * unit
    if keys is None and layout is not None and page % unit:
        _say_once(
            f"{op}.cache: index keys stay in {jnp.dtype(plain)} in pages of {page} entries, since kernels take"
            f" packed ones in pages of a multiple of {unit}; {sizes}, or keys, changes this"
        )
        return None, page
    return layout, page


@functools.cache
def _say_once(text: str) -> None:
    logging.getLogger("jax_dsv4_fmha").warning(text)


def pool_of(
    layer: LayerShape, b: int, max_length: int, block_table: Any, page_tokens: Any, pages: Any
) -> tuple[int, int]:
    """Returns the pages of a cache of entries, and the entries of a page; without a table a page is a sequence."""
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
    check_pages(_OP, np.asarray(block_table) if is_known else None, pages)
    return pages, page_tokens // ratio


def layouts(layer: LayerShape, dtype: Any) -> tuple[str | None, str | None]:
    """The layouts of latents and of entries in caches of this dtype; None where they are not packed."""
    near, _ = formats(layer)
    of_model = {_FP8: (near, near), _FP4: (near, _IN_FP4[near])}
    wanted = f"bfloat16, float16, float32, {' or '.join(map(str, of_model))}"
    dtype = _check.dtype(_OP, "dtype", dtype, (*_check.FLOAT, *of_model), wanted)
    return of_model.get(dtype, (None, None))


def layout_of_keys(layer: LayerShape, keys: Any, plain: Any, packed: bool) -> str | None:
    """The layout of index keys, of this dtype or beside latents that are packed or not; None of `plain` ones."""
    if keys is not None:
        wanted = f"None, {jnp.dtype(plain)}, {' or '.join(map(str, _KEYS))}"
        keys = _check.dtype(_OP, "keys", keys, (jnp.dtype(plain), *_KEYS), wanted)
    indexer = layer.indexer
    if indexer is None or not indexer.owns_keys:
        return None
    has_layout = all(LAYOUTS[name].d == indexer.d for name in _KEYS.values())
    if keys in _KEYS and not has_layout:
        raise _check.error(
            ValueError, _OP, "keys", keys.name, f"{jnp.dtype(plain)} or None for index keys of d={indexer.d}"
        )
    if keys is None and packed and has_layout:  # what loses nothing, or as the model's code has them
        keys = _FP4 if layer.fake_quantize else _FP8 if indexer.compressor is not None else None
    return _KEYS.get(keys)
