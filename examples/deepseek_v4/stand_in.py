"""Random parameters in the form that a checkpoint has in memory, for times without its files."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import PackedExperts, PackedMatrix, pack_experts, pack_matrix

from .layout import SPLIT
from .model import Model
from .packed import BLOCK


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
    """Random parameters in dtype, experts in MXFP4 and projections in FP8; each device makes its own part."""

    def here(spec: P) -> NamedSharding:
        return NamedSharding(mesh, spec)

    programs: dict[Any, Callable[..., Any]] = {}
    make_experts = jax.jit(lambda key: experts(model, key), out_shardings=here(P("expert")))
    params: dict[str, Any] = {"layers": [], "routing": []}
    for i, layer in enumerate(model.layers):
        few = dataclasses.replace(model, layers=(layer,), hashed=int(i < model.hashed), seen=())
        key = layer, few.hashed
        if key not in programs:
            make = without_experts(few, dtype, jax.tree.map(here, layer.partition(SPLIT)), mesh.shape["expert"])
            specs = few.partition(jax.eval_shape(make, jax.random.key(0)))
            programs[key] = jax.jit(make, out_shardings=jax.tree.map(here, specs))
        made = programs[key](jax.random.fold_in(jax.random.key(0), i))
        made["layers"][0]["moe"] |= make_experts(jax.random.fold_in(jax.random.key(1), i))
        params = {**made, "layers": params["layers"] + made["layers"], "routing": params["routing"] + made["routing"]}
    return params


def without_experts(
    model: Model, dtype: Any, shardings: Any = None, devices: int = 1
) -> Callable[[jax.Array], dict[str, Any]]:
    """Returns a function that makes a layer's random parameters, with those in FP8 that `load` keeps so.

    shardings: of attention's matrices; devices: those that share out the shared expert.
    """
    has_blocks = model.hidden % BLOCK == 0 and model.inner % (BLOCK * devices) == 0

    def make(key: jax.Array) -> dict[str, Any]:
        params = thinned(model.init(key, dtype))
        (layer,), (p,) = model.layers, params["layers"]
        moe = p["moe"]
        if has_blocks:
            moe = {**moe, "shared13": in_fp8(moe["shared13"].swapaxes(0, 1)), "shared2": in_fp8(moe["shared2"])}
        return {**params, "layers": [{**p, "moe": moe, "attention": layer.packed(p["attention"], shardings)}]}

    return make


def in_fp8(w: jax.Array) -> PackedMatrix:
    """Matrices `[…, columns, rows]` of numbers up to 2 in FP8."""
    rows = jnp.swapaxes(w, -1, -2)
    blocks = *rows.shape[:-2], rows.shape[-2] // BLOCK, rows.shape[-1] // BLOCK
    return pack_matrix((rows * 2**7).astype(jnp.float8_e4m3fn), jnp.full(blocks, 127 - 7, jnp.uint8))


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
