"""DeepSeek-V4's compressor: one latent entry for every `ratio` tokens, by a learned softmax for each channel.

    kv = wkv x;   score = wgate x + ape[t % ratio]                                  float32
    latent[w] = norm(Σ_t kv[t] · softmax_t(score[t]))         t over block w: w ratio to w ratio + ratio - 1

With `overlap` (ratio 4), wkv and wgate have 2 d channels, and an entry pools two blocks: the first d channels of the
previous block and the last d of its own. There is no block before the first. A block without its last token gives no
entry.

Ratio 128 has no overlap; DeepSeek-V4.1's ratio 2 has neither overlap nor `ape`; its ratio 1 is `norm(wkv x)`.

A latent becomes an entry of the cache when RoPE rotates it to the position of its block's *first* token, `w ratio`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import Cache, _check
from .._definitions import explicit_axes
from .._dispatch.sequences import previous, whole_sequences
from . import _operands, documents
from ._norm import rms_norm
from ._products import product
from ._rounding import Rounding
from .documents import PackedBlocks
from .insert import Entries
from .pooling import (
    RunningSums,
    completed,
    counted,
    finite,
    joined,
    merged,
    of_places,
    over_tokens,
    pool_chunk,
    pool_ring,
    rows_from,
)
from .rope import Rope
from .zigzag import Order


@dataclasses.dataclass(frozen=True)
class Compressor:
    """The shape of a compressor.

    Its parameters are a dict of arrays: `w [hidden, 2 channels]`, with wkv and wgate side by side,
    `ape [ratio, channels]` and `norm [d]`. Ratio 1 has no wgate and no ape.

    Attributes:
      hidden: channels of x.
      d: channels of an entry.
      ratio: tokens of a block.
      overlap: whether an entry pools the block before too.
      has_ape: whether scores depend on the place in a block.
      eps: epsilon of the norm.

    Raises:
      ValueError, TypeError: here or in its methods: sizes, parameters or operands that differ from what is documented.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import Compressor
      >>> compressor = Compressor(hidden=64, d=16, ratio=4)
      >>> params = compressor.init(jax.random.key(0))
      >>> compressor(params, jnp.ones((1, 10, 64))).shape  # two blocks of 4 tokens; two tokens wait
      (1, 2, 16)
    """

    hidden: int
    d: int
    ratio: int
    overlap: bool = False
    has_ape: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden", "d", "ratio"):
            _check.positive(_OP, name, getattr(self, name))
        for name in ("overlap", "has_ape"):
            _check.flags(_OP, **{name: getattr(self, name)})
        if self.overlap and self.ratio == 1:
            raise _check.error(ValueError, _OP, "overlap", self.overlap, "False with ratio 1")
        _check.epsilon(_OP, self.eps)

    @property
    def blocks(self) -> int:
        """Blocks that an entry pools."""
        return 2 if self.overlap else 1

    @property
    def reach(self) -> int:
        """Tokens that an entry pools."""
        return self.blocks * self.ratio

    @property
    def channels(self) -> int:
        """The columns of kv; scores have as many."""
        return self.blocks * self.d

    @property
    def width(self) -> int:
        """Channels of a token that are pooled."""
        return self.channels if self.ratio == 1 else 2 * self.channels

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Random parameters, in float32."""
        w = jax.random.normal(key, (self.hidden, self.width), jnp.float32) * self.hidden**-0.5
        params = {"w": w, "norm": jnp.ones(self.d, jnp.float32)}
        if self.ratio > 1 and self.has_ape:
            params["ape"] = jnp.zeros((self.ratio, self.channels), jnp.float32)
        return params

    @jax.named_scope("compressor")
    def __call__(
        self,
        params: Any,
        x: jax.Array,
        packed: PackedBlocks | None = None,
        whole: bool = True,
        zigzag: int | None = None,
    ) -> jax.Array:
        """Latents `[b, s // ratio, d]` in x's dtype. Tokens after the last whole block give no latent.

        Devices that share the sequence of x gather the latents; where each has whole blocks, the only other thing that
        they move is a row of sums for the block before their first.

        Args:
          params: as `init` makes them.
          x: `[b, s, hidden]`, bfloat16, float16 or float32.
          packed: the blocks of packed documents, as `documents.packed_blocks` finds them. None means one sequence a
            row, from position 0 on.
          whole: whether every device gets all latents; if not, those without documents stay where their tokens are.
          zigzag: an int, if x is in `layers.zigzag` order over so many devices, of whole blocks in each chunk. Latents
            are then in their own order if whole, else in that order.
        """
        params, x = self._checked(params, x)
        _check.flags(_OP, whole=whole)
        order = Order.checked(_OP, zigzag, x.shape[1], self.ratio)
        tokens, (b, s, _) = product(x, params["w"]), x.shape
        if not explicit_axes.divide(tokens, 1, self.ratio):
            tokens = whole_sequences(tokens)
        if packed is not None:
            documents.check(_OP, packed, b, s, self.ratio)
            latents = order.undone(whole_sequences(self._pool_packed(params, tokens, packed, x.dtype, order)))
            return jnp.take_along_axis(latents, packed.order[..., None], 1)
        if self.ratio == 1:
            latents = self._normed(params, tokens, x.dtype)
        else:
            n = s // self.ratio
            if isinstance(n, int) and n == 0:  # on Explicit axes JAX reshapes no empty array
                return tokens[:, :0, : self.d].astype(x.dtype)
            own = self._sums(tokens[:, : n * self.ratio], params.get("ape"))
            has_before = order.numbers(n) > 0
            latents = self._latents(params, own, self._before(own, order), has_before, x.dtype)
        return order.undone(whole_sequences(latents)) if whole else latents

    def _checked(self, params: Any, x: Any) -> tuple[Any, jax.Array]:
        _operands.parameters(self, params)
        x = _operands.hidden(_OP, "x", x, self.hidden)
        return explicit_axes.on_mesh(params, x), x

    def tokens(self, params: Any, x: jax.Array, positions: jax.Array) -> jax.Array:
        """The pooled channels of each token, float32 `[b, s, width]`: kv, and the score if there is one.

        Args:
          params, x: as in a call.
          positions: int32 `[b or 1, s]`.
        """
        params, x = self._checked(params, x)
        positions = _operands.positions(_OP, "positions", positions, *x.shape[:2])
        rows = product(x, params["w"])
        if "ape" not in params:
            return rows
        ape = jnp.pad(params["ape"].astype(jnp.float32), ((0, 0), (self.channels, 0)))
        return rows + of_places(ape, positions)

    def state(self, b: int, steps: int = 1) -> Cache | RunningSums | None:
        """The state that generation keeps of the last tokens of b sequences; None for ratio 1, which needs none.

        A call may add up to `steps` tokens, and a later call may take them back: it passes an earlier position, and new
        tokens overwrite them. Short blocks, and those that overlap, have a ring of all `tokens` that an entry pools;
        long ones the last `steps` of them, and running sums of those before.
        """
        b, steps = _check.positive(_OP, "b", b), _check.positive(_OP, "steps", steps)
        if self.ratio == 1:
            return None
        if not self.overlap and self.ratio >= max(_LONG, steps):
            return RunningSums.zeros(b, steps, self.d)
        return Cache.zeros(b, self.reach + steps - 1, self.width, jnp.float32)

    @jax.named_scope("compressor")
    def extend(
        self, params: Any, x: jax.Array, state: Cache | RunningSums | None, start: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache | RunningSums | None]:
        """The latents of the blocks that new tokens complete, for sequences whose earlier tokens `state` holds.

        Args:
          params: as `init` makes them.
          x: `[b, s, hidden]`; token i of sequence n stands at position `start[n] + i`.
          state: as `state` makes it, or returned by this function.
          start: int32 `[b]`.
          lengths: int32 `[b]`, tokens of each sequence, including the new ones. Tokens at `lengths[n]` or later, or
            below 0, are padding.

        Returns:
          latents `[b, n, d]` in x's dtype, n = ceil(s / ratio); int32 `[b, n]`, the entry of each, -1 where its block
          is not complete; and the new state.
        """
        dims = {"hidden": self.hidden}
        x = _check.operand(_OP, "x", x, "b s hidden", dims, _check.FLOAT)
        start = _check.operand(_OP, "start", start, "b", dims, _check.INT)
        lengths = _check.operand(_OP, "lengths", lengths, "b", dims, _check.INT)
        check_state(self, _OP, "state", state, dims["b"])
        of_batch = {"state": state.folded} if isinstance(state, RunningSums) else {}
        x, start, lengths, *_ = explicit_axes.with_one_batch(_OP, x=x, start=start, lengths=lengths, **of_batch)
        s, r = x.shape[1], self.ratio
        new = whole_sequences(self.tokens(params, x, counted(start, 0, s)))
        entry = completed(start, lengths, s, r)
        n = entry.shape[1]
        if state is None:
            return self._normed(params, new, x.dtype), entry, None
        if isinstance(state, RunningSums):
            pooled, kept_sums = pool_chunk(state, new, start, lengths, r)
            return self._normed(params, pooled, x.dtype), entry, kept_sums
        kept = state.append(new, kept_at(start, lengths, s))
        if state.capacity >= self.reach + s - 1:
            pooled = pool_ring(kept.entries, entry, self.d, r)
            return self._normed(params, pooled, x.dtype), entry, kept
        before = state.take(counted(start, -self.reach, 0))
        both = jnp.concatenate([before, new], 1)
        both = jnp.pad(both, ((0, 0), (0, (n + self.blocks) * r - both.shape[1]), (0, 0)))
        # the first block starts somewhere in the first r rows; earlier rows come before it
        aligned = rows_from(both, r - start % r, (n + self.blocks - 1) * r)
        return self._pool(params, aligned, entry > 0, x.dtype), entry, kept

    def _normed(self, params: Any, pooled: jax.Array, dtype: Any) -> jax.Array:
        return rms_norm(pooled.astype(dtype), params["norm"], self.eps)

    def _pool(self, params: Any, tokens: jax.Array, has_before: jax.Array, dtype: Any) -> jax.Array:
        """Pools tokens `[b, (n + blocks - 1) ratio, width]` into latents `[b, n, d]`; has_before: as in `_latents`."""
        own, before = self._sums(tokens), None
        if self.overlap:
            before, own = ([x[:, some] for x in own] for some in (slice(-1), slice(1, None)))
        return self._latents(params, own, before, has_before, dtype)

    def _pool_packed(self, params: Any, tokens: jax.Array, packed: PackedBlocks, dtype: Any, order: Order) -> jax.Array:
        """The latent `[b, ceil(s / ratio), d]` of the block that ends in each run of `ratio` tokens, in their order.

        The block began in this run or in the one before: so all blocks are made of two sums of each run.
        """
        if self.ratio == 1:
            return self._normed(params, tokens, dtype)
        place, end, next_end, has_before = map(order.of, packed[:4])
        if "ape" in params:  # by a product, because its gradient is one too
            one_hot = jax.nn.one_hot(explicit_axes.like(place, tokens), self.ratio, dtype=jnp.float32)
            ape = jnp.pad(params["ape"].astype(jnp.float32), ((0, 0), (self.channels, 0)))
            tokens += jnp.einsum("bsp,pc->bsc", one_hot, ape, precision=jax.lax.Precision.HIGHEST)
        runs = end.shape[1]
        tokens = jnp.pad(tokens, ((0, 0), (0, runs * self.ratio - tokens.shape[1]), (0, 0)))
        place = jnp.arange(self.ratio, dtype=jnp.int32)[None, None]
        ends_here = self._sums(tokens, there=place <= end[..., None])
        ends_next = self._sums(tokens, there=place > next_end[..., None])
        began_before = _there(_previous(ends_next, order), order.numbers(runs) > 0)
        own = merged([ends_here, began_before])
        return self._latents(params, own, self._before(own, order), has_before > 0, dtype)

    def _sums(self, tokens: jax.Array, ape: jax.Array | None = None, there: jax.Array | None = None) -> list[jax.Array]:
        """Returns the operands of `merged`, each `[b, n, channels]`, for the blocks of tokens `[b, n ratio, width]`.

        ape: where the tokens lack it; there: bool `[b, n, ratio]`, the tokens that count.
        """
        kv, score = jnp.split(tokens.reshape(tokens.shape[0], -1, self.ratio, self.width), 2, -1)
        if ape is not None:  # with an axis for the blocks, so that one sum makes its gradient, before any collective
            score += ape.astype(jnp.float32)[None, None]
        if there is not None:
            there = explicit_axes.like(there, score)[..., None]
            kv, score = jnp.where(there, kv, 0), jnp.where(there, score, -jnp.inf)
        most = jax.lax.stop_gradient(jnp.max(score, 2))
        weight = jnp.exp(score - finite(most)[:, :, None])
        return [most, over_tokens(weight), over_tokens(weight * kv)]

    def _before(self, own: list[jax.Array], order: Order) -> list[jax.Array] | None:
        """The sums of the block before each, with overlap."""
        return _previous([x[..., : self.d] for x in own], order) if self.overlap else None

    def _latents(
        self, params: Any, own: list[jax.Array], before: list[jax.Array] | None, has_before: jax.Array, dtype: Any
    ) -> jax.Array:
        """Latents `[b, n, d]` of the sums of blocks and, with overlap, of the blocks before them where there are such:
        has_before `[b or 1, n]`.
        """
        parts = [own]
        if before is not None:
            parts = [_there([x[..., : self.d] for x in before], has_before), [x[..., self.d :] for x in own]]
        return self._normed(params, joined(parts), dtype)


