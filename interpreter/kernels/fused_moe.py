"""A layer's experts: the sort of rows by expert, the gated product and the product after it, by the library's plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_dsv4_fmha._definitions.slabs import SLAB, TILE
from jax_dsv4_fmha._testing.experts import BF16, LIMIT, Problem, numbers
from kernels.abi import FEW_ROWS, MANY_ROWS, GroupedProduct, GroupRows

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

PROCESSORS = 2


def sizes_of(x: Problem) -> dict[str, int]:
    """The extents of a launch's operands."""
    (tokens, n_chosen), (e, k, inner) = x.chosen.shape, x.codes2.shape
    tiles = {"tiles13": 2 * inner // TILE, "slabs13": k // SLAB, "tiles2": k // TILE, "slabs2": inner // SLAB}
    sizes = {"tokens": tokens, "chosen": n_chosen, "k": k, "inner": inner, "experts": e, "num_experts": e}
    return {**sizes, **tiles, "tiles": e + tokens * n_chosen // FEW_ROWS}


@dataclass
class Sorted:
    """The arrays that the sort leaves: choices by expert, their weights, each choice's place, and the tiles."""

    list: Array
    weights: Array
    places: Array
    tiles: Array


def sorted_rows(x: Problem, tile: int) -> Sorted:
    """Returns what the sort is to leave, with rows of an expert in order."""
    order: list[int] = []
    tiles: list[tuple[int, ...]] = []
    for e, choices in x.rows().items():
        first = len(order)
        order += choices
        tiles += [(e, first + i, min(tile, len(choices) - i), 0) for i in range(0, len(choices), tile)]
    places = np.full(x.chosen.size, -1, np.int32)
    places[order] = np.arange(len(order))
    listed = np.zeros(x.chosen.size, np.int32)
    listed[: len(order)] = order
    weights = np.zeros(x.chosen.size, np.float32)
    weights[: len(order)] = x.weights.ravel()[order]
    return Sorted(listed, weights, places, np.array(tiles, np.int32).reshape(-1, 4))


def sort_launched(
    variant: GroupRows, x: Problem, tile_m: int, *, seed: int = 0, edit: Callable[[str], str] = str, **edits: Edit
) -> Machine:
    """The sort, about to run; the edits plant faults, in PTX and in parameters."""
    kernel, memory = Kernel.of(variant), new_memory()
    rows = x.chosen.size
    at = {"group": memory.add("group", x.chosen), "chosen_weight": memory.add("chosen_weight", x.weights)}
    sizes = {
        "list": 4 * rows,
        "sorted_weights": 4 * rows,
        "places": 4 * rows,
        "tiles": 16 * sizes_of(x)["tiles"],
        "count": 4,
    }
    at |= {name: memory.add(name, None, size) for name, size in sizes.items()}
    plan = native.plan_group_rows(sizes_of(x), tile_m=tile_m, addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def sort(variant: GroupRows, x: Problem, tile_m: int, **how: Any) -> Sorted:
    of_launch = sort_launched(variant, x, tile_m, **how)
    scheduler.run(of_launch)

    def found(name: str, dtype: Any) -> Array:
        array = of_launch.memory.named(name)
        return array.bytes[: array.size].view(dtype)

    count = int(found("count", np.int32)[0])
    tiles = found("tiles", np.int32).reshape(-1, 4)[:count]
    return Sorted(found("list", np.int32), found("sorted_weights", np.float32), found("places", np.int32), tiles)


def judge_sort(x: Problem, tile: int, got: Sorted) -> None:
    """Raises Wrong unless rows are by expert, and tiles have all of them; rows of an expert may be in any order."""
    want = sorted_rows(x, tile)
    if not np.array_equal(got.tiles, want.tiles):
        raise Wrong(f"tiles are {got.tiles.tolist()}, wanted {want.tiles.tolist()}")
    end = 0
    for e, choices in x.rows().items():
        places = slice(end, end := end + len(choices))
        if sorted(got.list[places].tolist()) != choices:
            raise Wrong(f"rows of expert {e} are {got.list[places].tolist()}, wanted {choices}")
        if not np.array_equal(got.weights[places], x.weights.ravel()[got.list[places]]):
            raise Wrong(f"weights of expert {e} are those of other rows")
    placed = np.flatnonzero(want.places >= 0)
    if not np.array_equal(got.list[got.places[placed]], placed) or (got.places[want.places < 0] != -1).any():
        raise Wrong(f"places are {got.places.tolist()}")


def product_launched(
    variant: GroupedProduct, x: Problem, *, seed: int = 0, edit: Callable[[str], str] = str, **edits: Edit
) -> Machine:
    """A product, about to run."""
    kernel, memory = Kernel.of(variant), new_memory()
    placed, (_, k, inner) = sorted_rows(x, kernel.facts["tile_m"]), x.codes2.shape
    is_packed = variant.weights != "bfloat16"
    w13, w2 = x.packed if is_packed else x.unpacked
    w, rows, columns = (w13, x.x, inner) if variant.gated else (w2, given_inner(x), k)
    arrays = {
        "x" if variant.gated else "inner": rows,
        "w13" if variant.gated else "w2": np.asarray(w.data if is_packed else w),
        "factor13" if variant.gated else "factor2": np.asarray(w.factor) if is_packed else np.zeros(0, np.float32),
        "list": placed.list,
        "sorted_weights": placed.weights,
        "tiles": placed.tiles,
        "count": np.array([len(placed.tiles)], np.int32),
    }
    at = {name: memory.add(name, array) for name, array in arrays.items()}
    at["inner" if variant.gated else "y"] = memory.add("y", None, max(len(listed(x)), 1) * columns * 2)
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n")}
    plan = native.plan_grouped_product(sizes_of(x), variant.gated, LIMIT, **tiles, processors=PROCESSORS, addresses=at)
    return machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def listed(x: Problem) -> list[int]:
    """All choices of experts here, by expert."""
    return [choice for choices in x.rows().values() for choice in choices]


def given_inner(x: Problem) -> Array:
    """bfloat16 [rows, inner]: what a product is given as the channels inside of experts."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((max(len(listed(x)), 1), x.codes2.shape[2])).astype(BF16)


def product(variant: GroupedProduct, x: Problem, **how: Any) -> Array:
    """bfloat16 [rows, channels]"""
    of_launch = product_launched(variant, x, **how)
    scheduler.run(of_launch)
    array = of_launch.memory.named("y")
    return array.bytes[: array.size].view(BF16).reshape(max(len(listed(x)), 1), -1)


def judge(variant: GroupedProduct, x: Problem, got: Array) -> None:
    """Raises Wrong unless every number is right, within the rounding of sums and of the result."""
    given = given_inner(x).astype(np.float64)
    for place, choice in enumerate(listed(x)):
        e = x.chosen.ravel()[choice]
        want = x.inner_of(choice) if variant.gated else numbers(x.codes2[e], x.scales2[e]) @ given[place]
        size = np.sqrt(np.mean(want * want))
        wrong = ~(np.abs(got[place].astype(np.float64) - want) <= 2**-8 * np.maximum(np.abs(want), size))
        if wrong.any():
            channel = int(np.flatnonzero(wrong)[0])
            raise Wrong(
                f"{int(wrong.sum())} of {wrong.size} channels of row {place}, of expert {e}, are wrong, first"
                f" {channel}: {float(got[place, channel]):.6g}, wanted {want[channel]:.6g}"
            )


def typical(variant: GroupedProduct) -> Problem:
    """Groups with no row, with one, with whole tiles and with more than one tile."""
    rows = [1, 0, 9, 20] if variant.max_rows <= FEW_ROWS else [3, 0, MANY_ROWS + 20, 33]
    return Problem.of(rows, fp8=variant.weights == "e4m3")


def of_large_scales(x: Problem) -> Problem:
    """Scales of one matrix are above 2, those of another below 2^-40."""
    scales = x.scales13.copy()
    scales[0] += 12
    scales[-1] -= 40
    return replace(x, scales13=scales)
