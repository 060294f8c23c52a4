"""Doubly stochastic matrices by Sinkhorn's iterations: rows and columns are divided by their sums in turn.

Each iteration is a few operations on n × n numbers of a token. XLA for GPUs fuses such a chain as far as it can, and
searches for tiles of every longer piece of it: a step of a layer of V4-Flash, with 39 divisions twice, took it minutes
to compile for 64 tokens. So the chain is one Pallas kernel on NVIDIA GPUs, as is its gradient, and a loop elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

try:  # JAX 0.11 says that a later version will not have it; the loop needs nothing
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

ROWS, WARPS = 4, 1
"""matrices of a kernel's program, and its warps: all that the gradient keeps of the iterations is in registers"""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def doubly_stochastic(x: jax.Array, iterations: int, eps: float) -> jax.Array:
    """The matrices `[…, n, n]` of logits x in float32: softmax of each row, then columns, then rows and columns."""
    return _by_rows(functools.partial(_forward, iterations, eps), jax.lax.fori_loop, x)


def _kept(x: jax.Array, iterations: int, eps: float) -> tuple[jax.Array, jax.Array]:
    return doubly_stochastic(x, iterations, eps), x


def _gradient(iterations: int, eps: float, x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    return (_by_rows(functools.partial(_backward, iterations, eps), jax.lax.fori_loop, x, dy),)


doubly_stochastic.defvjp(_kept, _gradient)


def _forward(iterations: int, eps: float, loop: Callable[..., Any], x: jax.Array) -> jax.Array:
    def divided(y: jax.Array, axis: int) -> jax.Array:
        return y / (y.sum(axis, keepdims=True) + eps)

    first = divided(jax.nn.softmax(x, -1) + eps, -2)
    return loop(0, iterations - 1, lambda _, y: divided(divided(y, -1), -2), first)


def _backward(iterations: int, eps: float, loop: Callable[..., Any], x: jax.Array, dy: jax.Array) -> jax.Array:
    return jax.vjp(functools.partial(_forward, iterations, eps, loop), x)[1](dy)[0]


def _by_rows(f: Callable[..., jax.Array], loop: Callable[..., Any], *operands: jax.Array) -> jax.Array:
    """f(loop, *operands) of matrices: by a kernel on NVIDIA GPUs, where Pallas has one."""
    *outer, n, _ = operands[0].shape
    plain = functools.partial(f, loop)
    if triton is None or n & (n - 1):
        return plain(*operands)

    def kernel(*refs: Any) -> None:
        refs[-1][...] = f(_in_line, *(ref[...] for ref in refs[:-1]))

    def launched(*operands: jax.Array) -> jax.Array:
        flat = [x.reshape(-1, n, n) for x in operands]
        count, block = len(flat[0]), pl.BlockSpec((ROWS, n, n), lambda i: (i, 0, 0))
        flat = [jnp.pad(x, ((0, -count % ROWS), (0, 0), (0, 0))) for x in flat]
        made = pl.pallas_call(
            kernel,
            grid=(len(flat[0]) // ROWS,),
            in_specs=[block] * len(flat),
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct(
                flat[0].shape, jnp.float32, manual_axis_type=jax.typeof(flat[0]).manual_axis_type
            ),
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        )(*flat)
        return made[:count].reshape(*outer, n, n)

    return jax.lax.platform_dependent(*operands, cuda=launched, default=plain)


def _in_line(begin: int, end: int, step: Callable[[int, Any], Any], y: Any) -> Any:
    """`fori_loop` without a loop, whose gradient Triton takes."""
    for i in range(begin, end):
        y = step(i, y)
    return y
