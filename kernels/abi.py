"""The ABI of kernels, as data: the parameters of each family's kernels. `kernels/calls.py` has the custom calls.

The build expects these parameters of a cubin, the C++ launcher fills them in by name, and the tests call them by name.
`kernels/tables.py` generates the C++ structs from here, and what Python knows of them. Nothing restates them.

A family is a class of variants. Its fields are the compile-time choices that a call must match; one that begins with
`max_` is a limit instead: a call gets the variant with the lowest limit that it keeps. A `Mode` says how an op of
attention computes, and an op in a mode has a custom call and a name of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from .packings import PACKED
from .params import TILING, Param, Params, each, gathers, keys, params_of_span, rows, source_blocks

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
    # "span" (an interval per query), "pages" (the same of keys in pages), "pages_e4m3" (of their codes), or
    # "selection" (a list of indices per query)
    "mha_fwd": ("span",),  # K and V separate
    "mha_fwd_paged": ("pages",),  # the same
    "mha_fwd_paged_e4m3": ("pages_e4m3",),
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


BLOCKS = ("blocks_of_entry", "first_block")
"""A launch that scores or chooses for some blocks of queries: how many a batch entry has, and the first one."""
INDEX_BLOCK = 8  # keys of a block that is chosen as a whole


@dataclass(frozen=True)
class IndexerScores(Variant):
    """The lightning indexer's scores: q, k, weights, a scale for each key, and which keys each query sees."""

    heads: int  # of q
    dtype: str  # of q and k; "float8_e4m3fn" has scales
    paged: bool = False  # keys are in pages, which a table names, followed by their scales
    blocks: bool = False  # it gives the greatest score of every INDEX_BLOCK keys, and not each score
    packing: str = ""  # "index_fp4": keys, in pages, have 4 bits; "" where they have q's dtype

    family = "indexer_scores"

    @property
    def scaled_pages(self) -> bool:
        return self.paged and (self.dtype == "float8_e4m3fn" or self.packing != "")

    @property
    def layout(self) -> str:
        return "_".join([self.family, *["paged"] * self.paged, *["scaled"] * self.scaled_pages])

    @property
    def params(self) -> Params:
        maps = {"q": 1, "k": 2, **({"k_scale": 2} if self.scaled_pages else {})}
        return (
            # [d, b * s_q * heads]; [d, s_c, b] or [d, page, pages]; [page, pages]
            *(Param(name, kind) for name, n in maps.items() for kind in ("map", f"extents{n}")),
            *each("address", "weights", "table" if self.paged else "k_scale", "start", "stop", "scores"),
            *each("int32", "s_q", "s_c", *BLOCKS, "blocks", "splits", "stride", "skip"),
            *(each("int32", "width", "page", "box") if self.paged else ()),
        )


@dataclass(frozen=True)
class IndexerScoresAt(Variant):
    """The indexer's scores at given entries, or in "indexer_scores_at_bwd" their gradients in q, k and weights."""

    heads: int  # of q
    dtype: str  # of q, k and dq; 8-bit operands have no gradient

    family = "indexer_scores_at"

    @property
    def layout(self) -> str:
        return self.op

    @property
    def params(self) -> Params:
        gradients = ("dq", "dk", "dweights") if self.op == "indexer_scores_at_bwd" else ()
        return (
            *each("address", "q", "k", "weights", "indices", "scores", *gradients),
            *each("int32", "s_q", "s_c", "topk"),
        )


@dataclass(frozen=True)
class IndexerScoresWithin(Variant):
    """The indexer's scores of the keys in listed blocks of INDEX_BLOCK keys."""

    heads: int  # of q
    dtype: str  # of q and k; "float8_e4m3fn" has scales
    paged: bool = False  # keys are in pages, which a table names, followed by their scales
    packing: str = ""  # as of `IndexerScores`

    family = "indexer_scores_within"

    @property
    def layout(self) -> str:
        return self.family + ("_paged" if self.paged else "_scaled" if self.dtype == "float8_e4m3fn" else "")

    @property
    def params(self) -> Params:
        scales = ["k_scale"] * (self.dtype == "float8_e4m3fn" and not self.paged)
        pages = (*each("address", "table"), *each("int32", "width", "pages", "page"))
        return (
            *each("address", "q", "k", "weights", *scales, "blocks", "start", "scores"),
            *each("int32", "s_q", "s_c", "first_query", "count", "splits", "from_start"),
            *(pages if self.paged else ()),
        )


