"""Products of a layer's few rows, matrices that are unpacked for many, and sums over devices."""

from dataclasses import dataclass

from ..params import Param, Params, each
from .variant import ANY, Variant


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
