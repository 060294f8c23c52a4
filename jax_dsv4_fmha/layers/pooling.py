"""Pooling of a block's tokens, by a softmax over them for each channel. Tokens have kv and then the scores."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .. import _check
from .._definitions import explicit_axes
from .._definitions.cache import Cache
from .._definitions.pytree import public_pytree


@public_pytree
@dataclasses.dataclass(frozen=True)
class RunningSums:
    """The state of a compressor of long blocks, for b sequences: the last tokens, which a later call may take back, and
    sums of those before them. It is a pytree; donate it with the caches.

    Examples:
      >>> from jax_dsv4_fmha.layers import Compressor
      >>> state = Compressor(hidden=64, d=16, ratio=128).state(b=2, steps=4)
      >>> state.tokens.shape, state.sums.shape, state.folded.shape
      ((2, 4, 32), (2, 3, 16), (2, 1))
    """

    tokens: jax.Array
    """float32 `[b, steps, 2 d]`, kv and score of each: a ring, position p in slot `p % steps`"""
    sums: jax.Array
    """float32 `[b, 3, d]`, of a block's tokens before them: the greatest score of each channel, the sum of weights
    `exp(score - greatest)`, and the sum of weights times kv"""
    folded: jax.Array
    """int32 `[b, 1]`: the tokens of the sequence that these sums and earlier entries have"""

    @classmethod
    def zeros(cls, b: int, steps: int, d: int) -> "RunningSums":
        """Makes the state of sequences that have not begun."""
        b, steps, d = (_check.positive("RunningSums", *x) for x in (("b", b), ("steps", steps), ("d", d)))
        shapes = ((b, steps, 2 * d), (b, 3, d))
        tokens, sums = (jnp.zeros(shape, jnp.float32) for shape in shapes)
        return cls(tokens, sums, jnp.zeros((b, 1), jnp.int32))

    @property
    def capacity(self) -> int:
        """Tokens that a call of `step` may add, or take back."""
        return self.tokens.shape[1]


def begun(state: RunningSums, start: jax.Array, lengths: jax.Array) -> RunningSums:
    """The sums for tokens from `start` to `lengths`, both int32 `[b]`: where a sequence begins, another one's sums are
    forgotten. An idle place, without tokens, stays as it is.
    """
    first = jnp.maximum(start, 0)
    folded = jnp.where((lengths > first)[:, None], jnp.minimum(state.folded, first[:, None]), state.folded)
    return dataclasses.replace(state, folded=folded)


def sums_of_block(state: RunningSums, first: jax.Array) -> list[jax.Array]:
    """The sums `[b, d]` if they have tokens of the block from `first` on, int32 `[b]`; otherwise those of none."""
    has = (state.folded > first[:, None])[:, None]
    most, weights, kv = jnp.unstack(jnp.where(has, state.sums, empty(state.sums)), axis=1)
    return [most, weights, kv]


def last_tokens(state: RunningSums, positions: jax.Array) -> jax.Array:
    """The tokens at these positions `[b, n]`, of those that are kept one by one."""
    return jnp.take_along_axis(state.tokens, (positions % state.capacity)[..., None], 1)


def empty(like: jax.Array) -> jax.Array:
    """The sums `[…, 3, d]` of no tokens."""
    return jnp.zeros_like(like).at[..., 0, :].set(-jnp.inf)


def fold(sums: list[jax.Array], token: jax.Array, there: jax.Array) -> list[jax.Array]:
    """The sums `[b, d]` with one token more, `[b, 2 d]`, where it is there `[b]`."""
    (most, weights, pooled), (kv, score) = sums, jnp.split(token, 2, -1)
    new = jnp.maximum(most, score)
    old, weight = jnp.exp(most - new), jnp.exp(score - new)
    folded = [new, weights * old + weight, pooled * old + weight * kv]
    return [jnp.where(there[:, None], x, y) for x, y in zip(folded, sums, strict=True)]


def pool_step(
    state: RunningSums, rows: jax.Array, start: jax.Array, lengths: jax.Array, ratio: int
) -> tuple[jax.Array, RunningSums]:
    """The entry `[b, 1, d]`, before its norm, that a step's tokens complete, if they do; and the state with them.

    Tokens are folded one by one, in their order, by steps and by `fold` alone: by one compiled loop, since a compiler
    may round each copy of `fold` differently. So the bits do not depend on how many came at a time, nor on what was
    taken back.

    Args:
      state: the state.
      rows: float32 `[b, s, 2 d]`, s up to the state's capacity, at the positions from `start` on, int32 `[b]`; those at
        `lengths` or later, int32 `[b]`, are padding.
      ratio: tokens of a block, at least as many as the state keeps.
    """
    s, steps = rows.shape[1], state.capacity
    state = begun(state, start, lengths)
    positions, first = counted(start, 0, s), start // ratio * ratio
    new = (positions >= 0) & (positions < lengths[:, None])
    displaced = positions - steps  # the tokens in the slots of the new ones
    leaves = new & (displaced >= state.folded)
    folded = jnp.max(jnp.where(leaves, displaced + 1, state.folded), 1)
    ring = Cache(state.tokens).append(rows, jnp.where(new, positions, -1)).entries
    kept = counted(jnp.maximum(folded, first), 0, steps)  # those of the block that are not in its sums
    tokens = jnp.concatenate(
        [last_tokens(state, positions), last_tokens(dataclasses.replace(state, tokens=ring), kept)], 1
    )
    there = jnp.concatenate([leaves, kept < (first + ratio)[:, None]], 1)
    begins = jnp.concatenate([leaves & (displaced % ratio == 0), kept == first[:, None]], 1)

    def next_(sums: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        token, there, begins = x
        parts = jnp.unstack(jnp.where(begins[:, None, None], empty(sums), sums), axis=1)
        sums = jnp.stack(fold(list(parts), token, there), 1)
        return sums, sums

    last, sums = lax.scan(next_, state.sums, tuple(jnp.moveaxis(x, 1, 0) for x in (tokens, there, begins)))
    return (last[:, 2] / last[:, 1])[:, None], RunningSums(ring, sums[s - 1], folded[:, None])


@functools.partial(jax.jit, static_argnames="ratio", inline=True)  # one program where it is called outside of any
def pool_chunk(
    state: RunningSums, rows: jax.Array, start: jax.Array, lengths: jax.Array, ratio: int
) -> tuple[jax.Array, RunningSums]:
    """The entries `[b, ceil(s / ratio), d]`, before their norm, of the blocks that a chunk's tokens complete; and the
    state with them. Operands as in `pool_step`, for any s; tokens at `lengths` or later, int32 `[b]`, are not kept.
    """
    s, steps, r = rows.shape[1], state.capacity, ratio
    state = begun(state, start, lengths)
    first, folded = start // r * r, state.folded[:, 0]
    before = counted(start, -steps, 0)
    kept = (before >= jnp.maximum(folded, first)[:, None])[..., None]
    both = jnp.concatenate([jnp.where(kept, last_tokens(state, before), _absent(rows)), rows], 1)
    n = math.ceil(s / r)
    padded = jnp.pad(both, ((0, 0), (r, (n + 1) * r), (0, 0)))
    padded = padded.at[:, :r].set(_absent(rows)[0, 0])
    blocks = rows_from(padded, r + steps - start % r, n * r)
    parts = _partial(blocks.reshape(blocks.shape[0], n, r, -1))
    nothing = jnp.unstack(empty(jnp.stack(parts, 2)), axis=2)
    old = [x.at[:, 0].set(y) for x, y in zip(nothing, sums_of_block(state, first), strict=True)]
    entries = joined([old, parts])
    # what is no longer among the last tokens is folded
    end = jnp.clip(lengths, start, start + s)
    new = jnp.where(lengths > jnp.maximum(start, 0), jnp.maximum(folded, end - steps), folded)
    block = (new - 1) // r * r
    late = counted(end, -steps - r, 0)
    tokens = jnp.take_along_axis(both, jnp.clip(late - (start - steps)[:, None], 0, steps + s - 1)[..., None], 1)
    there = (late >= jnp.maximum(folded, block)[:, None]) & (late < new[:, None])
    there &= late >= (start - steps)[:, None]
    part = _partial(jnp.where(there[..., None], tokens, _absent(rows))[:, None])
    new_sums = merged([sums_of_block(state, block), [x[:, 0] for x in part]])
    changed = (new > folded)[:, None, None]
    sums = jnp.where(changed, jnp.stack(new_sums, 1), state.sums)
    positions = counted(start, 0, s)
    real = (positions >= 0) & (positions < lengths[:, None])
    ring = Cache(state.tokens).append(rows, jnp.where(real, positions, -1)).entries
    return entries, RunningSums(ring, sums, new[:, None])


@functools.partial(jax.jit, static_argnames="count", inline=True)
def rows_from(x: jax.Array, at: jax.Array, count: int) -> jax.Array:
    """Some rows of each sequence of `[b, n, d]`, from row `at` `[b]` on. It is jitted because JAX outside of jit wants
    `jax.set_mesh` where Explicit axes shard b.
    """
    return jax.vmap(lambda rows, at: lax.dynamic_slice_in_dim(rows, at, count))(x, at)


def _absent(like: jax.Array) -> jax.Array:
    """A token `[1, 1, 2 d]` without weight."""
    d = like.shape[2] // 2
    return jnp.where(jnp.arange(2 * d) < d, 0, -jnp.inf).astype(like.dtype)[None, None]


def _partial(tokens: jax.Array) -> list[jax.Array]:
    """The sums of blocks of tokens `[b, n, t, 2 d]`, each `[b, n, d]`."""
    kv, score = jnp.split(tokens, 2, -1)
    most = jnp.max(score, 2)
    weight = jnp.exp(score - finite(most)[:, :, None])
    return [most, over_tokens(weight), over_tokens(weight * kv)]


@jax.custom_jvp
def over_tokens(x: jax.Array) -> jax.Array:
    """The sums `[b, n, d]` of `[b, n, t, d]`, in an order that t alone decides: one half of the tokens is added to the
    other until there are few, and these in turn. XLA gives `jnp.sum` another order in another shape.
    """
    while (t := x.shape[2]) > _FEW:
        first, last = x[:, :, : (t + 1) // 2], x[:, :, (t + 1) // 2 :]
        x = first + (last if t % 2 == 0 else jnp.pad(last, ((0, 0), (0, 0), (0, 1), (0, 0))))
        if x.shape[2] <= _FEW:  # or XLA repeats in one kernel what each token is made of, and takes minutes
            x = lax.optimization_barrier(x)
    return functools.reduce(jnp.add, (x[:, :, i] for i in range(x.shape[2])))


@over_tokens.defjvp
def _over_tokens(x: tuple[jax.Array], dx: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return over_tokens(*x), jnp.sum(*dx, 2)  # so the gradient is a broadcast


_FEW = 8  # tokens that are added one by one


def counted(first: jax.Array, begin: int, end: int) -> jax.Array:
    """int32 `[b, end - begin]`: the numbers from `first[n] + begin` to `first[n] + end - 1`, for first int32 `[b]`."""
    return first[:, None] + jnp.arange(begin, end, dtype=jnp.int32)[None]


def of_places(ape: jax.Array, positions: jax.Array) -> jax.Array:
    """ape `[ratio, channels]` at the places of tokens in their blocks, `[b, s, channels]`, for positions `[b, s]`."""
    positions = explicit_axes.whole(positions, 1)
    where = explicit_axes.sharding(positions, *explicit_axes.entries(positions), None)
    return ape.at[positions % ape.shape[0]].get(out_sharding=where)


def completed(start: jax.Array, lengths: jax.Array, s: int, ratio: int) -> jax.Array:
    """int32 `[b, ceil(s / ratio)]`: the entries whose last token is among the s tokens from `start` on and before
    `lengths`, both int32 `[b]`; -1 for an entry whose block is not complete.
    """
    entry = counted(start // ratio, 0, math.ceil(s / ratio))
    end = (entry + 1) * ratio
    return jnp.where((entry >= 0) & (end <= lengths[:, None]) & (end > start[:, None]), entry, -1)


def pool_ring(ring: jax.Array, entry: jax.Array, d: int, ratio: int) -> jax.Array:
    """Entries `[b, n]` before their norm, float32 `[b, n, d]`, from a ring `[b, capacity, …]` with all tokens that they
    pool.

    It takes the ring in place, by the age of each slot's token relative to the entry's last token. The order of
    pooled tokens does not matter, so nothing is moved. Entries come one by one: with an axis for them, XLA
    transposes the ring for its sums.
    """
    slots = jnp.arange(ring.shape[1], dtype=jnp.int32)[None]
    kv, score = jnp.split(ring, 2, -1)

    def pooled(there: jax.Array, of: slice) -> list[jax.Array]:
        there = there[..., None]  # elsewhere are tokens of a former sequence, which may hold NaN
        some = jnp.where(there, score[..., of], -jnp.inf)
        most = jnp.max(some, 1)
        weight = jnp.exp(some - finite(most)[:, None])
        return [most, jnp.sum(weight, 1), jnp.sum(weight * jnp.where(there, kv[..., of], 0), 1)]

    def parts(entry: jax.Array) -> list[list[jax.Array]]:
        age = (((entry + 1) * ratio - 1)[:, None] - slots) % ring.shape[1]
        own = pooled(age < ratio, slice(-d, None))
        if kv.shape[2] == d:
            return [own]
        return [own, pooled((ratio <= age) & (age < 2 * ratio) & (entry > 0)[:, None], slice(d))]

    of_blocks = [parts(entry[:, i]) for i in range(entry.shape[1])]
    return joined(jax.tree.map(lambda *x: jnp.stack(x, 1), *of_blocks))


def joined(parts: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """Pools one or two blocks: each has the greatest score, the sum of weights, and the sum of weights times kv."""
    _, weights, pooled = merged(parts)
    return pooled / weights


def finite(most: jax.Array) -> jax.Array:
    """The greatest scores, for differences: where there is no token they are -inf."""
    return jnp.maximum(most, -3e38)


def merged(parts: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """The sums of the tokens of all parts."""
    most = functools.reduce(jnp.maximum, (part[0] for part in parts))
    scaled = [[jnp.exp(m - finite(most)) * x for x in sums] for m, *sums in parts]
    weights, pooled = (functools.reduce(jnp.add, sums) for sums in zip(*scaled, strict=True))
    return [most, weights, pooled]