@dataclass(frozen=True)
class TopK(Variant):
    """The greatest scores of every row, and their positions."""

    max_topk: int
    max_rows: int = ANY  # where they are few, several CTAs share a row

    family, layout = "topk", "topk"

    @property
    def params(self) -> Params:
        return (
            *each("address", "scores", "start", "stop", "indices", "values"),
            *each("int32", "s_q", "queries", *BLOCKS, "stride", "topk", "wants_values"),
        )


@dataclass(frozen=True)
class Probabilities(Variant):
    """Attention's probabilities at selected keys, summed over heads: q, keys, lse with the sink, indices."""

    d: int
    dtype: str  # of q and the keys

    family, layout = "probabilities", "probabilities"

    @property
    def params(self) -> Params:
        return (
            *each("address", "q", "k", "lse", "indices", "p"),
            *each("float32", "scale"),
            *each("int32", "queries", "s_q", "h_q", "s_kv", "topk"),
        )


@dataclass(frozen=True)
class Rope(Variant):
    """RoPE of rows' last numbers, in place, by a table of cos and sin for each token; "rope_hadamard": and then the
    Hadamard transform of rows of 128.
    """

    dims: int  # numbers of a row that are rotated
    dtype: str  # of the rows

    family, layout = "rope", "rope"

    @property
    def params(self) -> Params:
        return (*each("address", "x", "table"), *each("int32", "rows", "heads", "d"), *each("float32", "direction"))


@dataclass(frozen=True)
class NormRope(Variant):
    """The norm of rows and then their RoPE, or in "norm_rope_bwd" the gradient of both."""

    d: int  # numbers of a row
    dims: int  # the last of them, which are rotated
    dtype: str  # of the rows

    family, layout = "norm_rope", "norm_rope"

    @property
    def params(self) -> Params:
        return (*each("address", "x", "table", "dy", "y"), *each("int32", "rows", "heads"), *each("float32", "eps"))


@dataclass(frozen=True)
class IndexQuery(Variant):
    """RoPE of an indexer's queries, then the Hadamard transform, then e4m3 with a scale for each row."""

    dims: int  # numbers of a row that are rotated
    dtype: str  # of the rows

    family, layout = "index_query", "index_query"

    @property
    def params(self) -> Params:
        return (*each("address", "x", "table", "codes", "scales"), *each("int32", "rows", "heads"))


POOL = ("width", "room", "page", "pages", "stride")
"""of a cache: pages and entries of a sequence; entries of a page, 0 without a block table; pages of the pool; without a
block table, slots from one sequence to the next
"""


@dataclass(frozen=True)
class FewRowsProduct(Variant):
    """A product of few rows with a matrix. In "few_rows_product_norm_rope" its columns are query heads, which then get
    their norm and RoPE; in "few_rows_product_index_query" those of an indexer, which get RoPE, the Hadamard transform
    and their weights; in "few_rows_product_of_turned" the rows are heads, whose RoPE is first turned back.
    """

    dtype: str  # of x, w and y
    to_float32: bool = False  # y, instead
    parts: int = 1  # into which k is cut, whose sums are added in turn
    to_fp8: bool = False  # y, instead, with a scale for each row in its weight
    weights: str = ""  # how w is packed; "" where it is not
    max_rows: int = ANY  # that it takes

    family = "few_rows_product"

    @property
    def norms(self) -> bool:
        return self.op == "few_rows_product_norm_rope"

    @property
    def indexes(self) -> bool:
        return self.op == "few_rows_product_index_query"

    @property
    def turns_back(self) -> bool:
        return self.op == "few_rows_product_of_turned"

    @property
    def layout(self) -> str:
        return self.op + "_of_packed" * bool(self.weights)

    @property
    def params(self) -> Params:
        mapped = ("x",) if self.weights else ("x", "w")
        maps = tuple(Param(name, kind) for name in mapped for kind in ("map", "extents3"))
        maps += each("address", *{"x", "w"}.difference(mapped))
        if self.turns_back:
            how = each("address", "table")
        elif self.norms or self.indexes:  # x may be left to be normed, by sums of its squares
            how = each("address", "table") + each("float32", "eps")
            how += each("address", "squares") + each("int32", "square_tiles")
        else:  # the first columns may be a low-rank query, left to be normed
            how = each("address", "gain", "low", "squares") + each("int32", "low_columns")
        if self.indexes:
            how += each("address", "given", "weights") + each("int32", "columns", "column") + each("float32", "scale")
        return (*maps, *each("address", "y"), *how, *each("int32", "rows", "k", "n", "groups"))


