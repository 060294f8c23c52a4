"""DeepSeek-V4's compressor: one latent entry for every `ratio` tokens, by a learned softmax for each channel.

    kv = wkv x;   score = wgate x + ape[t % ratio]                                  float32
    latent[w] = norm(Σ_t kv[t] · softmax_t(score[t]))         t over block w: w ratio to w ratio + ratio - 1

With `overlap` (ratio 4), wkv and wgate have 2 d channels, and an entry pools two blocks: of the block before, the first
d channels, of its own, the last d. Before the first block there is nothing. A block without its last token is no entry.

Ratio 128 has no overlap; DeepSeek-V4.1's ratio 2 has neither overlap nor `ape`; its ratio 1 is `norm(wkv x)`.

A latent becomes an entry of the cache when RoPE turns it to the position of its block's *first* token, `w ratio`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import Cache
from ._norm import rms_norm


@dataclasses.dataclass(frozen=True)
class Compressor:
    """The shape of a compressor. Its parameters are a dict of arrays: `wkv`, `norm`, and, if ratio > 1, `wgate`, `ape`.

    Attributes:
      hidden: channels of x.
      d: channels of an entry.
      ratio: tokens of a block.
      overlap: whether an entry pools the block before too.
      has_ape: whether scores depend on the place in a block.
      eps: of the norm.
    """

    hidden: int
    d: int
    ratio: int
    overlap: bool = False
    has_ape: bool = True
    eps: float = 1e-6

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
        return self.blocks * self.d

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Random parameters, in float32."""
        names = ("wkv", "wgate")
        params = {
            name: jax.random.normal(k, (self.hidden, self.channels)) * self.hidden**-0.5
            for name, k in zip(names, jax.random.split(key), strict=True)
        }
        params |= {"ape": jnp.zeros((self.ratio, self.channels)), "norm": jnp.ones(self.d)}
        if not self.has_ape:
            del params["ape"]
        if self.ratio == 1:
            del params["wgate"]
        return params

    def __call__(self, params: Any, x: jax.Array) -> jax.Array:
        """Latents `[b, s // ratio, d]` of whole sequences x `[b, s, hidden]` that start at position 0, in x's dtype."""
        n = x.shape[1] // self.ratio
        x = x[:, : n * self.ratio]
        positions = jnp.arange(n * self.ratio, dtype=jnp.int32)[None]
        tokens = self.tokens(params, x, positions)
        if self.overlap:
            tokens = jnp.pad(tokens, ((0, 0), (self.ratio, 0), (0, 0)))
        first = jnp.arange(n, dtype=jnp.int32)[None] * self.ratio
        return self._pool(params, tokens, first >= self.ratio, x.dtype)

    def tokens(self, params: Any, x: jax.Array, positions: jax.Array) -> jax.Array:
        """What is pooled of each token, float32 `[b, s, channels or 2 channels]`: kv, and the score if there is one."""
        rows = [jnp.matmul(x, params["wkv"].astype(x.dtype), preferred_element_type=jnp.float32)]
        if self.ratio > 1:
            score = jnp.matmul(x, params["wgate"].astype(x.dtype), preferred_element_type=jnp.float32)
            rows.append(score + params["ape"].astype(jnp.float32)[positions % self.ratio] if self.has_ape else score)
        return jnp.concatenate(rows, -1)

    def state(self, b: int, steps: int = 1) -> Cache | None:
        """What generation keeps of the last tokens of b sequences; None for ratio 1, which keeps nothing.

        A ring of `tokens`. As many as `steps` may come at once, and any of these be taken back: the next call then
        says an earlier position, and their place is taken again.
        """
        if self.ratio == 1:
            return None
        return Cache.zeros(b, self.reach + steps - 1, 2 * self.channels, jnp.float32)

    def extend(
        self, params: Any, x: jax.Array, state: Cache | None, start: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache | None]:
        """The latents of the blocks that new tokens complete, for sequences whose earlier tokens `state` holds.

        Args:
          params: as `init` makes them.
          x: `[b, s, hidden]`; token i of sequence n stands at position `start[n] + i`.
          state: as `state` makes it, or returned by this function.
          start: int32 `[b]`.
          lengths: int32 `[b]`, tokens of each sequence with the new ones: what stands at `lengths[n]` or further on, or
            below 0, is padding.

        Returns:
          latents `[b, n, d]` in x's dtype, n = ceil(s / ratio); int32 `[b, n]`, which entry each is, -1 for one whose
          block has not come to its end; and the new state.
        """
        s = x.shape[1]
        r = self.ratio
        positions = start[:, None] + jnp.arange(s, dtype=jnp.int32)
        real = (positions >= 0) & (positions < lengths[:, None])
        new = self.tokens(params, x, positions)
        n = math.ceil(s / r)
        entry = start[:, None] // r + jnp.arange(n, dtype=jnp.int32)
        whole = (entry >= 0) & ((entry + 1) * r <= lengths[:, None]) & ((entry + 1) * r > start[:, None])
        entry = jnp.where(whole, entry, -1)
        if state is None:
            return self._pool(params, new, entry > 0, x.dtype), entry, None
        before = state.take(start[:, None] + jnp.arange(-self.reach, 0, dtype=jnp.int32))
        both = jnp.concatenate([before, new], 1)
        both = jnp.pad(both, ((0, 0), (0, (n + self.blocks) * r - both.shape[1]), (0, 0)))
        # the first block starts somewhere in the first r rows, and what comes before it is in front of that
        aligned = jax.vmap(lambda rows, at: jax.lax.dynamic_slice_in_dim(rows, at, (n + self.blocks - 1) * r))(
            both, r - start % r
        )
        latents = self._pool(params, aligned, entry > 0, x.dtype)
        return latents, entry, state.append(new, jnp.where(real, positions, -1))

    def _pool(self, params: Any, tokens: jax.Array, has_before: jax.Array, dtype: Any) -> jax.Array:
        """Latents `[b, n, d]` of tokens `[b, (n + blocks - 1) ratio, …]`.

        has_before `[b or 1, n]`: with overlap, whether there is a block before.
        """
        b, d = tokens.shape[0], self.d
        if self.ratio == 1:
            return rms_norm(tokens.astype(dtype), params["norm"], self.eps)
        kv, score = jnp.split(tokens.reshape(b, -1, self.ratio, 2 * self.channels), 2, -1)
        if self.overlap:
            kv = jnp.concatenate([kv[:, :-1, :, :d], kv[:, 1:, :, d:]], 2)
            earlier = jnp.where(has_before[..., None, None], score[:, :-1, :, :d], -jnp.inf)
            score = jnp.concatenate([earlier, score[:, 1:, :, d:]], 2)
        pooled = jnp.sum(kv * jax.nn.softmax(score, 2), 2)
        return rms_norm(pooled.astype(dtype), params["norm"], self.eps)
