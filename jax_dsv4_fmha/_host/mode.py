"""The ways in which attention's kernels compute, the plain one and others; `kernels/abi` has the same."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """A choice of each kind. Some ops have kernels in some modes."""

    rotary: bool = False
    """q comes before the norm of its heads and RoPE, and o leaves after RoPE back"""
    precision: str = ""
    """of products: "e4m3", or "e4m3_bf16_rope", where scores take RoPE's dimensions in bfloat16"""
    order: str = ""
    """"few_heads" or "by_columns": a kernel, or two, that have the canonical order of sums alone"""
    bounds: bool = False
    """a gradient's bounds, from which its fixed point follows, and not the gradient"""
    d_v: int = 0
    """how many of a key's numbers, the first ones, are its value; 0: all"""


PLAIN, ROTARY, BOUNDS = Mode(), Mode(rotary=True), Mode(bounds=True)
FEW_HEADS, BY_COLUMNS = Mode(order="few_heads"), Mode(order="by_columns")


def name_of(op: str, mode: Mode = PLAIN) -> str:
    """The name of an op in a mode: of its custom call, and of its kernels in the manifest."""
    op = op.replace("_bwd", "_bounds") if mode.bounds else op
    values = f"v{mode.d_v}" if mode.d_v else ""
    return "_".join(filter(None, [op, "turned" * mode.rotary, mode.precision, mode.order, values]))
