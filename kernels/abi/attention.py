"""The kernels of attention and of its gradients."""

from dataclasses import dataclass

from ..packings import PACKED
from ..params import TILING, Param, Params, each, gathers, keys, params_of_span, rows, source_blocks
from .variant import ANY, FEW_HEADS, Variant


@dataclass(frozen=True)
class Forward(Variant):
    """Attention: q, keys from one or more sources, a sink, a scale; o and lse."""

    d: int  # head dimension of q and keys, and of values unless the mode says another
    dtype: str  # "bfloat16" or "float16": q and o, and k and v unless they are packed
    packing: str = ""  # of `PACKED_SOURCES`: how the keys are packed; "" where they are not
    max_heads: int = ANY  # of q that it takes

    family = "forward"

    @property
    def sources(self) -> tuple[str, ...]:
        return PACKED_SOURCES[self.packing] if self.packing else FORWARD_OPS[self.op]

    @property
    def shared_kv(self) -> bool:
        """True if one array is both K and V."""
        return not self.op.startswith("mha_fwd")

    @property
    def gathers(self) -> bool:
        return gathers(self.sources) or self.mode.is_e4m3 or self.shares_tiles

    @property
    def splits(self) -> bool:
        return (self.arch == "sm_90a" or self.shared_kv) and not self.mode.is_e4m3 and not self.shares_tiles

    @property
    def shares_tiles(self) -> bool:
        """True if tiles of rows, with heads of one query each, share tiles of keys, which TMA loads."""
        return self.mode == FEW_HEADS

    @property
    def turns(self) -> bool:
        """True if the kernel norms q, turns it by RoPE, and turns o back."""
        return self.mode.rotary

    @property
    def d_v(self) -> int:
        """The head dimension of values and of o."""
        return self.mode.d_v or self.d

    @property
    def gathers_by_tma(self) -> bool:
        """True if TMA loads all keys that are not packed."""
        return self.shared_kv and self.arch == "sm_100f"

    @property
    def moves_rows(self) -> bool:
        """True if threads load q and store o, and TMA does not."""
        return self.gathers_by_tma or self.mode.is_e4m3

    @property
    def moves_o(self) -> bool:
        """True if threads store o; where keys go on after values, SMEM has room for that of few heads alone."""
        return self.moves_rows or not self.shared_kv or (self.d_v < self.d and self.max_heads >= 64)

    @property
    def layout(self) -> str:
        kinds = ("packed" if kind in PACKED else kind for kind in self.sources)
        traits = {"shared_kv": self.shared_kv, "rows": self.moves_rows, "turned": self.turns, "e4m3": self.mode.is_e4m3}
        traits |= {
            "cut": self.cuts_both,
            "shared_tiles": self.shares_tiles,
            "moved": self.moves_o and self.shared_kv and not self.moves_rows,
        }
        return "_".join([self.family, *kinds, *(name for name, has in traits.items() if has)])

    @property
    def cuts_both(self) -> bool:
        """True if TMA loads keys and values, which are apart, in tiles that are cut."""
        return not self.shared_kv and self.d > 256

    @property
    def params_of_keys(self) -> Params:
        if self.cuts_both:
            return (*keys("cut_k", "cut_v", source=0), *params_of_span(0))
        if self.shares_tiles:
            return (*keys("cut_k", source=0), *params_of_span(0))
        return source_blocks(self.sources, self.shared_kv, self.gathers_by_tma, self.gathers)

    @property
    def params(self) -> Params:
        by_tma = {"q": not self.moves_rows, "o": not self.moves_o}
        return (
            *(x for name, maps in by_tma.items() for x in (rows(name) if maps else each("address", name))),
            *self.params_of_keys,
            *each("address", "sink", "lse", "o_parts"),
            *each("float32", "scale_log2"),
            *each("address", *["table"] * self.turns),
            *each("float32", *["eps"] * self.turns),
            *TILING,
        )


FORWARD_OPS = {  # the sources of keys of each op, in the order in which they are walked:
    # "span" (an interval per query), "pages" (the same of keys in pages), "pages_e4m3" (of their codes),
    # "pages_window" and "pages_e4m3_window" (of a query a sequence, which sees a window), or "selection" (a list of
    # indices per query)
    "mha_fwd": ("span",),  # K and V separate
    "mha_fwd_paged": ("pages",),  # the same
    "mha_fwd_paged_e4m3": ("pages_e4m3",),
    "mha_fwd_paged_window": ("pages_window",),
    "mha_fwd_paged_e4m3_window": ("pages_e4m3_window",),
    "mla_span_fwd": ("span",),
    "mla_sparse_fwd": ("selection",),
    "csa_fwd": ("span", "selection"),  # CSA layers: the window, then the top-k
    "hca_fwd": ("span", "span"),  # HCA layers: the window, then all compressed entries that are visible
    "dsv4_decode": ("selection", "selection"),  # the window's and the top-k's entries of pools
}

PACKED_SOURCES = {  # by the choice `packing` of ops: selections of keys that are packed as in `PACKED`
    "v4_fp8": ("v4_fp8", "v4_fp8"),
    "v4_fp4": ("v4_fp8", "v4_fp4"),
    "v41_fp8": ("v41_fp8", "v41_fp8"),
    "v41_fp4": ("v41_fp8", "v41_fp4"),
    "v32_fp8": ("v32_fp8",),
}
PACKINGS_OF_V4 = tuple(packing for packing, sources in PACKED_SOURCES.items() if len(sources) == 2)
"""of `dsv4_decode`: of its window's entries and the others"""

