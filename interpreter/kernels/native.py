"""The native library's plain C functions (ffi/introspect.cc): its cubins, and launches as it plans them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from jax_dsv4_fmha._host import attention
from jax_dsv4_fmha._host import library as host_library
from jax_dsv4_fmha._host.mode import Mode
from kernels import targets
from kernels.abi import FEW_HEADS, Forward, MhaBackward, MlaBackward, RowScores, Variant
from kernels.packings import PACKED
from kernels.params import KINDS as KIND_BYTES
from kernels.params import PAGES, WINDOWS
from kernels.variants import VARIANTS

KINDS = {
    "span": 0,
    "selection": 1,
    **dict.fromkeys(PACKED, 2),
    **{kind: 3 + i for i, kind in enumerate(PAGES)},
}  # as ffi/rows.h counts
FLOAT32 = 7  # an element of a tensor map, as the driver counts them
TYPES = {"float8_e4m3fn": 0, "float16": 6, "bfloat16": 9}  # the same of what is attended to
EPS = 16.0  # of norms of q; large enough to matter
WINDOW = 90  # of steps whose kernel finds what a window sees
T = TypeVar("T", bound=Variant)


def function(variant: Forward) -> Any:
    """The raw call that runs a variant, of q and the other operands."""
    how: dict[str, Any] = {"eps": EPS} if variant.turns else {}
    takes_packed = variant.op == "dsv4_decode" or (variant.op == "mla_sparse_fwd" and variant.mode.d_v)
    how |= {"packing": variant.packing} if takes_packed else {}
    how |= {"window": WINDOW} if variant.sources[0] in WINDOWS else {}
    how |= {"order": attention.ORDER} if variant.mode == FEW_HEADS else {}
    return functools.partial(attention.attention, variant.op, raw_mode(variant), **how)


def raw_mode(variant: Variant) -> Mode:
    """A variant's mode, as raw calls have it."""
    return Mode(**dataclasses.asdict(variant.mode))


def group_heads(h_q: int) -> int:
    """Heads of a group, in which the gradients that turn q take do: two groups, where that is possible."""
    return h_q // 2 if h_q % 2 == 0 else h_q


def variant_of(key: str) -> Any:
    """Any family's variant of this key; KeyError if there is none, whether kernels are built or not."""
    for variant in VARIANTS:
        if variant.key == key:
            return variant
    raise KeyError(f"no variant has the key {key}")


def built(family: type[T]) -> list[T]:
    """The variants of a family that the library holds."""
    keys = built_keys()
    return [v for v in VARIANTS if isinstance(v, family) and v.key in keys]


def built_keys() -> set[str]:
    """The keys of all kernels that the library holds, be it for calls or for the interpreter alone."""
    return {v.key for v in host_library.held()}


def fewer_heads(variant: Forward | MlaBackward) -> int:
    """The most heads with which a call like this variant's gets another one, which is made for fewer."""
    calls = {**variant.choices, "max_heads": 0}
    others = (v for v in VARIANTS if isinstance(v, type(variant)) and (v.name, v.arch) == (variant.name, variant.arch))
    limits = (v.max_heads for v in others if {**v.choices, "max_heads": 0} == calls)
    return max((limit for limit in limits if limit < variant.max_heads), default=0)


def heads_for(variant: Forward | MlaBackward, h_q: int) -> int:
    """The number of heads nearest to h_q with which a call gets this variant, not one for more or fewer."""
    return min(max(h_q, fewer_heads(variant) + 1), variant.max_heads)


class Shape(NamedTuple):
    """The extents of a launch. s_kv is of the first source of keys and s_kv1 of the second, where there is one."""

    b: int
    s_q: int
    s_kv: int
    h_q: int
    h_kv: int
    d: int
    s_kv1: int = 0
    topk: int = 0
    splits: int = 1
    page: int = 64  # entries of packed keys, or keys of a page
    d_v: int = 0  # 0 for d
    pages: int = 1  # of a pool of keys
    window: int = 0  # of a step over such keys


# ---- C++ structs


