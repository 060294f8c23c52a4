"""The kernels of a layer's experts."""

from dataclasses import dataclass

from ..params import Param, Params, each
from .variant import ANY, Variant

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
