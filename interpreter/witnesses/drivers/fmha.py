"""CUTLASS's example of attention on Blackwell."""

from __future__ import annotations

import math

import numpy as np

from ...cute.record import allocated, tensor
from . import OPERAND, RESULT, Case, attention, example, normal
from . import causal as causal_mask


def forward(*, d: int, causal: bool = False, s: int = 256) -> Case:
    import cutlass
    from cutlass.cute.runtime import make_fake_stream

    module = example("blackwell/fmha.py")
    from helpers.fmha_helpers import MaskEnum

    q, k, v = (normal(1, s, 1, d, dtype=np.float16, seed=n) for n in range(3))
    o, lse = allocated(q.shape, np.float16), allocated((1, 1, s), np.float32)
    scale = d**-0.5
    kernel = module.BlackwellFusedMultiHeadAttentionForward(
        cutlass.Float32, cutlass.Float32, (128, 128, d), False, MaskEnum.WINDOW_MASK
    )
    wanted_o, wanted_lse, _ = attention(q, k, v, scale, causal_mask(s, s) if causal else None)
    pointers = [tensor(x, dynamic=False).iterator for x in (q, k, v, o, lse)]
    last_seen = cutlass.Int32(0) if causal else None
    scales = (scale * math.log2(math.e), scale, 1.0)
    args = [*pointers[:4], (1, s, s, s, 1, 1, d), None, None, pointers[4], *scales, None, last_seen, make_fake_stream()]
    arrays = {"q": (q, OPERAND), "k": (k, OPERAND), "v": (v, OPERAND), "o": (o, RESULT), "lse": (lse, RESULT)}
    return Case(kernel, args, arrays, {"o": wanted_o, "lse": wanted_lse}, 2e-3)
