"""The tensors of a `LatentAttention` in checkpoints, by Hugging Face's names, which DeepSeek's published V3 has too."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .latent import LatentAttention

NAMES = {
    "wq": "q_proj.weight",
    "wq_a": "q_a_proj.weight",
    "q_norm": "q_a_layernorm.weight",
    "wq_b": "q_b_proj.weight",
    "wkv": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "w_uk": "kv_b_proj.weight",
    "w_uv": "kv_b_proj.weight",
    "wo": "o_proj.weight",
    "gate": "gate_proj.weight",
    "sink": "sinks",
    "indexer.wq_b": "indexer.wq_b.weight",
    "indexer.weights_proj": "indexer.weights_proj.weight",
    "indexer.wk": "indexer.wk.weight",
    "indexer.k_norm": "indexer.k_norm.weight",
    "indexer.k_bias": "indexer.k_norm.bias",
    "indexer.gate": "indexer.index_kpool_compress_gate",
    "indexer.ape": "indexer.index_kpool_compress_ape",
}
"""A head has a key's rows in `kv_b_proj`, `w_uk`, and then a value's, `w_uv`."""


def value(
    layer: LatentAttention, tensor: Callable[[str, Sequence[int], str], np.ndarray], leaf: str, shape: Sequence[int]
) -> np.ndarray:
    """The array of a parameter, of tensors `[out, in]`."""
    if len(shape) == 1 or leaf == "indexer.ape":
        return tensor(NAMES[leaf], shape, leaf)[..., _order(layer, leaf, shape[-1])]
    both = layer.nope + layer.v
    if leaf in ("w_uk", "w_uv"):
        x = tensor(NAMES[leaf], (layer.heads * both, layer.latent), leaf).T.reshape(layer.latent, layer.heads, both)
        return x[..., : layer.nope] if leaf == "w_uk" else x[..., layer.nope :]
    n = _axes_in(leaf)
    x = tensor(NAMES[leaf], (math.prod(shape[n:]), math.prod(shape[:n])), leaf)
    return x.T.reshape(shape)[..., _order(layer, leaf, shape[-1])]


def tensors(layer: LatentAttention, params: Any) -> dict[str, jax.Array]:
    """The tensors of parameters, `[out, in]`, by their names."""
    leaves = {".".join(p.key for p in path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    leaves["w_uk"] = jnp.concatenate([leaves["w_uk"], leaves.pop("w_uv")], -1)
    found = {}
    for leaf, x in leaves.items():
        if leaf != "w_uk":
            x = x[..., np.argsort(_order(layer, leaf, x.shape[-1]))]
        is_given = x.ndim == 1 or leaf == "indexer.ape"
        found[NAMES[leaf]] = x if is_given else x.reshape(math.prod(x.shape[: _axes_in(leaf)]), -1).T
    return found


def _axes_in(leaf: str) -> int:
    return 2 if leaf == "wo" else 1


def _order(layer: LatentAttention, leaf: str, d: int) -> np.ndarray:
    """The places in a checkpoint of the last axis's numbers; RoPE turns the last ones in neighbouring pairs."""
    own = np.arange(d)
    of_index = leaf in ("indexer.wq_b", "indexer.wk", "indexer.k_norm", "indexer.k_bias")
    if not layer.turned or (not of_index and leaf not in ("wq", "wq_b", "wkv")):
        return own
    n, is_first = layer.turned, of_index and layer.index_rope_first
    turned, rest = (own[:n], own[n:]) if is_first else (own[d - n :], own[: d - n])
    if layer.index_halves if of_index else layer.halves:
        turned = turned.reshape(2, n // 2).T.ravel()
    return np.concatenate([rest, turned])
