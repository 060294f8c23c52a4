"""Parameters from checkpoints, and back: Hugging Face's names and DeepSeek's."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check
from .._definitions.packed_matrix import PackedMatrix, pack_matrix
from .._definitions.slabs import BLOCK, GREATEST_SCALE
from . import _latent_weights, _operands, _params
from ._operands import IN_FLOAT32, extents, shapes
from ._packing import divides, may_be_packed, sharding_of_data
from .attention import DSV4Attention
from .latent import LatentAttention

_DEEPSEEK: dict[str, Any] = {
    "wq_a": "wq_a.weight",
    "q_norm": "q_norm.weight",
    "wq_b": "wq_b.weight",
    "wkv": "wkv.weight",
    "kv_norm": "kv_norm.weight",
    "sink": "attn_sink",
    "wo_a": "wo_a.weight",
    "wo_b": "wo_b.weight",
    "compressor.w": ("compressor.wkv.weight", "compressor.wgate.weight"),
    "compressor.ape": "compressor.ape",
    "compressor.norm": "compressor.norm.weight",
    "indexer.wq_b": "indexer.wq_b.weight",
    "indexer.weights_proj": "indexer.weights_proj.weight",
    "indexer.wk": "indexer.wk.weight",
    "indexer.k_norm": "indexer.k_norm.weight",
    "indexer.compressor.w": ("indexer.compressor.wkv.weight", "indexer.compressor.wgate.weight"),
    "indexer.compressor.ape": "indexer.compressor.ape",
    "indexer.compressor.norm": "indexer.compressor.norm.weight",
}
"""Names in DeepSeek's checkpoints for a parameter, or for its parts; Hugging Face's V4.1 uses them too"""

_HUGGING_FACE: dict[str, Any] = {
    "wq_a": "q_a_proj.weight",
    "q_norm": "q_a_norm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv": "kv_proj.weight",
    "kv_norm": "kv_norm.weight",
    "sink": "sinks",
    "wo_a": "o_a_proj.weight",
    "wo_b": "o_b_proj.weight",
    "compressor.w": ("compressor.kv_proj.weight", "compressor.gate_proj.weight"),
    "compressor.ape": "compressor.position_bias",
    "compressor.norm": "compressor.kv_norm.weight",
    "indexer.wq_b": "compressor.indexer.q_b_proj.weight",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj.weight",
    "indexer.compressor.w": ("compressor.indexer.kv_proj.weight", "compressor.indexer.gate_proj.weight"),
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.norm": "compressor.indexer.kv_norm.weight",
}

_SCALES = (".scale", ".weight_scale_inv", "_scale_inv")
"""Names of an FP8 matrix's scales, in place of `.weight` or after it"""


