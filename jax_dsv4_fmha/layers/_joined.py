"""Matrices that multiply the same x, side by side in one: parameters of a step, and the gradient of two products."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from .attention import DSV4Attention

JOINED = "wx"


def joined(layer: DSV4Attention, params: Any) -> dict[str, Any]:
    parts = [functools.reduce(operator.getitem, name.split("."), params) for name in of_x(layer)]
    return {**without_those_of_x(layer, params), JOINED: jnp.concatenate(parts, 1)}


def separate(layer: DSV4Attention, params: Any) -> Any:
    """These parameters as `init` makes them, whether they are joined or not."""
    if JOINED not in params:
        return params
    found, column = jax.tree.map(lambda x: x, {k: x for k, x in params.items() if k != JOINED}), 0
    for name, width in of_x(layer).items():
        *path, last = name.split(".")
        of = functools.reduce(operator.getitem, path, found)
        of[last] = jax.lax.slice_in_dim(params[JOINED], column, column + width, axis=1)
        column += width
    return found


def of_x(layer: DSV4Attention) -> dict[str, int]:
    """The matrices that a step multiplies x with, and how many columns each has."""
    widths = {"wq_a": layer.q_rank, "wkv": layer.d}
    keys = layer.indexer
    if layer.compressor is not None and not (keys is not None and keys.latent):
        widths["compressor.w"] = layer.compressor.width
    if keys is not None:
        if keys.compressor is not None:
            widths["indexer.compressor.w"] = keys.compressor.width
        widths["indexer.weights_proj"] = keys.heads
    return widths


def without_those_of_x(layer: DSV4Attention, params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: without_those_of_x(layer, x, f"{prefix}{name}.") if isinstance(x, Mapping) else x
        for name, x in params.items()
        if prefix + name not in of_x(layer)
    }


@jax.custom_vjp
def two_products(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x a and x b. Their gradient in x is one product, where XLA would make two and add them up."""
    return x @ a, x @ b


def _gradients(operands: tuple[jax.Array, ...], given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    def one_product(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = x @ jnp.concatenate([a, b], 1)
        return both[..., : a.shape[1]], both[..., a.shape[1] :]

    return jax.vjp(one_product, *operands)[1](given)


two_products.defvjp(lambda *operands: (two_products(*operands), operands), _gradients)
