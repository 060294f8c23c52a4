"""Random parameters in the form that a checkpoint has in memory, for times without its files."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import PackedExperts, PackedMatrix, pack_experts, pack_matrix

from .model import Model

PROJECTIONS = {"wq_b": (0, 1), "wo_a": (1, 3), "wo_b": (0, 2)}
"""matrices in FP8, where the axes of their columns begin, and where they end; those that multiply x are in bfloat16"""


def fits(model: Any, mesh: Mesh) -> bool:
    """True if `parameters` makes those of a model: V4's, with experts that `fused_moe` takes, whole on a device."""
    if not isinstance(model, Model) or model.delayed or model.engrams is not None or mesh.shape["tensor"] > 1:
        return False
    try:
        jax.eval_shape(lambda: experts(model, jax.random.key(0)))
    except ValueError:  # of `pack_experts`
        return False
    return True


def parameters(model: Model, mesh: Mesh, dtype: Any) -> dict[str, Any]:
    """Random parameters, matrices in dtype and experts in MXFP4; each device makes its own part."""

    def here(spec: P) -> NamedSharding:
        return NamedSharding(mesh, spec)

    programs: dict[Any, Callable[..., Any]] = {}
    make_experts = jax.jit(lambda key: experts(model, key), out_shardings=here(P("expert")))
    params: dict[str, Any] = {"layers": [], "routing": []}
    for i, layer in enumerate(model.layers):
        few = dataclasses.replace(model, layers=(layer,), hashed=int(i < model.hashed), seen=())
        key = layer, few.hashed
        if key not in programs:
            specs = few.partition()
            programs[key] = jax.jit(without_experts(few, dtype), out_shardings=jax.tree.map(here, thinned(specs)))
        made = programs[key](jax.random.fold_in(jax.random.key(0), i))
        made["layers"][0]["moe"] |= make_experts(jax.random.fold_in(jax.random.key(1), i))
        params = {**made, "layers": params["layers"] + made["layers"], "routing": params["routing"] + made["routing"]}
    return params


def without_experts(model: Model, dtype: Any) -> Callable[[jax.Array], dict[str, Any]]:
    return lambda key: thinned(model.init(key, dtype))


def thinned(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters, or what stands for them, without the routed experts' matrices."""
    thin = [{**p, "moe": {k: x for k, x in p["moe"].items() if k not in ("w13", "w2")}} for p in params["layers"]]
    return {**params, "layers": thin}


def experts(model: Model, key: jax.Array) -> dict[str, PackedExperts]:
    """A layer's random experts."""
    (e, k, inner), (first, second) = (model.experts, model.hidden, model.inner), jax.random.split(key)
    return {"w13": in_mxfp4(first, e, 2, inner, k), "w2": in_mxfp4(second, e, k, inner)}


def in_mxfp4(key: jax.Array, *shape: int) -> PackedExperts:
    """Random matrices `[e, 2, rows, columns]`, gates first, or `[e, rows, columns]`."""
    *rows, columns = shape
    codes = jax.random.bits(key, (*rows, columns // 2), jnp.uint8)
    return pack_experts(codes, jnp.full((*rows, columns // 32), 120, jnp.uint8))  # 2^-7


def projections(params: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """A layer's parameters of attention with random matrices in FP8."""
    found = {name: in_fp8(key, params[name].shape, *axes) for name, axes in PROJECTIONS.items() if name in params}
    of_indexer = {"indexer": projections(params["indexer"], key)} if "indexer" in params else {}
    return {**params, **found, **of_indexer}


def in_fp8(key: jax.Array, shape: tuple[int, ...], first: int, last: int) -> PackedMatrix:
    """A random matrix of this shape, where its columns' axes begin and end there; its rows' axes come after them."""
    *several, rows, columns = (*shape[:first], math.prod(shape[last:]), math.prod(shape[first:last]))
    bits = jax.random.bits(key, (*several, rows, columns), jnp.uint8)
    codes = jax.lax.bitcast_convert_type(jnp.where(bits & 0x7F == 0x7F, 0, bits), jnp.float8_e4m3fn)  # no NaN
    blocks = *several, -(-rows // 128), -(-columns // 128)
    return pack_matrix(codes, jnp.full(blocks, 127 - 12, jnp.uint8), shape)  # 2^-12