@dataclass(frozen=True)
class UnpackMatrix(Variant):
    """A matrix in FP8, or several, as an array in bfloat16."""

    family, layout = "unpack_matrix", "unpack_matrix"

    @property
    def params(self) -> Params:
        return (*each("address", "data", "w"), *each("int32", "matrices", "rows", "columns", "tiles", "slabs"))


@dataclass(frozen=True)
class KvInsert(Variant):
    """New entries of a cache: rows, or blocks of rows that are pooled, and then their norm, RoPE, and the Hadamard
    transform. They are rounded or packed, and written where they belong.
    """

    d: int  # numbers of an entry that the norm covers
    dtype: str  # of the numbers, and of a cache that is not packed
    packing: str = ""  # of `packings.CACHED`; "" where the cache is not packed
    pooled: bool = False
    hadamard: bool = False
    running: bool = False  # whether pooled tokens leave sums behind, so that a few of them are kept
    rope: bool = False  # whether RoPE's numbers follow those, without a norm; else they are the last of them

    family, layout = "kv_insert", "kv_insert"

    @property
    def params(self) -> Params:
        return (
            *each(
                "address", "rows", "ape", "norm", "table", "bounds", "block_table", "state", "sums", "folded", "cache"
            ),
            *each("int32", "b", "s", "n", "width", "columns", "column", "has_ape", "n_bounds", "ratio", "ring"),
            *each("int32", "pages", "page", "page_bytes", "table_width"),
            *each("float32", "eps"),
        )


@dataclass(frozen=True)
class SeenSlots(Variant):
    """The slots of its caches that each query of a step sees."""

    family, layout = "seen_slots", "seen_slots"

    @property
    def params(self) -> Params:
        return (
            *each("address", "lengths", "position", "indices", "topk_length"),
            *each("address", "near", "near_length", "far", "far_length"),
            *each("address", "window_table"),
            *each("int32", *(f"window_{name}" for name in POOL)),
            *each("address", "table"),
            *each("int32", *POOL, "b", "s_q", "window", "ratio", "has_position", "has_length", "n_far", "topk"),
        )


@dataclass(frozen=True)
class KeyCodes(Variant):
    """Keys for products of e4m3, each in a unit of its own."""

    dtype: str  # of keys that are not packed
    packing: str = ""  # of `packings.PACKED`
    rope: bool = False  # whether RoPE's numbers follow a key's codes, in bfloat16

    family, layout = "key_codes", "key_codes"

    @property
    def params(self) -> Params:
        arrays = each("address", "keys", "slots", "codes")
        return (*arrays, *each("int32", "b", "n", "page", "page_bytes"))


MOST_GROUPS = 1024
"""of `GroupRows`, a thread each"""


MOST_ROUTED, MOST_CHOSEN, MOST_PARTS = 512, 32, 3
"""experts of a router, in multiples of 4, those of a token, and numbers that a logit is the sum of"""


@dataclass(frozen=True)
class Route(Variant):
    """The experts of each row, by its logits or from a table, and their weights."""

    family, layout = "route", "route"

    @property
    def params(self) -> Params:
        return (
            *each("address", "logits", "bias", "table", "tokens", "weights", "chosen"),
            *each("int32", "rows", "parts", "experts", "n_chosen", "vocabulary", "is_sigmoid"),
            *each("float32", "unit", "scale"),
        )


@dataclass(frozen=True)
class GroupRows(Variant):
    """Rows by group, and the tiles that they make up."""

    family, layout = "group_rows", "group_rows"

    @property
    def params(self) -> Params:
        made = ("list", "weights", "places", "tiles", "count")
        return (*each("address", "group", "chosen_weight", *made), *each("int32", "rows", "groups", "tile"))


FEW_ROWS, MANY_ROWS = 16, 128
"""of a group that make a tile: in a step, whose time is that of reading matrices, and in a prompt"""


@dataclass(frozen=True)
class GroupedProduct(Variant):
    """Products of rows, sorted by group, with their group's matrix; gated: pairs of channels become one."""

    dtype: str  # of x and y
    weights: str  # what matrices are in
    gated: bool = False
    max_rows: int = ANY  # of a group, about

    family, layout = "grouped_product", "grouped_product"

    @property
    def params(self) -> Params:
        return (
            *each("address", "x", "w", "factor", "y", "list", "weights", "tiles", "count"),
            *each("float32", "limit"),
            *each("int32", "k", "n", "slabs", "tiles_of_matrix", "per_row"),
        )


