"""The modes of attention: each a module, with all that a mode changes in a call. docs/adding-a-mode.md adds one."""

from .base import AttentionMode, around
from .canonical_order import CanonicalOrder
from .fp8_products import Fp8Products
from .rotary import Rotary

__all__ = ["AttentionMode", "CanonicalOrder", "Fp8Products", "Rotary", "around"]
