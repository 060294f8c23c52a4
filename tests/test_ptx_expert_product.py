"""Products of rows by group, as training has them, interpreted: right answers, the same bits, planted faults."""

from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.expert_product import Problem, judge, run, typical
from interpreter.kernels.launch import Kernel
from interpreter.kernels.verdict import Wrong
from interpreter.machine.hazards import Misuse, Race, Undefined
from jax_dsv4_fmha._host import expert_product as raw
from kernels.abi import ExpertProduct

BUILT = {v.form: v for v in native.built(ExpertProduct)}

needs_kernels = pytest.mark.skipif(not BUILT, reason="without kernels")


@pytest.mark.parametrize("form", BUILT)
def test_is_right(form):
    x = typical(BUILT[form])
    judge(x, run(BUILT[form], x))


@needs_kernels
@pytest.mark.parametrize("form", BUILT)
def test_a_group_has_the_same_bits_in_any_company(form):
    """The rows of one group, alone and among others."""
    whole = typical(BUILT[form])
    group = 2
    rows = whole.rows_of(group)
    b = whole.b[rows] if form == "outer" else whole.b[group : group + 1]
    alone = Problem(form, (whole.sizes[group],), whole.a[rows], b)
    among, by_itself = run(BUILT[form], whole), run(BUILT[form], alone)
    among = among[group] if form == "outer" else among[whole.list[rows]]
    by_itself = by_itself[0] if form == "outer" else by_itself[alone.list]
    assert among.tobytes() == by_itself.tobytes()


@needs_kernels
@pytest.mark.parametrize("form", BUILT)
def test_what_is_not_a_number_stays_in_its_group(form):
    x = typical(BUILT[form])
    usual = run(BUILT[form], x)
    x.a[x.rows_of(3)], hit = np.nan, x.list[x.rows_of(3)]
    if form == "outer":
        x.b[x.rows_of(3)], hit = np.nan, [3]
    made = run(BUILT[form], x)
    of_groups = np.concatenate([x.list[x.rows_of(g)] for g in range(4)])
    others = sorted(set(range(4) if form == "outer" else of_groups.tolist()).difference(list(hit)))
    assert np.isnan(made[list(hit)].astype(np.float32)).all() and made[others].tobytes() == usual[others].tobytes()


@needs_kernels
@pytest.mark.parametrize("sizes", [(0, 0), (1,), (0, 64, 0, 63, 65)], ids=str)
def test_groups_of_few_rows(sizes):
    for form, variant in BUILT.items():
        if form == "outer" or sum(sizes):
            x = Problem.of(form, sizes, 128, 256)
            judge(x, run(variant, x))


def test_the_launch_refuses():
    sizes = {"form": 0, "rows": 5, "m": 128, "n": 256, "groups": 2, "type": 9, "tiles": 2}
    changes = (
        ({"m": 96}, "m is 96, wanted a multiple of 64"),
        ({"form": 2, "m": 64}, "m is 64, wanted a multiple of 128"),
        ({"n": 128}, "n is 128, wanted a multiple of 256"),
        ({"rows": 0}, "rows is 0"),
        ({"tiles": 2**30, "n": 1024}, "the number of tiles"),
    )
    for changed, says in changes:
        with pytest.raises(ValueError, match=says):
            native.plan_expert_product(sizes | changed, tile_m=128, tile_n=256, processors=2)


@pytest.mark.parametrize("form", BUILT)
def test_the_package_knows_the_rows_of_a_tile(form):
    assert Kernel.of(BUILT[form]).facts["tile_m"] == raw.TILE


def fault(name, form, raises, says, edit=None, **parameters):
    return PlantedFault(name, f"expert_product_sm_90a_bfloat16_{form}", raises, says, edit, parameters=parameters)


def without(pattern, which=slice(None)):
    return lambda text: edits.drop(text, pattern, which)


def without_waits(which, chosen=slice(None)):
    def edit(text):
        made = edits.barriers(text)
        ring = set(made[: len(made) // 2] if which == "full" else made[len(made) // 2 :])
        return edits.drop_waits(text, ring, chosen)

    return edit


def moved(rows):
    """A map of an array that begins so many rows later, or earlier."""
    return lambda x: replace(x, address=x.address + rows * x.strides[0])


def moved_tiles(x, group=0, first=0, rows=0):
    """Tiles of other groups or rows, where there are such."""
    tiles = x.tiles(raw.TILE) + np.array([group, first, rows, 0], np.int32)
    tiles[:, 0] %= len(x.sizes)
    return {"tiles": np.maximum(tiles, 0)}


TABLES = {
    "rows of the neighbour": lambda x: moved_tiles(x, first=1),
    "rows of the neighbour before": lambda x: moved_tiles(x, first=-1),
    "the matrix of the neighbour": lambda x: moved_tiles(x, group=1),
    "the last row of a tile is left out": lambda x: moved_tiles(x, rows=-1),
    "a tile is left out": lambda x: {"count": np.array([len(x.tiles(raw.TILE)) - 1], np.int32)},
    "results go to the row after": lambda x: {"list": np.roll(x.list, 1)},
}
TABLES_OF_GROUPS = {
    "groups begin a row late": lambda x: {"first": x.first + np.int32(1)},
    "groups begin a row early": lambda x: {"first": np.maximum(x.first - np.int32(1), 0)},
    "groups end a row late": lambda x: {"sizes": np.array(x.sizes, np.int32) + np.int32(1)},
    "groups end a row early": lambda x: {"sizes": np.maximum(np.array(x.sizes, np.int32) - 1, 0).astype(np.int32)},
}


@pytest.mark.faults
@pytest.mark.parametrize("form", BUILT)
def test_wrong_tables_give_wrong_answers(form):
    x = typical(BUILT[form])
    for name, instead in (TABLES_OF_GROUPS if form == "outer" else TABLES).items():
        with pytest.raises((Wrong, Undefined), match=r"of group|nobody wrote"):
            judge(x, run(BUILT[form], x, instead=instead(x)))
            raise LookupError(name)


FAULTS = [
    *(fault("a row of the neighbour", f, Wrong, "numbers of group", **{"a.map": moved(1)}) for f in ("rows", "turned")),
    fault("64 of k too few", "turned", Wrong, "numbers of group", m=lambda m: m - 64),
    fault("rows past the end count", "outer", Wrong, "numbers of group", edits.replacing(("st.shared.v4", "//"))),
    *(
        fault(f"nobody waits for a stage, {f}", f, (Race, Undefined), "reads|nobody", without_waits("full"))
        for f in ("rows", "turned", "outer")
    ),
    *(
        fault(f"a stage is filled while it is read, {f}", f, (Race, Misuse), "writes|arrival", without_waits("empty"))
        for f in ("rows", "turned", "outer")
    ),
    fault(
        "sums are read while products run", "rows", Race, "register", without(r"wgmma\.wait_group\.sync\.aligned\s+0")
    ),
]


@pytest.mark.faults
@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_a_fault_is_found(planted):
    variant = next((v for v in BUILT.values() if v.key == planted.kernel), None)
    if variant is None:
        pytest.skip("not built")
    x = typical(variant)

    def of_seed(planted, seed):
        judge(x, run(variant, x, seed=seed, edit=planted.planted_in, **planted.parameters))

    found = planted.findings(of_seed, (0, 1))
    assert all(planted.symptoms_of(error) for error in found), found