@dataclass(frozen=True)
class ExpertProduct(Variant):
    """Products of rows by group, as training has them. form: "rows", of rows with their group's matrix [n, k];
    "gated", the same, then SwiGLU; "turned", with a matrix [k, n]; "gated_back", the same, then SwiGLU's gradient;
    "outer", of all rows of a group with one another, the gradient of its matrix.
    """

    dtype: str  # of all arrays
    form: str

    family = "expert_product"

    @property
    def layout(self) -> str:
        gates = f"_{self.form}" if self.form in ("gated", "gated_back") else ""
        return "expert_outer_product" if self.form == "outer" else f"expert_product{gates}"

    @property
    def params(self) -> Params:
        is_outer = self.form == "outer"
        maps = (("a", "map"), ("a", "extents2"), ("b", "map"), ("b", "extents2" if is_outer else "extents3"))
        where = ("first", "sizes") if is_outer else ("list", "tiles", "count")
        gates = {"gated": ("inner", "weights"), "gated_back": ("inner", "weights", "made", "of_weights")}
        of_gates = gates.get(self.form, ())
        return (
            *(Param(name, kind) for name, kind in maps),
            *each("address", "y", *where, *of_gates),
            *each("float32", *["limit"] * bool(of_gates)),
            *each("int32", "m", "n", "groups"),
        )


@dataclass(frozen=True)
class ExpertRows(Variant):
    """Rows of experts here. form: "taken", those of tokens by expert; "summed", over a token's experts."""

    dtype: str  # of rows
    form: str

    family, layout = "expert_rows", "expert_rows"

    @property
    def params(self) -> Params:
        return (
            *each("address", "x", "which", "count", "y"),
            *each("int32", "rows", "choices", "k", "experts"),
        )


@dataclass(frozen=True)
class HyperConnection(Variant):
    """Streams between two sublayers: those after the first, and what the second is given."""

    hidden: int  # channels of a stream
    dtype: str  # of streams

    family, layout = "hyper_connection", "hyper_connection"

    @property
    def params(self) -> Params:
        given = ("x", "y", "post", "mix", "taken", "fn", "scale", "base", "norm")
        return (
            *each("address", *given, "new_x", "z", "new_pre", "new_post", "new_mix", "totals", "squares"),
            *each("int32", "tokens", "has_taken", "iterations"),
            *each("float32", "eps", "hc_eps"),
        )


@dataclass(frozen=True)
class HyperConnectionBackward(Variant):
    """The gradient of that. part: "numbers" makes what it needs to know of each token, then "streams" all else."""

    hidden: int  # channels of a stream
    dtype: str  # of streams
    part: str

    family = "hyper_connection_bwd"

    @property
    def layout(self) -> str:
        return f"hyper_connection_bwd_{self.part}"

    @property
    def params(self) -> Params:
        if self.part == "streams":
            return (
                *each("address", "x", "y", "post", "mix", "fn", "scale", "norm", "dnew_x", "dz", "numbers"),
                *each("address", "dx", "dy", "shares", "dnorm"),
                *each("int32", "tokens"),
            )
        return (
            *each("address", "new_x", "dz", "norm", "totals", "squares", "scale", "base", "taken"),
            *each("address", "dnew_pre", "dnew_post", "dnew_mix", "numbers", "dtaken"),
            *each("int32", "tokens", "has_taken", "iterations"),
            *each("float32", "eps", "hc_eps"),
        )


@dataclass(frozen=True)
class AllReduce(Variant):
    """The sum of an array over the devices of a process, each of which writes into the memory of the others."""

    dtype: str  # of x and y

    family, layout = "all_reduce", "all_reduce"

    @property
    def params(self) -> Params:
        return (
            *each("address", "x", "y", "inbox", "messages", "outboxes"),
            *each("int32", "device", "devices", "lines"),
        )


FAMILIES: tuple[type[Variant], ...] = (
    *(Forward, Combine, RowScores, RowColumns, MlaBackward, TileSpans, MhaBackward),
    *(IndexerScores, IndexerScoresAt, IndexerScoresWithin, TopK, Probabilities),
    *(Rope, NormRope, IndexQuery, FewRowsProduct, UnpackMatrix, KvInsert, SeenSlots, KeyCodes, Route, GroupRows),
    *(GroupedProduct, ExpertProduct, ExpertRows, HyperConnection, HyperConnectionBackward, AllReduce),
)


def layouts(variants: Iterable[Variant]) -> dict[str, Variant]:
    """For every layout one variant that has it."""
    found: dict[str, Variant] = {}
    for variant in variants:
        assert found.setdefault(variant.layout, variant).params == variant.params, variant.layout
    return found
