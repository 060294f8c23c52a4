"""Rotary position embedding (RoPE) as in DeepSeek-V4: on the last dimensions of a head, in neighbouring pairs.

    angle = p · f[i];    (x[2i], x[2i+1]) -> (x[2i] cos - x[2i+1] sin, x[2i] sin + x[2i+1] cos)
    f[i] = theta^(-2i / dims)                                     plain: layers with a window alone
    f[i] = theta^(-2i / dims) · ((1 - u[i]) + u[i] / factor)      YaRN: all other layers; u rises from 0 to 1

V is K in these models, so attention returns rotated values: `inverse_rope` at the query's position makes them a
function of distances again.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _check
from .._definitions import explicit_axes
from .._definitions.packed import quantize_rows
from .._definitions.rope import rotated_pairs
from .._dispatch.autodiff import Differentiable, without_gradient
from .._dispatch.lowering import choose
from .._dispatch.op import Arrays, Axes, Call, KernelUse, Op
from .._dispatch.rope import TABLE, RotatesBack, X, Y, normed_then_rotated, rotated, support_for
from .._host import rope as raw
from . import _operands
from .hadamard import hadamard


@dataclasses.dataclass(frozen=True)
class Rope:
    """The frequencies of one kind of layer.

    Attributes:
      dims: how many of a head's last dimensions are rotated, even.
      theta: in DeepSeek-V4 10000 for layers with a window alone, 160000 for the others.
      factor: YaRN's factor; 1 means no YaRN.
      original: the context in tokens that the model was trained on before its extension, for YaRN.
      beta_fast: dimensions that turn more often than this within `original` keep their frequency.
      beta_slow: dimensions that turn less often than this are slowed down by `factor`; a ramp joins the two.

    Raises:
      ValueError, TypeError: numbers that make no frequencies: dims below 2 or odd, theta not above 1, factor below 1,
        a beta not above 0, `original` below 0, or 0 with a factor.

    Examples:
      >>> from jax_dsv4_fmha.layers import Rope
      >>> Rope(dims=4, theta=4.0).frequencies().tolist()
      [1.0, 0.5]
    """

    dims: int = 64
    theta: float = 10_000.0
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if _check.positive("Rope", "dims", self.dims) % 2:
            raise _check.error(ValueError, "Rope", "dims", self.dims, "an even int >= 2")
        _check.number("Rope", "theta", self.theta, "a finite number > 1", lambda x: x > 1)
        _check.number("Rope", "factor", self.factor, "a finite number >= 1", lambda x: x >= 1)
        _check.integer("Rope", "original", self.original, 1 if self.factor > 1 else 0)
        for name in ("beta_fast", "beta_slow"):
            _check.number("Rope", name, getattr(self, name), "a finite number > 0", lambda x: x > 0)

    def frequencies(self) -> np.ndarray:
        """float32 `[dims / 2]`, in radians a token."""
        plain = 1 / np.float32(self.theta) ** (np.arange(0, self.dims, 2, dtype=np.float32) / np.float32(self.dims))
        if self.factor == 1:
            return plain

        def turns_so_often(turns: float) -> float:
            """The dimension, counted in pairs, that makes this many turns within `original` tokens."""
            return self.dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first = max(math.floor(turns_so_often(self.beta_fast)), 0)
        last = min(math.ceil(turns_so_often(self.beta_slow)), self.dims - 1)
        width = last - first if last > first else 1e-3
        slowed = np.clip((np.arange(self.dims // 2, dtype=np.float32) - first) / np.float32(width), 0, 1)
        return (plain / np.float32(self.factor) * slowed + plain * (1 - slowed)).astype(np.float32)

    def table(self, positions: jax.Array) -> jax.Array:
        """float32 `[b, s, dims]` of positions int32 `[b, s]`: cos and sin of each pair's angle, by turns."""
        angle = positions[..., None].astype(jnp.float32) * np.repeat(self.frequencies(), 2)[None, None]
        is_cos = (
            np.arange(self.dims)[None, None] % 2 == 0
        )  # not by a concatenation, with which XLA joins no other table
        return jnp.where(is_cos, jnp.cos(angle), jnp.sin(angle))


def rope(x: jax.Array, positions: jax.Array, rotation: Rope) -> jax.Array:
    """x with its last `rotation.dims` dimensions rotated to `positions`.

    Args:
      x: `[b, s, d]` or `[b, s, h, d]`, d >= rotation.dims; computed in float32, returned in x's dtype.
      positions: int32 `[b, s]` or `[1, s]`.
      rotation: which frequencies, and how many dimensions.

    Raises:
      ValueError, TypeError: operands that differ from the above.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import Rope, rope
      >>> y = rope(jnp.ones((1, 2, 3)), jnp.array([[0, 1]]), Rope(dims=2))
      >>> y.shape, y[0, 0].tolist()  # position 0 is not rotated
      ((1, 2, 3), [1.0, 1.0, 1.0])
    """
    return _rotated("rope", x, positions, rotation, 1)


