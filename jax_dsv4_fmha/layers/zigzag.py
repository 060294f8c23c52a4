"""The order of a sequence's tokens in which devices that share it have equal work.

A later token sees more. So a sequence of 2 n chunks is dealt out to n devices from both ends: device i has chunk i and
chunk 2 n - 1 - i, and any two such chunks see as much together. All that belongs to entries stays in its own order.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _check
from .._definitions import explicit_axes
from .._definitions.span import Span
from .._dispatch.sequences import before, whole_sequences


def zigzag(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """x with its tokens in zigzag order: of `2 devices` chunks along an axis, device i has chunk i and, after it, chunk
    `2 devices - 1 - i`.

    Reorder what is small, once: token ids and labels, before they are placed on devices. `DSV4Attention` takes hidden
    states in this order.

    Args:
      x: an array whose tokens are in their own order.
      devices: an int >= 1, how many devices share the axis.
      axis: of the tokens; their number must be a multiple of `2 devices`.

    Raises:
      ValueError, TypeError: operands that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import unzigzag, zigzag
      >>> zigzag(jnp.arange(8), 2, axis=0).tolist()  # two devices: the first one has the first and the last tokens
      [0, 1, 6, 7, 2, 3, 4, 5]
      >>> unzigzag(zigzag(jnp.arange(8), 2, axis=0), 2, axis=0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    x, axis, m = _chunks("zigzag", x, devices, axis)
    shape = x.shape[:axis], x.shape[axis + 1 :]
    first, second = jnp.split(x.reshape(*shape[0], 2 * devices, m, *shape[1]), 2, axis)
    return jnp.stack([first, jnp.flip(second, axis)], axis + 1).reshape(x.shape)


def unzigzag(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """x with its tokens in their own order again; args as in `zigzag`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import unzigzag
      >>> unzigzag(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), 2, axis=0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    x, axis, m = _chunks("unzigzag", x, devices, axis)
    shape = x.shape[:axis], x.shape[axis + 1 :]
    both = x.reshape(*shape[0], devices, 2, m, *shape[1])
    first, second = (jax.lax.index_in_dim(both, i, axis + 1, keepdims=False) for i in range(2))
    return jnp.concatenate([first, jnp.flip(second, axis)], axis).reshape(x.shape)


def _chunks(op: str, x: Any, devices: Any, axis: int) -> tuple[jax.Array, int, int]:
    """x, its axis counted from the first, and the tokens of a chunk."""
    devices, x = _check.positive(op, "devices", devices), jnp.asarray(x)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise _check.error(ValueError, op, "axis", axis, f"an axis of {_check.describe(x)}")
    axis %= x.ndim
    if x.shape[axis] % (2 * devices):
        raise _check.error(ValueError, op, "x", x, f"a multiple of {2 * devices} on axis {axis}")
    return x, axis, x.shape[axis] // (2 * devices)


class Order(NamedTuple):
    """The order of the tokens `[b, s, …]` of a call."""

    devices: int | None
    """None: the tokens' own order; otherwise zigzag over so many"""

    @property
    def is_natural(self) -> bool:
        return self.devices is None

    @classmethod
    def checked(cls, op: str, devices: Any, s: Any, ratio: int, reach: int = 0) -> "Order":
        """Raises unless each chunk of s tokens has whole blocks and at least `reach` tokens."""
        if devices is not None:
            chunks = 2 * _check.positive(op, "zigzag", devices)
            if s % (chunks * max(ratio, 1)) or s < chunks * reach:
                wanted = f"of {s} tokens {chunks} chunks of whole blocks" + f", of {reach} tokens" * bool(reach)
                raise _check.error(ValueError, op, "zigzag", devices, wanted)
        return cls(devices)

    def numbers(self, n: int) -> jax.Array:
        """int32 `[1, n]`: 0, 1, … in this order; each device computes its own."""
        i = jnp.arange(n, dtype=jnp.int32)[None]
        if self.devices is None:
            return i
        tokens = n // (2 * self.devices)
        device, second = i // (2 * tokens), i // tokens % 2
        return jnp.where(second, 2 * self.devices - 1 - device, device) * tokens + i % tokens

    def of(self, x: jax.Array) -> jax.Array:
        """Returns x in this order; it comes in the tokens' own, and is whole on every device."""
        return x if self.devices is None else whole_sequences(zigzag(x, self.devices))

    def undone(self, x: jax.Array) -> jax.Array:
        """Returns x, which comes in this order, in the tokens' own."""
        return x if self.devices is None else unzigzag(x, self.devices)

    def previous(self, *xs: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays in zigzag order, each row in the place of the next one of the sequence and zeros in the first."""
        chunked = [self._chunked(x) for x in xs]
        rows = zip(before(1, *chunked), chunked, xs, strict=True)
        return tuple(jnp.concatenate([edge, x[:, :, :, :-1]], 3).reshape(like.shape) for edge, x, like in rows)

    def keys(self, x: jax.Array, window: int) -> jax.Array:
        """The keys that `seen` counts: on each device its two chunks, each after the `window - 1` rows before it."""
        if self.devices is None:
            return x
        chunked = self._chunked(x)
        b, n, _, _, *rest = chunked.shape
        (edge,) = before(window - 1, chunked)
        return jnp.concatenate([edge, chunked], 3).reshape(b, n, -1, *rest)

    def seen(self, s: int, window: int, more: Span | None) -> Span | None:
        """Returns the keys that each of s tokens sees of its window, and by `more`; None means its window."""
        if self.devices is None:
            return more
        at, m, reach = self.numbers(s), s // (2 * self.devices), window - 1
        near = Span(jnp.maximum(at - reach, 0), at + 1, width=window)
        near = near if more is None else near & more
        first = jnp.arange(s, dtype=jnp.int32)[None] // m % 2 * (reach + m) + reach  # key of a token's chunk
        return jax.tree.map(lambda bound: bound + first - (at - at % m), near)

    def over_queries(self, f: Callable[..., Any], keys: jax.Array | None, **rows: Any) -> Any:
        """f(keys, rows…) of all rows, or of those of each device. Its results have rows, too; rows are trees of arrays
        `[b or 1, s, …]`.
        """
        if self.devices is None:
            return f(keys, **rows)
        given = jax.tree.map(lambda x: _split(x, self.devices), rows)
        # on Explicit axes jax.vmap wants all that it maps sharded alike
        of = max(jax.tree.leaves(given), key=lambda x: explicit_axes.entries(x)[1] is not None)
        shared_out = explicit_axes.entries(of)[1]

        def alike(x: jax.Array) -> jax.Array:
            batch, _, *rest = explicit_axes.entries(x)
            return explicit_axes.placed(x, batch, shared_out, *rest, of=of)

        run = jax.vmap(lambda keys, rows: f(keys, **rows), 1, 1)
        made = run(*jax.tree.map(alike, (keys, given)))
        return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), made)

    def _chunked(self, x: jax.Array) -> jax.Array:
        """x `[b, devices, 2, m, …]`."""
        return _split(x, self.devices, 2)


def _split(x: jax.Array, *sizes: Any) -> jax.Array:
    """x `[b, *sizes, m, …]` of `[b, s, …]`: the devices that share s share the first of the sizes."""
    batch, tokens, *rest = explicit_axes.entries(x)
    where = explicit_axes.sharding(x, batch, tokens, *(None for _ in sizes), *rest)
    shape = x.shape[0], *sizes, x.shape[1] // math.prod(sizes), *x.shape[2:]
    return jnp.reshape(x, shape, out_sharding=where)


NATURAL = Order(None)
