"""Keys that the lightning indexer chooses from, in an array or a cache, and the ops that choose of either."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions import indexer as definition
from .._definitions.cache import Cache
from .._definitions.quantized import Quantized
from .._definitions.span import Span
from .._dispatch import two_levels
from .._dispatch.lowering import choose
from .._dispatch.op import ONE_OR_B, Arrays, Axes, Call, KernelUse, Op
from .._dispatch.support import Support
from .._host import indexer as raw
from .._host import library

E4M3 = jnp.dtype(jnp.float8_e4m3fn)


class Ops(NamedTuple):
    """The ops that choose from keys of a kind."""

    choose: Op
    choose_and_score: Op
    blocks: Op
    within: Op


class Keys(NamedTuple):
    """The keys from which entries are chosen: ops for them, and their operands after q and weights."""

    ops: Ops
    operands: Arrays
    got: str = ""
    wanted: str = ""
    """what is given of them, and what kernels want of them, for errors"""
    fits: bool = True
    """whether kernels take such pages"""


def choices_of(k: Any) -> dict[str, Any]:
    """The choices of kernels that keys make, read where they are."""
    if not isinstance(k, Cache):
        return {"paged": False, "packing": ""}
    return {"paged": True, "packing": two_levels.packing_of(k.layout) if k.is_packed else ""}


def keys_of(op: str, k: Any, dtype: Any, dims: dict[str, Any], in_pages: bool) -> Keys:
    """in_pages: whether a `Cache` is read where it is; else XLA gathers it."""
    got = ""
    if isinstance(k, Cache):
        _check_cached(op, k, dtype, dims)
        if in_pages:
            return _cached_keys(k, dims)
        k = Quantized(*k.index_keys()) if dtype == E4M3 else k.take().astype(dtype)
        got = "keys of a Cache as XLA gathers them"
    if dtype == E4M3:
        if not isinstance(k, Quantized):
            raise _check.error(TypeError, op, "k", k, f"a Quantized or a Cache, as q is {dtype}")
        codes = _check.operand(op, "k.codes", k.codes, "b s_c d", dims, (dtype,))
        scales = _check.operand(op, "k.scales", k.scales, "b s_c", dims, _check.FP32)
    else:
        codes = _check.operand(op, "k", k, "b s_c d", dims, (dtype,))
        scales = jnp.ones((dims["b"], dims["s_c"]), jnp.float32)
    return Keys(_OF_ARRAYS, (codes, scales), got)


def _check_cached(op: str, cache: Cache, dtype: Any, dims: dict[str, Any]) -> None:
    """Raises unless a cache holds keys for queries of this dtype."""
    layout = cache.layout if cache.is_packed else None
    if layout not in ((_INDEX_FP8,) if dtype == E4M3 else (None, _INDEX_FP4)):
        got = layout or cache.entries.dtype
        wanted = _INDEX_FP8 if dtype == E4M3 else f"{dtype} or {_INDEX_FP4}"
        raise _check.error(ValueError, op, "k", f"a Cache of {got}", f"one of {wanted}, as q is {dtype}")
    cache.check(op, "k", dims, (dtype,))
    dims["s_c"] = cache.capacity


def _cached_keys(cache: Cache, dims: dict[str, Any]) -> Keys:
    """Keys in pages, which kernels read where they are."""
    several = cache.block_table is not None
    table = cache.block_table if several else jnp.zeros((dims["b"], 1), jnp.int32)
    pool = cache.entries[None] if several else cache.entries[:, None]
    wanted = f"pages of a multiple of {_unit(cache)}"
    got = f"pages of {cache.page}"
    return Keys(_OF_PAGES[cache.is_packed], (pool, table), got, wanted, fit(cache))


def _unit(cache: Cache) -> int:
    return page_unit(cache.block_table is not None and cache.block_table.shape[1] != 1, cache.is_packed)


def fit(k: Any) -> bool:
    """True if these are keys in pages of a size that kernels take."""
    return isinstance(k, Cache) and isinstance(k.page, int) and k.page % _unit(k) == 0


def page_unit(several: bool, packed: bool) -> int:
    """Kernels take pages of a multiple of this, one or several to a sequence: `IndexPageUnit` in C++."""
    return (32 if packed else 8) if several else (4 if packed else 1)


def visible(op: str, dims: dict[str, Any], span: Any) -> tuple[jax.Array, jax.Array]:
    """start and stop, int32 `[b, s_q]`, of the entries that queries see."""
    if not isinstance(span, Span):
        raise _check.error(TypeError, op, "span", span, "a Span")
    return span.bounds(dims["b"], dims["s_q"], dims["s_c"], op)


# The ops


TRAINED = (Axes("q", "b s_q h d"), Axes("k", "b s_c d"), Axes("weights", "b s_q h"))
SPAN = (Axes("start", "b s_q"), Axes("stop", "b s_q"))
INDICES = Axes("indices", "b s_q topk")
SCORES_THERE = Axes("scores", "b s_q topk")


def shipped_for_both(scores: str, topk: int, dims: dict[str, Any], **choices: Any) -> tuple[str, ...]:
    """The architectures that have a kernel of `scores` with these choices, and one that chooses so many."""
    if dims["d"] != D:
        return ()
    chooses = {v.arch for v in library.SHIPPED if v.op == "indexer_topk" and topk <= v.choices["max_topk"]}
    return tuple(arch for arch in library.shipped_for(scores, **choices) if arch in chooses)


def call(
    op: str,
    of: Op,
    implementation: _check.Implementation | None,
    scores: str,
    archs: tuple[str, ...],
    q: jax.Array,
    dims: dict[str, Any],
    got: str = "",
    wanted: str = "",
    **params: int,
) -> Call:
    """The call of an op that chooses by the kernels of `scores` and of top-k, shipped for these architectures. `got`
    and `wanted` are for errors: what else is given, and what kernels want of it.
    """
    if implementation == "reference":
        return Call(of, KernelUse.NEVER, tuple(params.items()))
    sizes = [f"{name}={params[name]}" for name in ("topk", "count") if name in params]
    got = ", ".join(filter(None, [f"{q.dtype.name}, h={dims['h']}, d={dims['d']}", *sizes, got]))
    support = Support(got, (scores, "indexer_topk"), archs, ", ".join(filter(None, [wanted, WANTED])))
    return Call(of, choose(op, implementation, support), tuple(params.items()), support)


D = 128  # of a kernel
WANTED = f"d={D}, and operands that a kernel is built for"
_INDEX_FP8, _INDEX_FP4 = "index_fp8", "index_fp4"


def _choosing(
    keys: tuple[Axes, ...],
    reference: Callable[..., Arrays],
    kernel: Callable[..., Arrays],
    blocks: tuple[Callable[..., Arrays], Callable[..., Arrays]],
    within: tuple[Callable[..., Arrays], Callable[..., Arrays]],
    triangle: str | None = None,
) -> Ops:
    """Ops of (q, weights, *keys, start, stop): one chooses entries, another also gives their scores; and those of a
    choice in two levels, each with its reference and its kernel. triangle: the keys' axis, as in `Op`."""
    given = (TRAINED[0], TRAINED[2], *keys)
    operands = (*given, *SPAN)

    def choose(*operands: jax.Array, topk: int) -> Arrays:
        return kernel(*operands, topk=topk, return_scores=False)[:1]

    return Ops(
        Op(
            "lightning_indexer",
            operands,
            (INDICES,),
            lambda *x, topk: reference(*x, topk=topk)[:1],
            choose,
            triangle=triangle,
        ),
        Op(
            "lightning_indexer",
            operands,
            (INDICES, SCORES_THERE),
            reference,
            functools.partial(kernel, return_scores=True),
            triangle=triangle,
        ),
        Op("indexer_blocks", operands, (Axes("blocks", "b s_q count"),), *blocks, triangle=triangle),
        Op(
            "lightning_indexer",
            (*given, Axes("blocks", "b s_q n"), *SPAN),
            (INDICES, SCORES_THERE),
            *within,
        ),
    )


_OF_ARRAYS = _choosing(
    (TRAINED[1], Axes("k.scales", "b s_c")),
    definition.select,
    raw.lightning_indexer,
    (definition.greatest_blocks, two_levels.greatest_blocks),
    (definition.select_within, two_levels.choose_within),
    triangle="s_c",
)
_OF_PAGES = {
    packed: _choosing(
        (Axes("k", f"{ONE_OR_B} pages {width}"), Axes("k.block_table", "b table")),
        definition.select_of_pages,
        two_levels.choose_of_pages,
        (definition.greatest_blocks_of_pages, two_levels.greatest_blocks_of_pages),
        (definition.select_within_pages, two_levels.choose_within_pages),
    )
    for packed, width in ((False, "page d"), (True, "page_bytes"))
}