FFI = Path(__file__).parents[2] / "ffi"
C_TYPES = {
    **{f"{sign}int{bits}_t": getattr(ctypes, f"c_{sign}int{bits}") for bits in (32, 64) for sign in ("", "u")},
    "unsigned char": ctypes.c_char,
}
EXTENTS = {"kMaxParams": max(len(v.params) for v in VARIANTS), "sizeof(CUtensorMap)": KIND_BYTES["map"]}


@functools.cache
def source() -> str:
    """ffi/, without comments, and with numbers for the extents of arrays."""
    text = re.sub(r" *//.*", "", "".join(path.read_text() for path in sorted(FFI.glob("*.[ch]*"))))
    for name, number in (*EXTENTS.items(), *re.findall(r"constexpr int (\w+) = (\d+);", text)):
        text = text.replace(f"[{name}]", f"[{number}]")
    return text


@functools.cache
def structure(name: str) -> type[ctypes.Structure]:
    """A struct of ffi/ as it is defined there: its members are the lines that declare them, one level deep."""
    (body,) = re.findall(rf"^struct {name} {{\n(.*?)^}};", source(), re.M | re.S)
    members = []
    for kind, declared in re.findall(r"^  ((?:const |unsigned )?\w+)([ *][^(){}\n]*);$", body, re.M):
        for stars, member, extents in re.findall(r"(\*?) *(\w+)((?:\[\d+\])*)", declared):
            pointer = ctypes.c_char_p if kind == "const char" else ctypes.c_void_p
            of_type = pointer if stars else C_TYPES.get(kind) or structure(kind)
            for extent in reversed(re.findall(r"\d+", extents)):
                of_type = of_type * int(extent)
            members.append((member, of_type))
    return type(name, (ctypes.Structure,), {"_fields_": members})


