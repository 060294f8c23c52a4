"""Kernels that take rows one by one: RoPE, norms, entries of caches, streams between sublayers."""

from dataclasses import dataclass

from ..params import Params, each
from .variant import Variant


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