def entries_of(
    compressor: Compressor, params: Any, rotation: Rope, rounding: Rounding, is_transformed: bool = False
) -> Entries:
    """Describes the entries of a cache that the rows `x @ params["w"]` make."""
    of_block = compressor.ratio, params.get("ape"), is_transformed
    return Entries(params["norm"], rotation, compressor.eps, *of_block, rounding)


def check_state(compressor: Compressor, op: str, name: str, state: Any, b: Any) -> None:
    """Raises unless it is a state of b sequences, as `state` makes one."""
    if (state is None) != (compressor.ratio == 1) or not isinstance(state, Cache | RunningSums | None):
        wanted = "None with ratio 1" if compressor.ratio == 1 else "what `Compressor.state` makes"
        raise _check.error(TypeError, op, name, state, wanted)
    if isinstance(state, RunningSums):
        axes = {"tokens": "b steps width", "sums": "b three d", "folded": "b one"}
        dims = {"b": b, "width": compressor.width, "d": compressor.d, "three": 3, "one": 1}
        for part, of_part in axes.items():
            dtypes = _check.INT if part == "folded" else _check.FP32
            _check.operand(op, f"{name}.{part}", getattr(state, part), of_part, dims, dtypes)
        if compressor.overlap or state.capacity > compressor.ratio:
            raise _check.error(ValueError, op, name, "running sums", f"a ring of {compressor.reach} tokens at least")
    elif state is not None:
        state.check(op, name, {"b": b, "d": compressor.width}, _check.FP32)
        if state.capacity < compressor.reach:
            got = f"room for {state.capacity} tokens"
            raise _check.error(ValueError, op, name, got, f"{compressor.reach} at least")


_OP = "Compressor"
_LONG = 16  # tokens of a block that has running sums, at least


def kept_at(first: jax.Array, lengths: jax.Array, s: int) -> jax.Array:
    """int32 `[b, s]`: the positions of new tokens from `first[n]` on, -1 for padding; whole on every device.

    It is computed apart from the positions of the queries, which XLA shards as it shards x.
    """
    positions = counted(first, 0, s)
    return whole_sequences(jnp.where((positions >= 0) & (positions < lengths[:, None]), positions, -1))


def _previous(sums: list[jax.Array], order: Order) -> list[jax.Array]:
    """The sums of the block before each block."""
    most, *others = previous(*sums) if order.is_natural else order.previous(*sums)
    return [jax.lax.stop_gradient(most), *others]


def _there(sums: list[jax.Array], there: jax.Array) -> list[jax.Array]:
    """The sums `[b, n, d]` of blocks where there are such, bool `[b or 1, n]`, and elsewhere those of no tokens."""
    there = explicit_axes.like(jnp.broadcast_to(there, sums[0].shape[:2]), sums[0])[..., None]
    return [jnp.where(there, x, nothing) for x, nothing in zip(sums, (-jnp.inf, 0, 0), strict=True)]