def members_of(of_type: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Names and ctypes of a struct's members."""
    return [(name, kind) for name, kind, *_ in of_type._fields_]


def filled(name: str, **values: Any) -> ctypes.Structure:
    """A struct of ffi/ whose members are these, no fewer and no others."""
    of_type = structure(name)
    if (members := {member for member, _ in members_of(of_type)}) != set(values):
        raise TypeError(f"{name} has {', '.join(sorted(members))}, not {', '.join(sorted(values))}")
    return of_type(**values)


def addresses_of(calls: str) -> tuple[str, ...]:
    """The addresses that the launches of a family of calls get, by name: those of source i of keys end with i, and from
    and to are start and stop of a span, indices and length of a selection."""
    of_sources, others, count = targets.fields(calls)
    return *(f"{name}{i}" for i in range(count) for name in of_sources), *others


def addressed(calls: str, addresses: dict[str, int] | None) -> Any:
    """A family's addresses by these names; null where there is none."""
    at, known = addresses or {}, addresses_of(calls)
    if unknown := set(at) - set(known):
        raise TypeError(f"{calls} has {', '.join(known)}, not {', '.join(sorted(unknown))}")
    return ctypes.byref((ctypes.c_void_p * len(known))(*map(at.get, known)))


# ---- launches


class MapSpec(Protocol):
    """The fields of a tensor map, without its address."""

    type: int
    rank: int
    extents: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int


@dataclass(frozen=True)
class Plan:
    """A launch, as our own launcher plans it."""

    grid: int
    least_smem_bytes: int
    params: dict[str, bytes]  # by name, in the order in which the kernel gets them; a tensor map's is its address
    maps: dict[str, MapSpec]  # the other fields of a tensor map

    def __getitem__(self, name: str) -> int:
        """The value of a parameter that is an integer or an address."""
        return int.from_bytes(self.params[name], "little")


class NoLibrary(RuntimeError):
    """The native library is not built."""


def library() -> ctypes.CDLL:
    if (native := host_library.native()) is None:
        raise NoLibrary("the native library, which plans launches, is not built here: `make test` builds it")
    return native


def plan(
    variant: Forward | MlaBackward | str,
    shape: Shape,
    scale: float = 1.0,
    *,
    tile_m: int = 64,
    tile_n: int = 64,
    processors: int = 132,
    cluster: int = 1,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """The launch of a variant, or of any variant of an op, for `shape`; ValueError where the library refuses it.

    The variant is asked for the order of its parameters alone, for what is tested of tiles has nothing to do with it.
    """
    if isinstance(variant, str):
        variant = next(v for v in VARIANTS if isinstance(v, Forward | MlaBackward) and v.name == variant)
    return planned(
        variant.family,
        variant.layout.encode(),
        _attention_shape(shape, variant.sources, variant.dtype),
        ctypes.c_float(scale),
        ctypes.c_float(EPS),
        *([] if isinstance(variant, Forward) else [ctypes.c_int64(group_heads(shape.h_q))]),
        _tiles(tile_m, tile_n, processors, cluster, variant.gathers),
        addressed(variant.family, addresses),
    )


def plan_combine(
    shape: Shape,
    *,
    threads: int = 128,
    tile_n: int = 4,
    processors: int = 132,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """The launch after it where keys are split."""
    out = structure("ShownLaunch")()
    library().dsv4_fmha_plan_combine(
        ctypes.byref(_row_shape(shape, 0)),
        ctypes.c_int32(threads),
        ctypes.c_int32(tile_n),
        ctypes.c_int32(processors),
        addressed("forward", addresses),
        ctypes.byref(out),
    )
    return _shown(out)


def plan_row_scores(
    variant: RowScores,
    shape: Shape,
    room: int,
    *,
    tile_m: int = 64,
    tile_n: int = 64,
    processors: int = 132,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """The first launch of attention to few queries, with room for so many tiles of keys; ValueError where the library
    refuses it.
    """
    return planned(
        "row_scores",
        variant.layout.encode(),
        _attention_shape(shape, variant.sources, variant.dtype),
        ctypes.c_int64(room),
        _tiles(tile_m, tile_n, processors, gathers=True),
        addressed("by_columns", addresses),
    )


def plan_row_columns(
    dtype: str,
    shape: Shape,
    room: int,
    scale: float = 1.0,
    *,
    tile_m: int = 64,
    tile_n: int = 64,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """The launch after it."""
    return planned(
        "row_columns",
        ctypes.byref(_row_shape(shape, TYPES[dtype])),
        ctypes.c_int64(room),
        ctypes.c_float(scale),
        _tiles(tile_m, tile_n, 1, gathers=True),
        addressed("by_columns", addresses),
    )


def plan_mha_backward(
    variant: MhaBackward,
    shape: Shape,
    scale: float = 1.0,
    *,
    tile_m: int = 64,
    tile_n: int = 64,
    processors: int = 132,
    cluster: int = 1,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """The launch; without dv K is V."""
    return planned(
        "mha_backward",
        variant.layout.encode(),
        _attention_shape(shape, ("span",), variant.dtype),
        ctypes.c_float(scale),
        ctypes.c_bool(variant.op != "mha_dq"),
        _tiles(tile_m, tile_n, processors, cluster),
        addressed("mha_backward", addresses),
    )


def plan_tile_spans(
    shape: Shape, *, tile_m: int = 64, tile_n: int = 4, addresses: dict[str, int] | None = None
) -> Plan:
    """The launch before it, for tiles of tile_m rows; a CTA takes tile_n of them."""
    return planned(
        "tile_spans",
        ctypes.byref(_row_shape(shape, 0)),
        ctypes.c_int32(tile_m),
        ctypes.c_int32(tile_n),
        addressed("mha_backward", addresses),
    )


def plan_indexer(
    shape: dict[str, int],
    *,
    tile_m: int = 256,
    tile_n: int = 128,
    processors: int = 132,
    ctas_of_row: int = 1,
    first: int = 0,
    count: int = 1,
    addresses: dict[str, int] | None = None,
) -> tuple[Plan, Plan]:
    """The launches of the lightning indexer for `count` blocks of queries from `first` on: scores, then their
    choice, whose rows have so many CTAs each.
    """
    scores, choice = structure("ShownLaunch")(), structure("ShownLaunch")()
    library().dsv4_fmha_plan_indexer(
        ctypes.byref(filled("IndexerShape", **shape)),
        _tiles(tile_m, tile_n, processors),
        *map(ctypes.c_int64, (ctas_of_row, first, count)),
        addressed("indexer", addresses),
        ctypes.byref(scores),
        ctypes.byref(choice),
    )
    return _shown(scores), _shown(choice)


def plan_indexer_within(
    shape: dict[str, int],
    blocks: int,
    from_start: bool,
    *,
    processors: int = 132,
    queries: int = 1,
    addresses: dict[str, int] | None = None,
) -> tuple[Plan, Plan]:
    """The launches of an indexer's choice within `blocks` blocks a query: scores, then their choice."""
    scores, choice = structure("ShownLaunch")(), structure("ShownLaunch")()
    library().dsv4_fmha_plan_indexer_within(
        ctypes.byref(filled("IndexerShape", **shape)),
        *map(ctypes.c_int64, (blocks, from_start)),
        _tiles(64, 64, processors),
        *map(ctypes.c_int64, (1, 0, queries)),
        addressed("indexer_within", addresses),
        ctypes.byref(scores),
        ctypes.byref(choice),
    )
    return _shown(scores), _shown(choice)


def plan_probabilities(
    shape: dict[str, int], scale: float = 1.0, *, processors: int = 132, addresses: dict[str, int] | None = None
) -> Plan:
    """The launch of head-summed probabilities; ValueError where the library refuses it."""
    return planned(
        "probabilities",
        ctypes.byref(filled("ProbabilitiesShape", **shape)),
        ctypes.c_float(scale),
        ctypes.c_int64(processors),
        addressed("probabilities", addresses),
    )


def plan_indexer_scores_at(shape: dict[str, int], *, gradient: bool, addresses: dict[str, int] | None = None) -> Plan:
    """The launch of scores at given entries, or of their gradients."""
    out = structure("ShownLaunch")()
    given, at = ctypes.byref(filled("IndexerScoresAtShape", **shape)), addressed("indexer_scores_at", addresses)
    library().dsv4_fmha_plan_indexer_scores_at(given, ctypes.c_bool(gradient), at, ctypes.byref(out))
    return _shown(out)


def plan_rope(
    family: str, shape: dict[str, int], number: float, *, tile_m: int, addresses: dict[str, int] | None = None
) -> Plan:
    """Returns the launch of "rope", where the number is its direction, or of "norm_rope", where it is its eps."""
    out = structure("ShownLaunch")()
    given, at = ctypes.byref(filled("RopeShape", **shape)), addressed("rope", addresses)
    plan_of = library()[f"dsv4_fmha_plan_{family}"]
    plan_of(given, ctypes.c_float(number), ctypes.c_int32(tile_m), at, ctypes.byref(out))
    return _shown(out)


def plan_index_query(shape: dict[str, int], *, tile_m: int, addresses: dict[str, int] | None = None) -> Plan:
    """Returns the launch that rotates an indexer's queries and makes codes with scales of them."""
    out = structure("ShownLaunch")()
    given, at = ctypes.byref(filled("RopeShape", **shape)), addressed("rope", addresses)
    library().dsv4_fmha_plan_index_query(given, ctypes.c_int32(tile_m), at, ctypes.byref(out))
    return _shown(out)


def plan_few_rows_product(
    shape: dict[str, int],
    eps: float,
    scale: float = 1.0,
    *,
    tile_m: int,
    tile_n: int,
    cluster: int,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """Returns the launch of a product of few rows; what the shape does not say is 0. Raises ValueError where the
    library refuses it.
    """
    sizes = dict.fromkeys((name for name, _ in members_of(structure("FewRowsProductShape"))), 0)
    return planned(
        "few_rows_product",
        ctypes.byref(filled("FewRowsProductShape", **(sizes | shape))),
        ctypes.c_float(eps),
        ctypes.c_float(scale),
        _tiles(tile_m, tile_n, 1, cluster),
        addressed("few_rows_product", addresses),
    )


def plan_unpack_matrix(
    shape: dict[str, int], *, tile_m: int, tile_n: int, addresses: dict[str, int] | None = None
) -> Plan:
    """Returns the launch that writes matrices in FP8 as arrays; ValueError where the library refuses it."""
    given, at = ctypes.byref(filled("UnpackMatrixShape", **shape)), addressed("unpack_matrix", addresses)
    return planned("unpack_matrix", given, ctypes.c_int32(tile_m), ctypes.c_int32(tile_n), at)


def plan_group_rows(shape: dict[str, int], *, tile_m: int, addresses: dict[str, int] | None = None) -> Plan:
    """Returns the launch that sorts rows by expert; ValueError where the library refuses it, as in what follows."""
    given, at = ctypes.byref(filled("FusedMoeShape", **shape)), addressed("fused_moe", addresses)
    return planned("group_rows", given, ctypes.c_int32(tile_m), at)


def plan_route(
    shape: dict[str, int], unit: float, scale: float, *, tile_m: int, addresses: dict[str, int] | None = None
) -> Plan:
    """Returns the launch of a router after its product."""
    return planned(
        "route",
        ctypes.byref(filled("RouteShape", **shape)),
        ctypes.c_float(unit),
        ctypes.c_float(scale),
        ctypes.c_int32(tile_m),
        addressed("route", addresses),
    )


def plan_grouped_product(
    shape: dict[str, int],
    gated: bool,
    limit: float,
    *,
    tile_m: int,
    tile_n: int,
    processors: int,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """Returns the launch of the experts' gated product, or of the one after it."""
    return planned(
        "grouped_product",
        ctypes.byref(filled("FusedMoeShape", **shape)),
        ctypes.c_bool(gated),
        ctypes.c_float(limit),
        _tiles(tile_m, tile_n, processors),
        addressed("fused_moe", addresses),
    )


def plan_expert_product(
    shape: dict[str, int],
    limit: float,
    *,
    tile_m: int,
    tile_n: int,
    processors: int,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """Returns the launch of a product of rows by group."""
    given, at = ctypes.byref(filled("ExpertProductShape", **shape)), addressed("expert_product", addresses)
    return planned("expert_product", given, ctypes.c_float(limit), _tiles(tile_m, tile_n, processors), at)


def plan_expert_rows(shape: dict[str, int], *, tile_m: int, addresses: dict[str, int] | None = None) -> Plan:
    """Returns the launch that moves rows to and from experts."""
    given, at = ctypes.byref(filled("ExpertRowsShape", **shape)), addressed("expert_rows", addresses)
    return planned("expert_rows", given, ctypes.c_int32(tile_m), at)


def plan_hyper_connection(
    shape: dict[str, int],
    eps: float,
    hc_eps: float,
    *,
    tile_m: int,
    tile_n: int,
    cluster: int,
    processors: int,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """Returns the launch of hyper-connections between two sublayers."""
    return planned(
        "hyper_connection",
        ctypes.byref(filled("HyperConnectionShape", **shape)),
        ctypes.c_float(eps),
        ctypes.c_float(hc_eps),
        _tiles(tile_m, tile_n, processors, cluster),
        addressed("hyper_connection", addresses),
    )


def plan_all_reduce(shape: dict[str, int], memory: int = 0, *, addresses: dict[str, int] | None = None) -> Plan:
    """Returns the launch that sums an array over devices, where this one keeps `memory`, an address."""
    given, at = ctypes.byref(filled("AllReduceShape", **shape)), addressed("all_reduce", addresses)
    return planned("all_reduce", given, ctypes.c_void_p(memory), at)


def plan_hyper_connection_bwd(
    shape: dict[str, int],
    walks: int,
    eps: float,
    hc_eps: float,
    *,
    tile_m: int,
    tile_n: int,
    addresses: dict[str, int] | None = None,
) -> Plan:
    """Returns the launch of the gradient of streams by so many walks, or without any of the kernel before it."""
    return planned(
        "hyper_connection_bwd",
        ctypes.byref(filled("HyperConnectionShape", **shape)),
        ctypes.c_int64(walks),
        ctypes.c_float(eps),
        ctypes.c_float(hc_eps),
        _tiles(tile_m, tile_n, 1),
        addressed("hyper_connection_bwd", addresses),
    )


def plan_kv_insert(shape: dict[str, int], eps: float, *, tile_m: int, addresses: dict[str, int] | None = None) -> Plan:
    """Returns the launch that inserts entries into a cache."""
    return planned(
        "kv_insert",
        ctypes.byref(filled("KvInsertShape", **shape)),
        ctypes.c_float(eps),
        ctypes.c_int32(tile_m),
        addressed("kv_insert", addresses),
    )


def plan_seen_slots(
    shape: dict[str, int], *pools: dict[str, int], tile_n: int, addresses: dict[str, int] | None = None
) -> Plan:
    """Returns the launch that finds the slots that a step's queries see, in the pools of the window and of entries."""
    given = structure("SeenSlotsShape")(**shape)
    given.of_window, given.compressed = (filled("PoolShape", **pool) for pool in pools)
    at = addressed("seen_slots", addresses)
    return planned("seen_slots", ctypes.byref(given), ctypes.c_int32(tile_n), at)


def plan_key_codes(shape: dict[str, int], *, tile_m: int, addresses: dict[str, int] | None = None) -> Plan:
    """The launch that makes codes of keys."""
    given, at = ctypes.byref(filled("KeyCodesShape", **shape)), addressed("key_codes", addresses)
    return planned("key_codes", given, ctypes.c_int32(tile_m), at)


def _row_shape(shape: Shape, of_type: int) -> ctypes.Structure:
    extents = {name: getattr(shape, name) for name in ("b", "s_q", "h_q", "h_kv", "d", "splits")}
    extents["d_v"] = shape.d_v or shape.d
    return filled("RowShape", type=of_type, **extents)


def _attention_shape(shape: Shape, kinds: Sequence[str], dtype: str) -> Any:
    given = structure("AttentionShape")(rows=_row_shape(shape, TYPES[dtype]), source_count=len(kinds))
    for i, (kind, s_kv) in enumerate(zip(kinds, (shape.s_kv, shape.s_kv1), strict=False)):
        s_batch = shape.page if kind in (*PACKED, *PAGES) else s_kv
        extents = {"s_kv": s_kv, "s_batch": s_batch, "topk": shape.topk, "pages": shape.pages, "window": shape.window}
        given.sources[i] = filled("SourceShape", kind=KINDS[kind], **extents)
    return ctypes.byref(given)


def _tiles(tile_m: int, tile_n: int, processors: int, cluster: int = 1, gathers: bool = False) -> Any:
    numbers = {"tile_m": tile_m, "tile_n": tile_n, "processors": processors, "cluster": cluster}
    return ctypes.byref(filled("Tiles", **numbers, gathers=gathers))


def planned(what: str, *arguments: Any) -> Plan:
    """The library's plan of this name; ValueError where it refuses."""
    out, error = structure("ShownLaunch")(), ctypes.create_string_buffer(512)
    status = library()[f"dsv4_fmha_plan_{what}"](*arguments, ctypes.byref(out), error, ctypes.c_size_t(len(error)))
    if status != 0:
        raise ValueError(error.value.decode())
    return _shown(out)


def _shown(out: Any) -> Plan:
    names = [name.decode() for name in out.names[: out.count]]
    params = {name: out.bytes[i].raw[: out.sizes[i]] for i, name in enumerate(names)}
    assert len(params) == out.count, names
    return Plan(
        out.grid,
        out.least_smem_bytes,
        params,
        {name: spec for name, spec in zip(names, out.maps, strict=False) if spec.rank},
    )


def cubin(key: str) -> bytes:
    """The bytes that are embedded for a variant."""
    native, size = library(), ctypes.c_size_t()
    native.dsv4_fmha_cubin.restype = ctypes.c_void_p
    address = native.dsv4_fmha_cubin(key.encode(), ctypes.byref(size))
    assert address is not None, key
    return ctypes.string_at(address, size.value)


def called(key: str, h_q: int) -> str | None:
    """Returns the key of the variant that a call with so many heads gets, where all else is as in this one."""
    native = library()
    native.dsv4_fmha_called.restype = ctypes.c_char_p
    name: bytes | None = native.dsv4_fmha_called(key.encode(), ctypes.c_int64(h_q))
    return None if name is None else name.decode()
