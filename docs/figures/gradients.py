"""Backward kernels."""

from collections.abc import Callable
from typing import Any

from .records import (
    GRAD,
    NOTED,
    SMS,
    bullets,
    has_own_values,
    launched,
    micro,
    of_peer,
    ours,
    percent,
    rate,
    row_of,
    seconds,
    share,
    suite,
    table,
)


def _both(row: dict[str, Any]) -> str:
    """Both passes of cuDNN and of FlashAttention 3 beside ours."""
    both, *theirs = (row["times"].get(name) for name in ("both", "both by cudnn", "both by flash_attention_3"))
    return " / ".join(f"{x['seconds'] / both['seconds']:.2f}" if x else "–" for x in theirs)


def _deterministic(row: dict[str, Any]) -> str:
    """How many times as long the gradient with the same bits on every run takes, where it has other kernels."""
    return f"{seconds(row, 'deterministic') / ours(row):.2f}" if "deterministic" in row["times"] else "the same"


def gradients(dims: tuple[int, ...], peer: str, beside: Callable[[dict[str, Any]], str]) -> str:
    """Both passes are forward and backward; the other columns are the backward pass alone."""
    rows = []
    for row in suite(GRAD, "grad"):
        if row["case"]["d"] in dims and not has_own_values([row["name"]]):
            name = row["name"].removeprefix("gradient of ")
            both = micro(row["times"]["both"]["seconds"])
            rows.append([name, micro(ours(row)), rate(row), share(row), both, beside(row), _deterministic(row)])
    header = f"gradient | µs | TFLOP/s | of the roofline | both passes, µs | {peer} | deterministic / default"
    return table(header, rows)


def mla_backward() -> str:
    return gradients((512,), "XLA / ours", lambda row: of_peer(row, "xla"))


def mha_backward() -> str:
    return gradients((64, 128, 256), "cuDNN, FlashAttention 3 / ours, both", _both)


def mla_backward_bound() -> str:
    """The bytes that a tile of 64 rows and 64 keys adds, 128 KiB, leave an SM in the time that the tile takes."""
    row = row_of(GRAD, "gradient of d 512 window 128 + top-k 1024 of 8192 b1 s4096 h128")
    few = row_of(GRAD, "gradient of d 512 window 128 + top-k 512 of 8192 b1 s4096 h16")
    far = row_of(GRAD, "gradient of d 512 window 128 + top-k 512 of 65536 b1 s4096 h64")
    tiles = row["case"]["s_q"] * row["case"]["h_q"] // 64 * (row["case"]["window"] + row["case"]["topk"]) // 64
    seconds = launched(row)[0]
    tile = seconds * SMS / tiles
    added = few["case"]["s_q"] * (few["case"]["window"] + few["case"]["topk"]) * 512 * 4
    l2, far_alone = NOTED["additions"]["bytes a second that L2 adds"], NOTED["far additions"]
    return bullets(f"""- **128 heads**, a window and 1024 of 8192 keys: {seconds * 1e3:.2f} ms for {tiles:,} tiles, {tile * 1e6:.1f} µs a tile on an SM.
  Products take {percent(row["flops"] / row["matmul_flops_per_s"] / seconds)} of that time.
  The bound is what leaves an SM: {128 * 1024 / tile / 1e9:.0f} bytes a ns, reductions and `st.async` to the peer together.
- **Far keys**: 65536 keys of dkv do not fit into L2, so each reduction is a read and a write of HBM.
  The gradient at 64 heads then reaches {share(far)} of the roofline. On an {far_alone["device"]} reductions alone take
  {far_alone["alone, ms"]:.2f} of the kernel's {far_alone["kernel, ms"]:.2f} ms.
- **16 heads**: the reductions are {added / 1e9:.1f} GB. L2 adds {l2 / 1e12:.1f} TB a second, which gives {added / l2 * 1e3:.2f} ms.
  The kernel takes {launched(few)[0] * 1e3:.2f} ms.
- **Beside the kernel**, XLA makes rowsum(o ∘ do), clears dkv and rounds it: {(ours(row) - seconds) * 1e3:.2f} ms at 128 heads.""")


def mha_backward_bound() -> str:
    lines = []
    for name in ("d 128 causal b2 s8192 h16", "d 64 causal b4 s8192 h16"):
        row = row_of(GRAD, f"gradient of {name}")
        reached = row["flops"] / launched(row)[0]
        of_m = percent(reached / row["matmul_flops_per_s"])
        lines.append(f"`mha_dqdkdv` makes its products at {reached / 1e12:.0f} TFLOP/s, {of_m} of M.")
    narrow = row_of(GRAD, "gradient of d 128 window 128 b2 s8192 h16/1")
    dkdv, dq, rowsum, *_ = launched(narrow)
    return bullets(f"""- **d 128, causal**: {lines[0]}
- **d 64, causal**: {lines[1]} Exponentials and shifts take as long as products.
- **d 128, window**: `mha_dkdv` takes {micro(dkdv)} µs, `mha_dq` {micro(dq)} µs, and XLA's rowsum(o ∘ do) {micro(rowsum)} µs.
  Each CTA of `mha_dkdv` has 64 tiles of rows. S and dP of 64 rows read 128 bytes a clock of SMEM, all that it has.""")
