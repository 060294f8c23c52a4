"""The kernels of the lightning indexer, and of its teacher."""

from dataclasses import dataclass

from ..params import Param, Params, each
from .variant import ANY, Variant

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
