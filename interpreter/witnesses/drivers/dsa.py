"""cuDNN frontend's sparse attention of DeepSeek models, in the DSL."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ...cute.record import allocated, placed, tensor
from ...machine.state import Array
from . import BOTH, OPERAND, RESULT, Case, bare, folder, normal

SPARSE = "cudnn.deepseek_sparse_attention"


def bare_packages(*names: str) -> None:
    """Makes the packages of these modules importable, without what wants libcudnn."""
    root = folder("cudnn")
    for name in ("cudnn", SPARSE, *(f"{SPARSE}.{name}" for name in names)):
        bare(name, root.joinpath(*name.split(".")[1:]))


def forward(*, h: int, d: int, sink: bool = False, s_q: int = 2, s_kv: int = 512, topk: int = 256) -> Case:
    """Queries [s_q, h, d] over the rows of kv [s_kv, d] that indices name, one of which is absent; V is the first 512
    columns."""
    import cutlass
    from cutlass.cute.runtime import make_fake_stream

    bare_packages("sparse_attention_forward", "utils")
    if h == 64:
        from cudnn.deepseek_sparse_attention.sparse_attention_forward import dsa_fwd_sm100_head64 as module

        kernel = module.SparseAttentionForwardSm100Head64(head_dim=d, indexer_topk=0)
    else:
        from cudnn.deepseek_sparse_attention.sparse_attention_forward import (
            dsa_fwd_sm100_head128_small_topk as module,
        )

        kernel = module.SparseAttentionForwardSm100Head128SmallTopKPrefill(d_qk=d, indexer_topk=0)
    rng = np.random.default_rng(3)
    q, kv = normal(s_q, h, d, scale=1 / 3), normal(s_kv, d, seed=2)
    indices = placed(np.stack([rng.permutation(s_kv)[:topk] for _ in range(s_q)]).astype(np.int32))
    indices[0, 7] = -1
    sinks = placed(rng.standard_normal(h).astype(np.float32))
    o = allocated((s_q, h, 512), ml_dtypes.bfloat16)
    maxima, lse = (allocated((s_q, h), np.float32) for _ in range(2))

    def given(x: Array, align: int = 16, divisor: int | None = None) -> object:
        made = tensor(x, leading=x.ndim - 1, align=align)
        if divisor is None:
            return made
        return made.mark_compact_shape_dynamic(mode=x.ndim - 1, stride_order=tuple(range(x.ndim)), divisibility=divisor)

    scale = d**-0.5
    visible = np.zeros((s_q, s_kv + 1), bool)
    np.put_along_axis(visible, np.where(indices < 0, s_kv, indices), True, 1)
    logits = np.einsum("qhd,kd->qhk", q.astype(np.float64), kv.astype(np.float64)) * scale
    logits = np.where(visible[:, None, :-1], logits, -np.inf)
    wanted_lse = np.logaddexp.reduce(logits, -1)
    total = np.logaddexp(wanted_lse, sinks.astype(np.float64)) if sink else wanted_lse
    wanted = np.exp(logits - total[..., None]) @ kv.astype(np.float64)[:, :512]
    arrays = {"q": (q, OPERAND), "kv": (kv, OPERAND), "indices": (indices, OPERAND)}
    arrays |= {"o": (o, RESULT), "maxima": (maxima, RESULT), "lse": (lse, RESULT)} | (
        {"sinks": (sinks, OPERAND)} if sink else {}
    )
    return Case(
        kernel,
        [
            *(given(q, divisor=d), given(kv, divisor=d), given(indices, 4), given(o, divisor=512)),
            *(given(maxima, 4), given(lse, 4), None, given(sinks, 4) if sink else None, None),
            *(cutlass.Float32(scale), make_fake_stream()),
        ],
        arrays,
        {"o": wanted, "lse": wanted_lse},
        8e-3,
        options="--opt-level 2",
    )


def indexer(*, h: int = 64, s: int = 128) -> Case:
    """Scores [1, s, s] of an indexer on Hopper: the sum over heads of relu(q k') w, for the keys so far; others keep
    what they had."""
    import cutlass
    from cutlass.cute.runtime import make_fake_stream

    bare_packages("indexer_forward", "utils", "utils.sm90")
    from cudnn.deepseek_sparse_attention.indexer_forward.indexer_fwd_sm90 import IndexerForwardSm90

    d = 128
    q, k, w = normal(1, s, h, d), normal(1, s, 1, d, seed=2), normal(1, s, h, seed=3)
    scores = allocated((1, s, s), np.float32)
    scores[...] = -np.inf
    products = np.einsum("bqhd,bkhd->bqkh", q.astype(np.float64), np.repeat(k.astype(np.float64), h, 2))
    wanted = d**-0.5 * np.einsum("bqkh,bqh->bqk", np.maximum(products, 0), w.astype(np.float64))
    wanted = np.where(np.tri(s, dtype=bool), wanted, -np.inf)
    kernel = IndexerForwardSm90(cutlass.BFloat16, cutlass.BFloat16, qhead_per_kvhead=h, ratio=1)
    return Case(
        kernel,
        [
            *(tensor(q, leading=3), tensor(k, leading=3), tensor(w, leading=2), None, None, tensor(scores, leading=2)),
            *(None, cutlass.Int32(1), cutlass.Int32(s), cutlass.Int32(s), cutlass.Float32(d**-0.5)),
            *(None, None, None, make_fake_stream()),
        ],
        {"q": (q, OPERAND), "k": (k, OPERAND), "w": (w, OPERAND), "scores": (scores, BOTH)},
        {"scores": wanted},
        1e-3,
    )
