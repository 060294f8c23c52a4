"""Keys of an indexer in e2m1, every 32 numbers with a scale of ue8m0: as numbers, and as bytes."""

from __future__ import annotations

import numpy as np

from ..machine.state import Array

GROUP = 32  # numbers that share a scale
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NAN = 255  # of a scale


def _scales(codes: Array) -> Array:
    """float64 [..., groups, 1]; NaN is 1"""
    return np.exp2(np.where(codes == NAN, 127, codes.astype(np.float64)) - 127)[..., None]


def _codes(k: Array, scales: Array) -> Array:
    """The nearest codes to keys [..., 128]: uint8 [..., groups, GROUP]."""
    parts = np.nan_to_num(k.astype(np.float64)).reshape(*scales.shape, GROUP) / _scales(scales)
    nearest = np.abs(np.abs(parts)[..., None] - MAGNITUDES).argmin(-1)
    return (nearest + 8 * np.signbit(parts)).astype(np.uint8)


def rounded(k: Array, scales: Array) -> Array:
    """Rounds keys to e2m1 in these scales, and returns them as float32."""
    codes = _codes(k, scales)
    numbers = np.where(codes < 8, 1, -1) * MAGNITUDES[codes % 8] * _scales(scales)
    return numbers.reshape(k.shape).astype(np.float32)


def packed(k: Array, scales: Array) -> tuple[Array, Array]:
    """uint8 [..., 64], the even one of a pair in the low nibble, and [..., 4]; a group with a NaN has no other."""
    codes = _codes(k, scales).reshape(k.shape)
    lost = np.isnan(k.astype(np.float64)).reshape(*scales.shape, GROUP).any(-1)
    return codes[..., ::2] | codes[..., 1::2] << 4, np.where(lost, NAN, scales).astype(np.uint8)