def from_state_dict(
    layer: DSV4Attention | LatentAttention,
    tensors: Mapping[str, Any],
    prefix: str = "",
    dtype: Any = jnp.bfloat16,
    shardings: jax.sharding.Sharding | dict[str, Any] | None = None,
    packed: bool = False,
) -> dict[str, Any]:
    """The parameters of a layer, as `layer.init` lays them out, from a checkpoint's tensors.

    Args:
      layer: one of the layers that `from_config` returns, or `LatentAttention.from_config`.
      tensors: arrays by name, of NumPy, JAX or torch, `[out, in]` as linear layers have them: from a state dict or a
        safetensors file, which may hold other tensors too.
      prefix: the prefix of the layer's names, such as "layers.2.attn." (DeepSeek) or "model.layers.2.self_attn."
        (Hugging Face). Matrices in e4m3 come with scales for square blocks of 128 or 32; the function multiplies these
        in.
      dtype: dtype of the matrices. Norms, sinks and `ape` are float32.
      shardings: where parameters go, each part straight from the host to its device: a Sharding, or a dict of them
        as the parameters are laid out. None means the default device.
      packed: whether matrices in e4m3 stay so, as a `PackedMatrix`: those that a layer takes, with scales for blocks of
        128 that are above 0 and up to 128, of groups of whole blocks, and where devices' parts are whole tiles. Scales
        that are no powers of two are rounded to bfloat16. All others, and those of a `LatentAttention`, are as without
        it. `shardings` are those of the matrices that they stand for.

    Raises:
      ValueError: a tensor is missing, has another shape, is not of floats, or has no use in the layer; a matrix in 8
        bits is not e4m3, or has no scales, those of other blocks, or some that are not finite or not above 0; another
        tensor has scales.
      TypeError: not a layer, not a mapping, or a tensor without values, as inside of `jax.jit`.

    Examples:
      >>> import numpy as np
      >>> from jax_dsv4_fmha.layers import DSV4Attention, Rope, from_state_dict
      >>> layer = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
      >>> shapes = {
      ...     "wq_a.weight": (32, 64), "q_norm.weight": (32,), "wq_b.weight": (128, 32), "wkv.weight": (32, 64),
      ...     "kv_norm.weight": (32,), "attn_sink": (4,), "wo_a.weight": (32, 64), "wo_b.weight": (64, 32),
      ... }
      >>> tensors = {"layers.0.attn." + name: np.ones(shape, np.float32) for name, shape in shapes.items()}
      >>> params = from_state_dict(layer, tensors, "layers.0.attn.")
      >>> params["wq_b"].shape, params["wq_b"].dtype
      ((32, 4, 32), dtype(bfloat16))
    """
    _check_layer(_OP, layer)
    if not isinstance(tensors, Mapping) or not isinstance(prefix, str):
        what = ("prefix", prefix, "a str") if isinstance(tensors, Mapping) else ("tensors", tensors, "a mapping")
        raise _check.error(TypeError, _OP, *what)
    dtype = _check.dtype(_OP, "dtype", dtype, _check.FLOAT, " or ".join(map(str, _check.FLOAT)))
    _check.flags(_OP, packed=packed)
    own = {name[len(prefix) :]: x for name, x in tensors.items() if isinstance(name, str) and name.startswith(prefix)}
    firsts = _firsts(layer)
    names = next((names for first, names in firsts.items() if first in own), None)
    if names is None:
        wanted = " or ".join(prefix + first for first in firsts)
        raise _check.error(ValueError, _OP, "tensors", "none that is called so", wanted + _prefixes(firsts, tensors))
    used: set[str] = set()

    def as_it_is(name: str, shape: Sequence[int], leaf: str) -> tuple[np.ndarray, np.ndarray | None]:
        """A tensor's numbers, or codes and their scales."""
        wanted = f"floats{list(shape)} for {leaf}"
        if name not in own:
            raise _check.error(ValueError, _OP, prefix + name, "none", wanted)
        given = own[name]
        x = _to_numpy(prefix + name, given, (*_PLAIN, _E4M3), wanted)
        if x.shape != tuple(shape):
            is_turned = x.ndim == 2 and x.shape == tuple(shape)[::-1] and name.endswith(".weight")
            turned = "; it would fit transposed: matrices come [out, in], as torch has them"
            raise _check.error(ValueError, _OP, prefix + name, given, wanted + turned * is_turned)
        used.add(name)
        stem = name.removesuffix(".weight")
        names_of = dict.fromkeys((*(stem + end for end in _SCALES), name + _SCALES[2]))
        scales = [s for s in names_of if s in own]
        if scales[1:]:
            raise _check.error(ValueError, _OP, "tensors", f"{scales[1]} under {prefix!r}", "a layer's alone")
        if _dtype_name(given) != _E4M3:
            if scales:
                wanted = f"no {scales[0]}, which scales e4m3, or it in e4m3"
                raise _check.error(ValueError, _OP, prefix + name, given, wanted)
            return x, None
        if not scales:
            raise _check.error(ValueError, _OP, prefix + name, given, f"{stem}{_SCALES[0]}, its scales, too")
        used.add(scales[0])
        return x, _to_numpy(prefix + scales[0], own[scales[0]], (*_PLAIN, "float8_e8m0fnu"), "scales")

    def tensor(name: str, shape: Sequence[int], leaf: str) -> np.ndarray:
        x, scales = as_it_is(name, shape, leaf)
        return x if scales is None else _scaled(prefix + name, x, scales)

    def placed(x: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
        if sharding is None:
            return jnp.asarray(x)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    def in_fp8(
        name: str, shape: tuple[int, ...], leaf: str, sharding: jax.sharding.Sharding | None
    ) -> PackedMatrix | None:
        """A tensor as the packed matrix of a leaf, or None where it has to be unpacked."""
        if not may_be_packed(leaf, shape, sharding):
            return None
        several, rows, columns = extents(leaf, shape)
        codes, scales = as_it_is(name, (math.prod(several) * rows, columns), leaf)
        w = None if scales is None else _packed(codes, scales, several, shape)
        return None if w is None else dataclasses.replace(w, data=placed(w.data, sharding_of_data(leaf, sharding)))

    def read(path: Any, leaf_shape: Any, sharding: jax.sharding.Sharding | None) -> jax.Array | PackedMatrix:
        leaf, shape = ".".join(p.key for p in path), leaf_shape.shape
        if leaf not in names:  # V4.1's, which has DeepSeek's names at Hugging Face too
            raise _check.error(ValueError, _OP, "tensors", f"no {leaf} under these names", prefix + _DEEPSEEK[leaf])
        parts = [names[leaf]] if isinstance(names[leaf], str) else names[leaf]
        if packed and isinstance(layer, DSV4Attention) and (w := in_fp8(parts[0], shape, leaf, sharding)) is not None:
            return w
        if isinstance(layer, LatentAttention):
            x = _latent_weights.value(layer, tensor, leaf, shape)
        elif leaf == "wo_a":  # [groups · rank, heads of a group · d]
            g, heads, d, rank = shape
            x = tensor(parts[0], (g * rank, heads * d), leaf)
            x = x.reshape(g, rank, heads, d).transpose(0, 2, 3, 1)
        elif not parts[0].endswith(".weight") or len(shape) == 1:
            x = tensor(parts[0], shape, leaf)
        else:  # [out, in]; wo_b has two axes in, all others one
            n = 2 if leaf == "wo_b" else 1
            columns, rows = math.prod(shape[:n]), math.prod(shape[n:])
            if leaf.endswith("compressor.w") and _has_no_gate(layer, leaf):
                parts = parts[:1]
            x = np.concatenate([tensor(part, (rows // len(parts), columns), leaf) for part in parts]).T
        x = x.reshape(shape).astype(jnp.float32 if leaf.rpartition(".")[2] in IN_FLOAT32 else dtype)
        if not divides(sharding, shape):
            raise _check.error(ValueError, _OP, f"shardings of {leaf}", str(sharding), f"one for {list(shape)}")
        return placed(x, sharding)

    of_layer = shapes(layer)
    where = shardings if isinstance(shardings, dict) else jax.tree.map(lambda _: shardings, of_layer)
    params = jax.tree_util.tree_map_with_path(read, of_layer, where)
    unused = sorted(set(own) - used)
    if unused:
        raise _check.error(ValueError, _OP, "tensors", f"{', '.join(unused)} under {prefix!r}", "a layer's alone")
    return params


def to_state_dict(
    layer: DSV4Attention | LatentAttention, params: Any, prefix: str = "", *, hugging_face: bool = False
) -> dict[str, jax.Array]:
    """The tensors of a layer's parameters, as `from_state_dict` reads them: matrices `[out, in]`, in their own dtypes.

    Args:
      layer: the layer.
      params: its parameters, as `init` or `joined` makes them.
      prefix: what the names begin with.
      hugging_face: whether they are Hugging Face's names, and not DeepSeek's; those of a `LatentAttention` always are.

    Raises:
      ValueError: params differ from what `init` makes, are packed, or have a parameter without a name of Hugging
        Face's.
      TypeError: not a layer.

    Examples:
      >>> import jax
      >>> from jax_dsv4_fmha.layers import DSV4Attention, Rope, from_state_dict, to_state_dict
      >>> layer = DSV4Attention(hidden=64, heads=4, d=32, q_rank=32, o_groups=2, o_rank=16, rope=Rope(8))
      >>> tensors = to_state_dict(layer, layer.init(jax.random.key(0)), "layers.0.attn.")
      >>> tensors["layers.0.attn.wq_b.weight"].shape
      (128, 32)
      >>> from_state_dict(layer, tensors, "layers.0.attn.")["wq_b"].shape
      (32, 4, 32)
    """
    op = "to_state_dict"
    _check_layer(op, layer)
    if isinstance(layer, LatentAttention):
        _operands.parameters(layer, params, packed=False)
        return {prefix + name: x for name, x in _latent_weights.tensors(layer, params).items()}
    _params.check(layer, params)
    names, found = _HUGGING_FACE if hugging_face else _DEEPSEEK, dict[str, jax.Array]()
    whole = _params.separate(layer, params)
    for path, x in jax.tree_util.tree_leaves_with_path(whole, is_leaf=lambda x: isinstance(x, PackedMatrix)):
        leaf = ".".join(p.key for p in path)
        if isinstance(x, PackedMatrix):
            raise _check.error(ValueError, op, f"params.{leaf}", x, "an array, as `unpacked` makes it")
        if leaf not in names:
            raise _check.error(ValueError, op, "params", leaf, "a parameter that Hugging Face has a name for")
        parts = [names[leaf]] if isinstance(names[leaf], str) else list(names[leaf])
        if leaf == "wo_a":  # [groups · rank, heads of a group · d]
            g, heads, d, rank = x.shape
            x = jnp.transpose(x, (0, 3, 1, 2)).reshape(g * rank, heads * d)
        elif parts[0].endswith(".weight") and x.ndim > 1:  # [out, in]; wo_b has two axes in, all others one
            n = 2 if leaf == "wo_b" else 1
            x = x.reshape(math.prod(x.shape[:n]), -1).T
            if leaf.endswith("compressor.w") and _has_no_gate(layer, leaf):
                parts = parts[:1]
        for part, tensor in zip(parts, jnp.split(x, len(parts)), strict=True):
            found[prefix + part] = tensor
    return found


def _check_layer(op: str, layer: Any) -> None:
    if not isinstance(layer, DSV4Attention | LatentAttention):
        raise _check.error(TypeError, op, "layer", layer, "a DSV4Attention or a LatentAttention")


def _firsts(layer: DSV4Attention | LatentAttention) -> dict[str, dict[str, Any]]:
    """The names that a layer's tensors may have, by that of one which every layer has."""
    if isinstance(layer, LatentAttention):
        return {_latent_weights.NAMES["wkv"]: _latent_weights.NAMES}
    return {names["wq_a"]: names for names in (_DEEPSEEK, _HUGGING_FACE)}


def _prefixes(firsts: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """Returns the end of an error where other prefixes would have named a layer."""
    found = [
        name.removesuffix(end) for name in tensors for end in firsts if isinstance(name, str) and name.endswith(end)
    ]
    more = f" or {len(found) - 3} others" if len(found) > 3 else ""
    return f"; prefixes of layers there are {', '.join(map(repr, found[:3]))}{more}" if found else ""


def _has_no_gate(layer: DSV4Attention, leaf: str) -> bool:
    """Returns whether the compressor of this leaf has ratio 1, and so no gate."""
    own = layer.compressor if leaf == "compressor.w" or layer.indexer is None else layer.indexer.compressor
    return own is not None and own.ratio == 1


def _dtype_name(x: Any) -> str:
    """The name of an array's dtype, of NumPy, JAX or torch."""
    return str(getattr(x.dtype, "name", x.dtype)).removeprefix("torch.")


def _to_numpy(name: str, x: Any, dtypes: Sequence[str], wanted: str) -> np.ndarray:
    """float32, from any library's array in one of these dtypes."""
    if isinstance(x, jax.core.Tracer) or not hasattr(x, "dtype"):
        raise _check.error(TypeError, _OP, name, x, f"{wanted}, with values")
    if _dtype_name(x) not in dtypes:
        raise _check.error(ValueError, _OP, name, x, f"{wanted}, in {', '.join(dtypes)}")
    if hasattr(x, "detach"):  # torch's: NumPy does not know its 8 and 16 bits
        x = x.detach().float().cpu().numpy()
    return np.asarray(x).astype(np.float32)


def _packed(
    codes: np.ndarray, scales: np.ndarray, several: tuple[int, ...], shape: tuple[int, ...]
) -> PackedMatrix | None:
    """Codes `[several · rows, columns]` as a packed matrix of this shape, or None if it cannot have their scales."""
    n, are_kept = math.prod(several), ((scales > 0) & (scales <= 2.0 ** (GREATEST_SCALE - 127))).all()
    if not are_kept or scales.shape != tuple(-(-m // BLOCK) for m in codes.shape):
        return None
    codes = codes.astype(jnp.float8_e4m3fn)
    codes, scales = (x.reshape(*several, len(x) // n, x.shape[1]) for x in (codes, scales))
    return pack_matrix(jnp.asarray(codes), jnp.asarray(scales), shape)


def _scaled(name: str, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x times the scales of its blocks."""
    if not np.isfinite(scale).all():
        raise _check.error(ValueError, _OP, name, "scales that are NaN or inf", "finite ones")
    for block in (128, 32):
        if x.ndim == 2 and scale.shape == tuple(-(-n // block) for n in x.shape):
            if scale.size and scale.min() <= 0:
                raise _check.error(ValueError, _OP, name, f"scales down to {scale.min():g}", "scales above 0")
            whole = np.repeat(np.repeat(scale, block, 0), block, 1)
            return x * whole[: x.shape[0], : x.shape[1]]
    raise _check.error(
        ValueError, _OP, name, f"scales {list(scale.shape)}", "one for a block of 128 or of 32, in both directions"
    )


_OP = "from_state_dict"
_PLAIN = ("float32", "bfloat16", "float16", "float64")
_E4M3 = "float8_e4m3fn"
