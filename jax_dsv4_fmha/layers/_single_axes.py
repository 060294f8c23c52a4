"""Calls of a layer where Explicit axes of size 1 are in the mesh, which split nothing."""

from collections.abc import Callable
from typing import Any

import jax

from .. import Cache
from .._definitions import explicit_axes
from .outputs import Output


def without_single_axes(call: Callable[..., Output], params: Any, x: jax.Array, cache: Any, *others: Any) -> Output:
    """The results of a call whose operands no mesh axis of size 1 shards: where the operands would have had them."""
    given = params, x, cache, *others
    kept = explicit_axes.without_single(given)
    if all(map(_lie_alike, jax.tree.leaves(given), jax.tree.leaves(kept))):
        return call(*given)
    rows = [
        x,
        *(y for y in others if isinstance(y, jax.Array) and y.ndim),
        *([] if cache is None else [cache.window.rows]),
    ]
    batch = next((entry for y in rows if (entry := explicit_axes.entries(y)[0]) is not None), None)
    return _placed(call(*kept), batch, explicit_axes.entries(x)[1])


def _lie_alike(x: Any, y: Any) -> bool:
    return not isinstance(x, jax.Array) or explicit_axes.entries(x) == explicit_axes.entries(y)


def _placed(out: Output, batch: explicit_axes.Entry, tokens: explicit_axes.Entry) -> Output:
    """The same results with these axes for sequences, and for the tokens of x."""

    def of_batch(x: Any, *of_tokens: explicit_axes.Entry) -> Any:
        def place(x: jax.Array) -> jax.Array:
            return explicit_axes.placed(x, batch, *of_tokens, *explicit_axes.entries(x)[1 + len(of_tokens) :])

        return jax.tree.map(place, x)

    def of_cache(part: Any) -> Any:
        if isinstance(part, Cache) and part.block_table is not None:
            return Cache(part.entries, of_batch(part.block_table), part.layout)
        return of_batch(part)

    is_part = lambda x: isinstance(x, Cache)  # noqa: E731
    entries = {name: of_batch(getattr(out.made, name)) for name in ("compressed", "keys")}
    chosen = {name: of_batch(getattr(out.made, name), tokens) for name in ("indices", "blocks")}
    made = out.made._replace(**entries, **chosen)
    cache = jax.tree.map(of_cache, out.cache, is_leaf=is_part)
    return Output(of_batch(out.y, tokens), cache, made, of_batch(out.index_query, tokens))
