"""Attention for DeepSeek-V4-like models in JAX: sliding window, compressed and top-k sparse, with sinks."""

from . import reference
from ._definitions.cache import Cache
from ._definitions.experts import PackedExperts, pack_experts
from ._definitions.packed import dequantize_cache, quantize_cache
from ._definitions.packed_matrix import PackedMatrix, pack_matrix
from ._definitions.quantized import Quantized
from ._definitions.query_rope import QueryRope
from ._definitions.span import Span
from ._dispatch.explain import explain
from ._host.library import EXPORT_CHECKS
from ._ops.decode import dsv4_decode
from ._ops.dot_product_attention import dot_product_attention
from ._ops.dsv4 import dsv4_attention
from ._ops.fmha import fmha
from ._ops.fused_moe import fused_moe
from ._ops.gqa_decode import gqa_decode
from ._ops.hyper_connection import HyperConnection, hyper_connection
from ._ops.indexer import indexer_blocks, lightning_indexer, quantize_indexer
from ._ops.indexer_training import indexer_loss, indexer_scores
from ._ops.merge import merge
from ._ops.mla_decode import mla_decode
from ._ops.probabilities import head_summed_probabilities
from ._ops.route import route
from ._ops.sparse import sparse_fmha

__version__ = "0.1.0"

__all__ = [
    "EXPORT_CHECKS",
    "Cache",
    "HyperConnection",
    "PackedExperts",
    "PackedMatrix",
    "Quantized",
    "QueryRope",
    "Span",
    "dequantize_cache",
    "dot_product_attention",
    "dsv4_attention",
    "dsv4_decode",
    "explain",
    "fmha",
    "fused_moe",
    "gqa_decode",
    "head_summed_probabilities",
    "hyper_connection",
    "indexer_blocks",
    "indexer_loss",
    "indexer_scores",
    "lightning_indexer",
    "merge",
    "mla_decode",
    "pack_experts",
    "pack_matrix",
    "quantize_cache",
    "quantize_indexer",
    "reference",
    "route",
    "sparse_fmha",
]
