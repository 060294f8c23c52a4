"""A variant of a kernel, and the modes of attention."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ..params import Params

ANY = 2**31 - 1  # a limit that does not limit


@dataclass(frozen=True)
class Mode:
    """A way of computing an op of attention, by default the plain one; `jax_dsv4_fmha/_host/mode.py` has the same."""

    rotary: bool = False  # q comes before the norm of its heads and RoPE, and o leaves after RoPE back
    precision: str = ""  # of products: one of `FP8`
    order: str = ""  # "few_heads" or "by_columns": a kernel that has the canonical order of sums alone
    bounds: bool = False  # a gradient's bounds, from which its fixed point follows, and not the gradient
    d_v: int = 0  # how many of a key's numbers, the first ones, are its value; 0: all

    @property
    def is_e4m3(self) -> bool:
        """True if products are of e4m3, and so are keys."""
        return self.precision != ""

    @property
    def keeps_rope(self) -> bool:
        """True if RoPE's part of scores is of bfloat16, and other products of e4m3."""
        return self.precision == BF16_ROPE


PLAIN, ROTARY = Mode(), Mode(rotary=True)
FEW_HEADS, BY_COLUMNS = Mode(order="few_heads"), Mode(order="by_columns")
BF16_ROPE = "e4m3_bf16_rope"  # scores take RoPE's dimensions, the last ones, by products of bfloat16
FIRST_512 = Mode(d_v=512)  # of latents that end with RoPE's numbers, which are no values
BOUNDS, BOUNDS_OF_576 = Mode(bounds=True), Mode(bounds=True, d_v=512)
FP8 = ("e4m3", BF16_ROPE)  # precisions with keys as codes of e4m3, each in a unit of its own
UNIT_BYTES = 16  # at the end of such a key, of which the first two are its unit, a power of two in bfloat16


def name_of(op: str, mode: Mode = PLAIN) -> str:
    """The name of an op in a mode: of its custom call, and of its kernels."""
    op = op.replace("_bwd", "_bounds") if mode.bounds else op
    values = f"v{mode.d_v}" if mode.d_v else ""
    return "_".join(filter(None, [op, "turned" * mode.rotary, mode.precision, mode.order, values]))


@dataclass(frozen=True)
class Variant:
    """One cubin: an op for one architecture with its compile-time choices.  Everything else is decided at run time."""

    op: str
    arch: str  # "sm_90a" or "sm_100f"
    module: str  # the module with `compile(variant, out_dir)`
    mode: Mode = field(default=PLAIN, kw_only=True)  # of attention

    family: ClassVar[str]

    @property
    def name(self) -> str:
        """The name by which a call finds it."""
        return name_of(self.op, self.mode)

    @property
    def key(self) -> str:
        """A name that is unique among the variants and fit for files and C symbols."""
        return "_".join([self.name, self.arch, *filter(None, map(_word, self.choices.items()))])

    @property
    def choices(self) -> dict[str, Any]:
        """The choices by which a call finds it, besides name and architecture."""
        return {f.name: getattr(self, f.name) for f in fields(self)[len(fields(Variant)) :]}

    @property
    def identity(self) -> str:
        """The facts, in words, that decide its code besides sources and compilers: the build's digest hashes them."""
        facts = {"op": self.name, "arch": self.arch, "module": self.module, **self.choices}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in facts.items())})"

    @property
    def layout(self) -> str:
        """A name for its parameters, which variants share."""
        raise NotImplementedError

    @property
    def params(self) -> Params:
        """The parameters of its kernel, in order."""
        raise NotImplementedError

    @property
    def gathers(self) -> bool:
        return False

    @property
    def splits(self) -> bool:
        """True if the keys of a tile of rows may be split over CTAs."""
        return False

    @property
    def evidence(self) -> str:
        """The evidence that it is right, in words: it has run on hardware, or it has not."""
        return EVIDENCE[self.arch]


def _word(choice: tuple[str, Any]) -> str:
    """A choice within a key."""
    name, value = choice
    if isinstance(value, bool):
        return name * value
    if name.startswith("max_"):
        return "" if value == ANY else f"{name[4]}{value}"
    return f"{name}{value}" if isinstance(value, int) else str(value)


NOT_RUN = "compiled, interpreted, not run on hardware"
EVIDENCE = {"sm_90a": "run on hardware", "sm_100f": NOT_RUN}