def inverse_rope(x: jax.Array, positions: jax.Array, rotation: Rope) -> jax.Array:
    """Undoes `rope`: x rotated back by as much; it takes the same operands.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha.layers import Rope, inverse_rope, rope
      >>> x, positions = jnp.ones((1, 2, 3)), jnp.array([[0, 1]])
      >>> y = inverse_rope(rope(x, positions, Rope(dims=2)), positions, Rope(dims=2))
      >>> bool(jnp.allclose(x, y))
      True
    """
    return _rotated("inverse_rope", x, positions, rotation, -1)


def rope_hadamard(x: jax.Array, positions: jax.Array, rotation: Rope) -> jax.Array:
    """`hadamard(rope(x))`; where there is a kernel, in one pass over x `[b, s, d]` or `[b, s, h, d]`."""
    if getattr(x, "shape", (0,))[-1:] != (_INDEX_D,) or not isinstance(rotation, Rope):
        return hadamard(rope(x, positions, rotation))
    support = support_for("rope_hadamard", x, dims=rotation.dims)
    use = choose("rope_hadamard", None, support)
    if use == KernelUse.NEVER:
        return hadamard(rope(x, positions, rotation))

    def call(direction: int) -> Call:
        return Call(_ROPE_HADAMARD, use, (("direction", direction),), support)

    with jax.named_scope("rope"):
        rows = x if x.ndim == 4 else x[:, :, None]
        y = Differentiable(call(1), call(-1), RotatesBack)(rows, rotation.table(positions))[0]
        return y.reshape(x.shape)


def index_query(x: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x `[b, s, h, d]`, rotated by a `Rope.table` and multiplied by the Hadamard matrix, in 8 bits as
    `quantize_indexer` quantizes queries: float8_e4m3fn, and float32 scales `[b, s, h]`. Where there is a kernel, in one
    pass. The gradient is zero, as a choice's is.
    """
    x, support = lax.stop_gradient(x), support_for("index_query", x, dims=table.shape[-1])
    use = choose("index_query", None, support) if x.shape[-1] == _INDEX_D else KernelUse.NEVER
    if use == KernelUse.NEVER:
        return quantize_rows(hadamard(rotated(x, table, 1)))
    with jax.named_scope("rope"):
        codes, scales = without_gradient(Call(_INDEX_QUERY, use, (), support), x, table)
        return codes, scales


def rope_of_normed(x: jax.Array, positions: jax.Array, rotation: Rope, eps: float) -> jax.Array:
    """`rope(rms_norm(x))`, no weight; where there is a kernel, in one pass over x `[b, s, h, d]`."""
    return normed_then_rotated(x, rotation.table(positions), eps)


def _rotated(op: str, x: Any, positions: Any, rotation: Rope, direction: int) -> jax.Array:
    if not isinstance(rotation, Rope):
        raise _check.error(TypeError, op, "rotation", rotation, "a Rope")
    n = rotation.dims
    wanted = f"[b, s, d] or [b, s, h, d] of floats, d >= {n}"
    x = _check.array(op, "x", x, wanted, lambda x: x.dtype in _check.FLOAT and x.ndim in (3, 4) and x.shape[-1] >= n)
    positions = _operands.positions(op, "positions", positions, *x.shape[:2])
    if positions.shape[0] == x.shape[0]:
        x, positions = explicit_axes.with_one_batch(op, x=x, positions=positions)
    with jax.named_scope("rope"):
        rows = x if x.ndim == 4 else x[:, :, None]
        return rotated(rows, rotation.table(positions), direction).reshape(x.shape)


# The ops of an indexer. Their kernels are handed rows, which are (token, head), and a table of cos and sin.


def _rotated_and_transformed(x: jax.Array, table: jax.Array, *, direction: int) -> Arrays:
    if direction > 0:
        return (hadamard(rotated_pairs(x, table, direction=1)[0]),)
    return rotated_pairs(hadamard(x), table, direction=-1)


def _rotated_transformed_and_quantized(x: jax.Array, table: jax.Array) -> Arrays:
    return quantize_rows(_rotated_and_transformed(x, table, direction=1)[0])


_INDEX_D = 128  # the numbers of a row that a kernel transforms
_ROPE_HADAMARD = Op("rope_hadamard", (X, TABLE), (Y,), _rotated_and_transformed, raw.rope_hadamard)
_INDEX_QUERY = Op(
    "index_query",
    (X, TABLE),
    (Axes("codes", "b s_q h_q d"), Axes("scales", "b s_q h_q")),
    _rotated_transformed_and_quantized,
    raw.index_query,
)
