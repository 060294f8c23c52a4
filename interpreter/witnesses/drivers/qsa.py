"""cuDNN frontend's attention of d 256 over the keys that bits name, in the DSL."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ...cute.record import allocated, placed, tensor
from . import OPERAND, RESULT, Case, attention, bare, causal, folder, normal

BF16 = ml_dtypes.bfloat16
TILE, CHUNK, D = 128, 128, 256  # of queries; of keys, one range of which a tile of queries sees


def forward(*, s: int = 256, h_q: int = 2, h_kv: int = 1) -> Case:
    """Causal, of one sequence."""
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    root = folder("cudnn")
    for name in ("cudnn", "cudnn.QSA", "cudnn.QSA.kernels", "cudnn.frost"):
        bare(name, root.joinpath(*name.split(".")[1:]))
    from cudnn.QSA.kernels import fprop_dense

    q, k, v = normal(s, h_q, D), normal(s, h_kv, D, seed=2), normal(s, h_kv, D, seed=3)
    seen = causal(s, s)
    bits = placed(np.packbits(seen, axis=1, bitorder="little").view(np.int32).ravel())
    tiles = s // TILE
    ranges = placed(np.array([[0, (n + 1) * TILE // CHUNK] for n in range(tiles)], np.int32))
    mode, order = placed(np.zeros(tiles, np.int32)), placed(np.arange(tiles, dtype=np.int32))
    o, lse = allocated((s, h_q, D), BF16), allocated((h_q, s), np.float32)
    o32 = allocated((s, h_q, D), np.float32)
    scale = D**-0.5
    wanted, wanted_lse, _ = attention(q[None], k[None], v[None], scale, seen)

    def flat(x: np.ndarray) -> object:
        return tensor(x.reshape(-1), leading=0)

    operands = {"q": q, "k": k, "v": v, "bits": bits, "ranges": ranges, "mode": mode, "order": order}
    return Case(
        fprop_dense._attn_launch,
        [
            *(tensor(q.transpose(0, 2, 1), leading=1), tensor(k.transpose(0, 2, 1), leading=1)),
            *(tensor(v.transpose(2, 0, 1), leading=0), flat(bits), tensor(ranges, leading=1), flat(mode), flat(order)),
            *(flat(o), flat(o32), flat(lse), Float32(scale), Int32(s // 32), make_fake_stream()),
        ],
        {name: (x, OPERAND) for name, x in operands.items()}
        | {"o": (o, RESULT), "o32": (o32, RESULT), "lse": (lse, RESULT)},
        {"o": wanted[0], "o32": wanted[0], "lse": wanted_lse[0]},
        8e-3,
        static=[(13, h_q // h_kv), (14, h_q)],
    )
