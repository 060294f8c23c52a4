"""The parameters of kernels, by name and kind, and those that kernels of attention share."""

from dataclasses import dataclass

from .packings import PACKED

KINDS = {  # bytes of a parameter
    "map": 128,  # a TMA descriptor of an array, then the array's dynamic extents
    "extents1": 1 * 4,
    "extents2": 2 * 4,
    "extents3": 3 * 4,
    "extents4": 4 * 4,
    "address": 8,
    "int32": 4,
    "float32": 4,
}


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel."""

    field: str  # an argument of the family
    kind: str
    source: int | None = None  # which source of keys it belongs to

    @property
    def name(self) -> str:
        part = ".map" if self.kind == "map" else ".extents" if self.kind.startswith("extents") else ""
        return self.field + ("" if self.source is None else str(self.source)) + part

    @property
    def bytes(self) -> int:
        return KINDS[self.kind]


Params = tuple[Param, ...]


def each(kind: str, *names: str, source: int | None = None) -> Params:
    return tuple(Param(name, kind, source) for name in names)


def rows(*names: str) -> Params:
    """Maps of arrays like q: [d, inner, outer, h_kv, b]."""
    return tuple(Param(name, kind) for name in names for kind in ("map", "extents4"))


def keys(*names: str, source: int) -> Params:
    """Maps of arrays like k: [d, s_kv, h_kv, b]. `cut_k` is a map of tiles, [d, tile_n, s_kv + 1, h_kv, b]: a box has
    as many keys as are wanted, and then zeros.
    """
    return tuple(Param(name, kind, source) for name in names for kind in ("map", "extents3"))


TILING = each(
    "int32",
    *("s_q", "group", "h_kv", "inner", "outer", "box_inner", "box_outer", "tiles_inner", "tiles_outer", "pairs"),
    "splits",
)
"""How the rows of q are cut into tiles: `kernels.lib.rows.Extents`."""


WINDOWS = ("pages_window", "pages_e4m3_window")
"""Kinds of sources of a step over keys in pages, whose kernels find the window that a query sees."""
PAGES = ("pages", "pages_e4m3", *WINDOWS)
"""Kinds of sources with an interval of keys per query, which are in pages, as q or as codes of e4m3."""


def gathers(sources: tuple[str, ...]) -> bool:
    """True if keys differ from query to query: a tile of rows has one query's heads then, and all keys are gathered."""
    return any(kind not in ("span", *PAGES) for kind in sources)


def params_of_span(i: int) -> Params:
    return each("address", "start", "stop", source=i) + each("int32", "s_kv", source=i)


def params_of_pages(i: int, kind: str) -> Params:
    """The tables that name a source's pages, and their sizes; of a window its width, and of codes the scales."""
    tables = each("address", "k_pages", "v_pages", source=i) + each("int32", "width", "page", "box", source=i)
    tables += each("int32", *["pages", "window"] * (kind in WINDOWS), source=i)
    return tables + each("address", *["scales"] * ("e4m3" in kind), source=i)


def source_blocks(sources: tuple[str, ...], shared_kv: bool, all_by_tma: bool, all_gathered: bool = False) -> Params:
    """A kernel's parameters for each source of keys.

    A gathered source has the address of its keys, another source their map, that of a latent in tiles that are cut.
    Where the only source is one span of a latent, it has both, because some keys are loaded without TMA; unless TMA
    loads all that are not packed.
    """
    params: Params = ()
    all_gathered |= gathers(sources)
    for i, kind in enumerate(sources):
        by_tma = all_by_tma and kind not in PACKED
        if not all_gathered:
            params += keys(*("k",) if by_tma else ("cut_k",) if shared_kv else ("k", "v"), source=i)
        elif by_tma:
            params += each("map", "k", source=i)
        if not by_tma and (all_gathered or (shared_kv and sources == ("span",))):
            params += each("address", "k", source=i)
        if kind in ("span", *PAGES):
            params += params_of_span(i)
            params += params_of_pages(i, kind) if kind in PAGES else ()
        else:
            params += each("address", "indices", "length", source=i)
            params += each("int32", "s_kv", "s_batch", "topk", source=i)
    return params