LEFT_BY_SCORES = (*each("address", "scores", "tops", "counts"), *each("int32", "tiles"))


@dataclass(frozen=True)
class RowScores(Variant):
    """Attention to few queries by two kernels, which share out keys and then columns: the first of them, which leaves
    scores of all keys that a query sees, and these keys.
    """

    d: int
    dtype: str  # of q, and of the keys unless they are packed
    packing: str = ""  # of `PACKED_SOURCES`

    family = "row_scores"

    @property
    def sources(self) -> tuple[str, ...]:
        return PACKED_SOURCES[self.packing] if self.packing else FORWARD_OPS[self.op]

    @property
    def gathers(self) -> bool:
        return True

    @property
    def layout(self) -> str:
        return "_".join([self.family, *("packed" if kind in PACKED else kind for kind in self.sources)])

    @property
    def params(self) -> Params:
        keys_of = source_blocks(self.sources, shared_kv=True, all_by_tma=False)
        return (*rows("q"), *keys_of, *LEFT_BY_SCORES, *each("address", "gathered"), *TILING)


@dataclass(frozen=True)
class RowColumns(Variant):
    """The second one: o and lse, from scores and keys."""

    d: int
    dtype: str  # of o and the keys

    family, layout = "row_columns", "row_columns"

    @property
    def gathers(self) -> bool:
        return True

    @property
    def params(self) -> Params:
        keys_of = tuple(Param("gathered", kind) for kind in ("map", "extents3"))
        results = (*each("address", "o", "sink", "lse"), *each("float32", "scale_log2"))
        return (*keys_of, *LEFT_BY_SCORES, *results, *TILING)


@dataclass(frozen=True)
class MlaBackward(Variant):
    """The gradient of attention: q, dout, the softmax's numbers of each row, keys from one or more sources; dq, and
    dkv.
    """

    d: int
    dtype: str  # of q, dout, dq and the keys; dkv is float32, or 32-bit fixed point
    deterministic: bool = False  # sums of dkv in fixed point, independent of order
    max_heads: int = ANY  # of q that it takes

    family = "mla_backward"

    @property
    def sources(self) -> tuple[str, ...]:
        return BACKWARD_OPS[self.op]

    @property
    def gathers(self) -> bool:
        return gathers(self.sources)

    @property
    def d_v(self) -> int:
        """The head dimension of values and of dout."""
        return self.mode.d_v or self.d

    @property
    def turns(self) -> bool:
        """True if the kernel norms q and turns it by RoPE, turns dout, and makes dq through both."""
        return self.mode.rotary

    @property
    def bounds(self) -> bool:
        """True if it makes bounds of keys' gradients, which the units of fixed point follow from, and no gradients."""
        return self.mode.bounds

    @property
    def layout(self) -> str:
        return "_".join([self.family, *self.sources, *["turned"] * self.turns, *["bounds"] * self.bounds])

    @property
    def params(self) -> Params:
        params = each("address", "q", "dout", *["dq"] * (not self.bounds), "lse", "sink_factor", "delta", "resolution")
        params += each("float32", "scale")
        if self.bounds:
            params += each("address", "table")
        if self.turns:
            params += each("address", "table") + each("float32", "eps") + each("int32", "dout_heads", "dout_queries")
        for i, kind in enumerate(self.sources):
            seen = ("start", "stop") if kind == "span" else ("indices", "length")
            params += each("address", "k", "dkv", *seen, source=i) + each("int32", "s_kv", "s_batch", "topk", source=i)
        return params + TILING


BACKWARD_OPS = {  # the sources of keys of each op, as those of `FORWARD_OPS`
    "mla_span_bwd": ("span",),
    "mla_sparse_bwd": ("selection",),
    "csa_bwd": ("span", "selection"),
    "hca_bwd": ("span", "span"),
}


@dataclass(frozen=True)
class TileSpans(Variant):
    """Which keys each tile of rows sees, for `MhaBackward`'s kernel of keys."""

    family, layout = "tile_spans", "tile_spans"

    @property
    def params(self) -> Params:
        return (*each("address", "start", "stop", "seen"), *TILING)


@dataclass(frozen=True)
class MhaBackward(Variant):
    """The gradient of attention over one span, K and V apart or one array: by two ops or by one."""

    d: int
    dtype: str  # of q, dout, k, v and all gradients

    family = "mha_backward"

    @property
    def layout(self) -> str:
        return self.op

    @property
    def params(self) -> Params:
        return (
            *rows("q", "dout"),
            *(Param(name, kind) for name in ("k", "v") for kind in ("map", "extents3")),
            *each("address", "lse", "sink_factor", "delta", "start", "stop"),
            *MHA_BACKWARD_OPS[self.op],
            *each("int32", "s_kv"),
            *each("float32", "scale"),
            *TILING,
        )


MHA_BACKWARD_OPS: dict[str, Params] = {  # what each is handed that the other is not
    "mha_dkdv": (*each("address", "seen", "dk", "dv"), *each("int32", "shared_kv")),
    "mha_dqdkdv": (*each("address", "seen", "dk", "dv", "sums"), *each("int32", "shared_kv")),
    "mha_dq": each("address", "dq"),
}


@dataclass(frozen=True)
class Combine(Variant):
    """Merges the partial results of a forward kernel's splits, with the sink: o and lse."""

    dtype: str  # of o

    family, layout = "combine", "combine"

    @property
    def params(self) -> Params:
        return (
            *each("address", "o_parts", "lse_parts", "o", "sink", "lse"),
            *each("int32", "rows", "h_q", "d", "splits"),
        )
