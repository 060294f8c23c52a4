"""Parameters from checkpoints: Hugging Face's names and DeepSeek's."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .attention import DSV4Attention

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

_FP32 = ("norm", "sink", "ape", "k_norm", "q_norm", "kv_norm")
"""parameters that stay in float32"""


def from_state_dict(
    layer: DSV4Attention, tensors: Mapping[str, Any], prefix: str = "", dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    """The parameters of a layer, as `layer.init` lays them out, from a checkpoint's tensors.

    Args:
      layer: one of the layers that `from_config` returns.
      tensors: arrays by name, of NumPy, JAX or torch, `[out, in]` as linear layers have them: from a state dict or a
        safetensors file, which may hold other tensors too.
      prefix: the prefix of the layer's names, such as "layers.2.attn." (DeepSeek) or "model.layers.2.self_attn."
        (Hugging Face). Matrices in e4m3 come with scales for square blocks of 128 or 32; the function multiplies these
        in.
      dtype: dtype of the matrices. Norms, sinks and `ape` are float32.

    Raises:
      ValueError: a tensor is missing, has another shape, or has no use in the layer.
    """
    own = {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
    names = next((names for names in (_DEEPSEEK, _HUGGING_FACE) if names["wq_a"] in own), None)
    if names is None:
        wanted = f"{prefix}{_DEEPSEEK['wq_a']} or {prefix}{_HUGGING_FACE['wq_a']}"
        raise ValueError(f"from_state_dict: tensors: got none that is called so, wanted {wanted}")
    shapes = jax.eval_shape(layer.init, jax.random.key(0))
    used: set[str] = set()

    def tensor(name: str, leaf: str, shape: Any) -> np.ndarray:
        if name not in own:
            raise ValueError(f"from_state_dict: {prefix}{name}: got none, wanted {list(shape.shape)} of {leaf}")
        used.add(name)
        x = _to_numpy(own[name])
        for scale in (*(name.removesuffix(".weight") + end for end in _SCALES), name + _SCALES[2]):
            if scale in own and scale not in used:
                used.add(scale)
                x = _scaled(prefix + name, x, _to_numpy(own[scale]))
        return x.T if name.endswith(".weight") and x.ndim == 2 else x

    def read(path: Any, shape: Any) -> jax.Array:
        leaf = ".".join(p.key for p in path)
        name, *others = [names[leaf]] if isinstance(names[leaf], str) else names[leaf]
        x = tensor(name, leaf, shape)
        for other in others:
            if x.size < math.prod(shape.shape):
                x = np.concatenate([x, tensor(other, leaf, shape)], 1)
        if x.size != math.prod(shape.shape):
            got = list((x.T if name.endswith(".weight") and x.ndim == 2 else x).shape)
            raise ValueError(f"from_state_dict: {prefix}{name}: got {got}, wanted {list(shape.shape)} of {leaf}")
        if leaf == "wo_a":  # [groups · rank, heads of a group · d]
            g, heads, d, rank = shape.shape
            x = x.T.reshape(g, rank, heads, d).transpose(0, 2, 3, 1)
        last = leaf.rsplit(".")[-1]
        return jnp.asarray(x.reshape(shape.shape), jnp.float32 if last in _FP32 else dtype)

    params = jax.tree_util.tree_map_with_path(read, shapes)
    unused = sorted(set(own) - used)
    if unused:
        got = f"got {', '.join(unused)} under {prefix!r}"
        raise ValueError(f"from_state_dict: tensors: {got}, wanted a layer's alone")
    return params


def _to_numpy(x: Any) -> np.ndarray:
    """float32, from any library's array."""
    if hasattr(x, "detach"):  # torch's: NumPy does not know its 8 and 16 bits
        x = x.detach().float().cpu().numpy()
    return np.asarray(x).astype(np.float32)


def _scaled(name: str, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x times the scales of its blocks."""
    for block in (128, 32):
        if scale.shape == tuple(-(-n // block) for n in x.shape):
            whole = np.repeat(np.repeat(scale, block, 0), block, 1)
            return x * whole[: x.shape[0], : x.shape[1]]
    raise ValueError(f"from_state_dict: {name}: got scales {list(scale.shape)}, wanted one for a block of 128 or of 32")
