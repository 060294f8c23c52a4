"""Attention for DeepSeek-V4-like models in JAX: sliding window, compressed and top-k sparse, with sinks."""

from . import reference
from ._cache import Cache
from ._decode import dsv4_decode
from ._dot_product_attention import dot_product_attention
from ._dsv4 import dsv4_attention
from ._explain import explain
from ._ffi import EXPORT_CHECKS
from ._fmha import fmha
from ._indexer import indexer_blocks, indexer_loss, indexer_scores, lightning_indexer, quantize_indexer
from ._merge import merge
from ._packed import dequantize_cache, quantize_cache
from ._probabilities import head_summed_probabilities
from ._span import Span
from ._sparse import sparse_fmha

__version__ = "0.1.0"

__all__ = [
    "EXPORT_CHECKS",
    "Cache",
    "Span",
    "dequantize_cache",
    "dot_product_attention",
    "dsv4_attention",
    "dsv4_decode",
    "explain",
    "fmha",
    "head_summed_probabilities",
    "indexer_blocks",
    "indexer_loss",
    "indexer_scores",
    "lightning_indexer",
    "merge",
    "quantize_cache",
    "quantize_indexer",
    "reference",
    "sparse_fmha",
]
