"""The suite v41: steps of generation in layers of DeepSeek-V4.1-Flash, which share entries, keys and choices."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..layers import DSV4Attention, Shared, from_config
from .layer import FLASH, LayerRow, table
from .measure import Operands
from .row import Suite

CONTEXT = 131072  # tokens of each sequence, of which a layer of ratio 1 has as many entries
FLASH_V41: dict[str, Any] = FLASH | {
    "hidden_size": 5120, "num_hidden_layers": 6, "q_lora_rank": 1280, "index_n_heads": 32, "rms_norm_eps": 1e-20,
    "compress_ratios": [0, 0, 2, 1, 1, 1], "kv_source_layer_ids": [2, 3], "index_source_layer_ids": [2, 3, 4],
    "candidate_source_layer_id": 3, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
}  # fmt: skip
"""V4.1-Flash, with one layer of each kind: numbers 1 to 5 of this model are 1, 2, 20, 24 and 25 of the published one"""
KINDS = {
    1: "with a window alone",
    2: "of ratio 2 that makes entries and chooses",
    3: "of ratio 1 that makes entries, and chooses blocks and entries",
    4: "of ratio 1 that chooses within blocks",
    5: "of ratio 1 that takes a choice",
}


@dataclass(frozen=True, kw_only=True)
class V41Row(LayerRow):
    """A step, in one kind of layer, after the layers whose entries, keys, blocks and choice it takes."""

    number: int
    """of the layer in `FLASH_V41`"""

    @property
    def name(self) -> str:
        kind, cache = KINDS[self.number], {"bfloat16": "", "float8_e4m3fn": ", FP8", "float4_e2m1fn": ", FP4"}
        return f"V4.1's layer {kind}, step after {self.s_kv}, b{self.b}{cache[self.cache]}"

    @property
    def layer(self) -> DSV4Attention:
        return from_config(FLASH_V41)[self.number]

    @property
    def _seen(self) -> int:
        chosen = FLASH_V41["index_topk"] if self.ratio else 0
        return self.b * self.s_q * (chosen + self.layer.window)

    def inputs(self, sets: int) -> list[Operands]:
        (operands,) = super().inputs(sets)
        return [operands | {"shared": self.shared()}]

    def shared(self) -> Shared:
        """The results of earlier layers, of which this layer takes those that it does not make itself."""
        layer = self.layer
        if not self.ratio or layer.compressor is not None:
            return Shared()
        source = replace(self, number=3).filled()
        queries, entries = (self.b, self.s_q), self.s_kv // self.ratio
        indices = jnp.broadcast_to(_spread(FLASH_V41["index_topk"], entries), (*queries, FLASH_V41["index_topk"]))
        if layer.indexer is None:
            return Shared(source.compressed, indices=indices)
        count, size = FLASH_V41["candidate_topk_blocks"], FLASH_V41["candidate_block_size"]
        blocks = jnp.broadcast_to(_spread(count, entries // size), (*queries, count))
        return Shared(source.compressed, source.keys, None, blocks)


def _spread(count: int, of: int) -> jax.Array:
    """So many numbers below `of`, ascending, at equal distances."""
    return (jnp.arange(count, dtype=jnp.int32) * of) // count


SUITE = Suite(
    "v41",
    "#7f4f2f",
    tuple(
        V41Row(b=64, s_q=1, s_kv=CONTEXT, ratio=FLASH_V41["compress_ratios"][number], number=number, cache=cache)
        for cache in ("bfloat16", "float4_e2m1fn")
        for number in KINDS
    ),
    table,
)
