"""FlashAttention 4: attention on Blackwell, MLA, gradients, and on Hopper FlashAttention 3's kernel in the DSL."""

from __future__ import annotations

import math
import os
from typing import Any

import ml_dtypes
import numpy as np

from ...cute.record import allocated, placed, tensor
from ...machine.state import Array
from . import BOTH, OPERAND, RESULT, Case, attention, normal
from . import causal as causal_mask

BF16 = ml_dtypes.bfloat16


def last(x: Array) -> Any:
    """A tensor whose last mode is contiguous."""
    return tensor(x, leading=x.ndim - 1)


def stream() -> dict[str, Any]:
    from cutlass.cute.runtime import make_fake_stream

    os.environ.setdefault("FLASH_ATTENTION_NUM_SMS", "148")
    os.environ.setdefault("FLASH_ATTENTION_ARCH", "sm_100")
    return {"stream": make_fake_stream()}


def of_attention(kernel: Any, s_q: int, s_kv: int, d: int, d_v: int, causal: bool, kwargs: dict[str, Any]) -> Case:
    q, k, v = normal(1, s_q, 1, d), normal(1, s_kv, 1, d, seed=2), normal(1, s_kv, 1, d_v, seed=3)
    o, lse = allocated((1, s_q, 1, d_v), BF16), allocated((1, 1, s_q), np.float32)
    scale = d**-0.5
    wanted_o, wanted_lse, _ = attention(q, k, v, scale, causal_mask(s_q, s_kv) if causal else None)
    arrays = {"q": (q, OPERAND), "k": (k, OPERAND), "v": (v, OPERAND), "o": (o, RESULT), "lse": (lse, RESULT)}
    args = [*map(last, (q, k, v, o, lse)), scale]
    return Case(kernel, args, arrays, {"o": wanted_o, "lse": wanted_lse}, 8e-3, kwargs=kwargs)


def forward(
    *,
    d: int,
    d_v: int | None = None,
    causal: bool = False,
    pair: bool = False,
    launch_control: bool = False,
    s_q: int = 256,
    s_kv: int = 256,
) -> Case:
    kwargs = stream()
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    kernel = FlashAttentionForwardSm100(
        d,
        d_v or d,
        qhead_per_kvhead=1,
        is_causal=causal,
        is_static_persistent=False,
        use_2cta_instrs=pair,
        use_clc_scheduler=launch_control,
    )
    return of_attention(kernel, s_q, s_kv, d, d_v or d, causal, kwargs)


def hopper(*, d: int, causal: bool = False) -> Case:
    kwargs = stream()
    import cutlass
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

    kernel = FlashAttentionForwardSm90(
        cutlass.BFloat16,
        d,
        d,
        1,
        is_causal=causal,
        is_local=False,
        pack_gqa=False,
        tile_m=128,
        tile_n=128,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=True,
        mma_pv_is_rs=True,
    )
    return of_attention(kernel, 256, 256, d, d, causal, kwargs)


def mla(*, one: bool = False, h: int = 1, s_q: int = 128, s_kv: int = 256, packed: bool = False, topk: int = 0) -> Case:
    kwargs = stream()
    d, d_v = 64, 512
    if one:
        from flash_attn.cute.flash_fwd_mla_1cta_sm100 import FlashAttentionMLAForward1CtaSm100 as Kernel
    else:
        from flash_attn.cute.flash_fwd_mla_sm100 import FlashAttentionMLAForwardSm100 as Kernel
    kernel = Kernel(
        is_causal=False,
        pack_gqa=packed,
        qhead_per_kvhead=h,
        nheads_kv=1,
        use_clc_scheduler=False,
        has_qk=True,
        is_topk_gather=bool(topk),
        topk_length=topk or 2048,
        use_cpasync_load_KV=bool(topk),
    )
    q, q_v = normal(1, s_q, h, d), normal(1, s_q, h, d_v, scale=0.25)
    k, v = normal(1, s_kv, 1, d, seed=2), normal(1, s_kv, 1, d_v, seed=3)
    o, lse = allocated((1, s_q, h, d_v), BF16), allocated((1, s_q, h), np.float32)
    scale = (d + d_v) ** -0.5
    arrays = {"q": (q, OPERAND), "qv": (q_v, OPERAND), "k": (k, OPERAND), "v": (v, OPERAND)}
    visible = None
    if topk:
        rng = np.random.default_rng(4)
        indices = placed(np.stack([rng.permutation(s_kv)[:topk] for _ in range(s_q)])[None].astype(np.int32))
        visible = np.zeros((s_q, s_kv), bool)
        np.put_along_axis(visible, indices[0], True, 1)
        arrays["indices"] = indices, OPERAND
        kwargs["mIndexTopk"] = last(indices)
    wanted_o, wanted_lse, _ = attention(np.concatenate([q, q_v], -1), np.concatenate([k, v], -1), v, scale, visible)
    return Case(
        kernel,
        [*map(last, (q, q_v, k, v, o, lse)), scale],
        arrays | {"o": (o, RESULT), "lse": (lse, RESULT)},
        {"o": wanted_o, "lse": wanted_lse.transpose(0, 2, 1)},
        8e-3,
        kwargs=kwargs,
    )


def backward(*, d: int, causal: bool = False, s: int = 256) -> Case:
    """dk and dv; what is summed into dq is in an order of the kernel's own, and is not compared."""
    kwargs = stream()
    from flash_attn.cute.flash_bwd_sm100 import FlashAttentionBackwardSm100

    q, k, v, do = (normal(1, s, 1, d, seed=n) for n in range(4))
    scale = d**-0.5
    o, lse, logits = attention(q, k, v, scale, causal_mask(s, s) if causal else None)
    p = np.exp(logits - lse[..., None])
    do64 = do.astype(np.float64)
    delta = np.einsum("bqhd,bqhd->bhq", o, do64)
    dp = np.einsum("bqhd,bkhd->bhqk", do64, v.astype(np.float64))
    ds = p * (dp - delta[..., None]) * scale
    wanted = {
        "dk": np.einsum("bhqk,bqhd->bkhd", ds, q.astype(np.float64)),
        "dv": np.einsum("bhqk,bqhd->bkhd", p, do64),
    }
    lse2, delta = (placed(x.astype(np.float32)) for x in (lse * math.log2(math.e), delta))
    dq, dk, dv = allocated((1, 1, s * d), np.float32), allocated(k.shape, BF16), allocated(v.shape, BF16)
    kernel = FlashAttentionBackwardSm100(d, d, is_causal=causal, use_2cta_instrs=False, cluster_size=1)
    arrays = {"q": q, "k": k, "v": v, "do": do, "lse": lse2, "delta": delta}
    return Case(
        kernel,
        [*map(last, (q, k, v, do, lse2, delta, dq, dk, dv)), scale],
        {name: (x, OPERAND) for name, x in arrays.items()} | {"dq": (dq, BOTH), "dk": (dk, RESULT), "dv": (dv, RESULT)},
        wanted,
        1e-2,
        kwargs=kwargs,
    )
