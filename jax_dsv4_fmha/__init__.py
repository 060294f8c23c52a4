"""Attention for DeepSeek-V4-like models in JAX: sliding window, compressed and top-k sparse, with sinks."""

from . import reference
from .cache import Cache
from .decode import dsv4_decode
from .dot_product_attention import dot_product_attention
from .dsv4 import dsv4_attention
from .fmha import fmha
from .fp8 import dequantize_cache, quantize_cache
from .merge import merge
from .span import Span
from .sparse import sparse_fmha

__all__ = [
    "Cache",
    "Span",
    "dequantize_cache",
    "dot_product_attention",
    "dsv4_attention",
    "dsv4_decode",
    "fmha",
    "merge",
    "quantize_cache",
    "reference",
    "sparse_fmha",
]
