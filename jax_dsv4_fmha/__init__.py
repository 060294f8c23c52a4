"""Attention for DeepSeek-V4-like models in JAX: sliding window, compressed and top-k sparse, with sinks."""

from . import reference
from .dot_product_attention import dot_product_attention
from .dsv4 import dsv4_attention
from .fmha import fmha
from .merge import merge
from .span import Span
from .sparse import sparse_fmha

__all__ = [
    "Span",
    "dot_product_attention",
    "dsv4_attention",
    "fmha",
    "merge",
    "reference",
    "sparse_fmha",
]
