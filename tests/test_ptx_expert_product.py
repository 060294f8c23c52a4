"""Products of rows by group, as training has them, interpreted: right answers, the same bits, planted faults."""

from dataclasses import replace

import numpy as np
import pytest

from interpreter import edits
from interpreter.faults import PlantedFault
from interpreter.kernels import native
from interpreter.kernels.expert_product import FORMS, TILE_N, Problem, judge, run, typical
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
    b, listed = whole.b[rows] if form == "outer" else whole.b[group : group + 1], whole.list[rows][::-1]
    alone = Problem(form, (whole.sizes[group],), whole.a[rows], b, whole.made[listed], whole.weights[listed])
    among, by_itself = (x.of_group(run(BUILT[form], x), g) for x, g in ((whole, group), (alone, 0)))
    for name, found in among.items():
        assert found.tobytes() == by_itself[name].tobytes(), name


@needs_kernels
@pytest.mark.parametrize("form", BUILT)
def test_what_is_not_a_number_stays_in_its_group(form):
    x = typical(BUILT[form])
    usual = run(BUILT[form], x)
    x.spoil(3)
    spoilt = run(BUILT[form], x)
    for group in range(4):
        before, after = (x.of_group(results, group) for results in (usual, spoilt))
        for name, found in after.items():
            if group == 3:
                assert np.isnan(found.astype(np.float32)).all(), name
            else:
                assert found.tobytes() == before[name].tobytes(), (group, name)


@needs_kernels
@pytest.mark.parametrize("sizes", [(0, 0), (1,), (0, 64, 0, 63, 65)], ids=str)
def test_groups_of_few_rows(sizes):
    for form, variant in BUILT.items():
        if form == "outer" or sum(sizes):
            x = Problem.of(form, sizes, 128, 256)
            judge(x, run(variant, x))


def test_the_launch_refuses():
    sizes = {"form": FORMS.index("rows"), "rows": 5, "m": 128, "n": 256, "groups": 2, "type": 9, "tiles": 2}
    changes = (
        ({"m": 96}, "m is 96, wanted a multiple of 64"),
        ({"form": FORMS.index("outer"), "m": 64}, "m is 64, wanted a multiple of 128"),
        ({"n": 128}, "n is 128, wanted a multiple of 256"),
        ({"rows": 0}, "rows is 0"),
        ({"tiles": 2**30, "n": 1024}, "the number of tiles"),
    )
    for changed, says in changes:
        with pytest.raises(ValueError, match=says):
            native.plan_expert_product(sizes | changed, 1.0, tile_m=128, tile_n=256, processors=2)


@pytest.mark.parametrize("form", BUILT)
def test_the_package_knows_the_sizes_of_a_tile(form):
    facts = Kernel.of(BUILT[form]).facts
    assert (facts["tile_m"], facts["tile_n"]) == (raw.TILE, raw.COLUMNS) and raw.COLUMNS == TILE_N


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


def own(which):
    """Some exchanges between neighbouring lanes give a lane its own number."""
    return lambda text: edits.replace(
        text, r"(shfl\.sync\.bfly\.b32[^;]*), 1, 31, -1", lambda found: f"{found[1]}, 0, 31, -1", which
    )


def later(size):
    """An address so many bytes on."""
    return lambda address: address + size


FAULTS = [
    *(
        fault("a row of the neighbour", f, Wrong, "numbers of group", **{"a.map": moved(1)})
        for f in ("rows", "gated", "turned", "gated_back")
    ),
    fault("64 of k too few", "turned", Wrong, "numbers of group", m=lambda m: m - 64),
    fault("64 of k too few, gated", "gated", Wrong, "in y", m=lambda m: m - 64),
    fault("rows past the end count", "outer", Wrong, "numbers of group", edits.replacing(("st.shared.v4", "//"))),
    *(
        fault(f"nobody waits for a stage, {f}", f, (Race, Undefined), "reads|nobody", without_waits("full"))
        for f in ("rows", "gated", "turned", "gated_back", "outer")
    ),
    *(
        fault(f"a stage is filled while it is read, {f}", f, (Race, Misuse), "writes|arrival", without_waits("empty"))
        for f in ("rows", "gated", "turned", "gated_back", "outer")
    ),
    *(
        fault(
            f"sums are read while products run, {f}",
            f,
            Race,
            "register",
            without(r"wgmma\.wait_group\.sync\.aligned\s+0"),
        )
        for f in ("rows", "gated", "gated_back")
    ),
    *(
        fault(f"the weight of the choice before, {f}", f, (Wrong, Undefined), said, weights=later(-4))
        for f, said in (("gated", "in inner|nobody"), ("gated_back", "in y|nobody"))
    ),
    *(
        fault(f"another limit, {f}", f, Wrong, said, limit=lambda limit: limit / 2)
        for f, said in (("gated", "in inner"), ("gated_back", "in y"))
    ),
    *(
        fault(f"channels of the row after, {f}", f, (Wrong, Undefined), "in inner|nobody", inner=later(2 * channels))
        for f, channels in (("gated", 256), ("gated_back", 512))
    ),
    fault("gates have no limit", "gated", Wrong, "in inner", edits.replacing(("min.NaN.f32", "max.NaN.f32"))),
    fault("gates that the neighbour made", "gated_back", (Wrong, Undefined), "in y|nobody", made=later(-2 * 2 * 512)),
    fault("a quad's lanes move nothing", "gated_back", Wrong, "in y", own(slice(0, 8))),
    fault("a sum of weights is of one lane", "gated_back", Wrong, "in of_weights", own(slice(-1, None))),
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
