import ctypes
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import os
import pkgutil
import re
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreter.kernels import native
from interpreter.kernels.attention import operands
from interpreter.kernels.launch import SWIZZLES
from interpreter.kernels.native import (
    Shape,
    addresses_of,
    called,
    function,
    heads_for,
    plan,
    plan_combine,
    variant_of,
)
from interpreter.machine.copies import TensorMap
from jax_dsv4_fmha import _host
from jax_dsv4_fmha._host import attention, call, library, split_kv
from jax_dsv4_fmha._host.call import TARGETS
from jax_dsv4_fmha._host.mode import PLAIN, Mode, name_of
from kernels import abi, calls, tables, targets
from kernels.abi import ANY, BACKWARD_OPS, FORWARD_OPS, Combine, Forward
from kernels.packings import PACKED, ROPE
from kernels.params import PAGES, TILING, gathers
from kernels.variants import KERNELS, VARIANTS
from tests.hopper_e4m3 import assert_right
from tests.oracle import HostStub

SHAPES = [
    Shape(b, s_q, s_kv, h_q, h_kv, 512, s_kv1, topk)
    for b, s_q, s_kv, h_q, h_kv, s_kv1, topk in [
        (1, 1, 1, 1, 1, 1, 1),
        (1, 3, 128, 5, 1, 1, 7),
        (2, 70, 333, 8, 1, 80, 512),
        (1, 4096, 4096, 128, 1, 1024, 1024),
        (1, 70_000, 128, 1, 1, 17_500, 1152),
        (4, 2, 300, 65, 1, 100_000, 192),
        (3, 129, 1, 200, 1, 2, 3),
        (3, 5, 1000, 8, 2, 0, 0),
        (3, 5, 1000, 200, 2, 0, 0),
        (2, 1000, 77, 16, 16, 0, 0),
        (1, 3, 64, 12, 4, 0, 0),
        (5, 129, 1, 300, 3, 0, 0),
    ]
]
FORWARD = [v for v in VARIANTS if isinstance(v, Forward)]
BUILT = native.built(Forward)
built = pytest.mark.parametrize("variant", BUILT, ids=lambda v: v.key)
ONE_OF_EACH_OP = {(v.name, v.packing): v for v in FORWARD if v.dtype == "bfloat16"}.values()
one_of_each_op = pytest.mark.parametrize("variant", ONE_OF_EACH_OP, ids=lambda v: v.key)


def has_kv_heads(op):
    """Whether the op's keys have an axis of KV heads: they are of one span."""
    return any("h_kv" in operand for operand in TARGETS[op]["operands"])


def shapes(op):
    given = [shape for shape in SHAPES if shape.h_kv == 1 or has_kv_heads(op)]
    return [x._replace(s_q=1, window=native.WINDOW) for x in given] if op.endswith("window") else given


def test_import_initialises_no_backend():
    code = (
        "import jax_dsv4_fmha; from jax._src import xla_bridge;"
        "assert not xla_bridge.backends_are_initialized(), 'a backend came up'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_what_is_shipped_is_what_is_built():
    """A library has all kernels of some architectures, or those that `make test` interprets."""
    for v in library.held():
        assert v.arch in library.shipped_for(v.op, **v.choices)
    held, here = [v.key for v in library.held()], {v.arch for v in library.held()}
    wanted = KERNELS["tested"] if library.manifest()["is_for_tests"] else VARIANTS
    assert held == [v.key for v in wanted if v.arch in here]
    assert library.shipped_for("mha_fwd", d=64, dtype="bfloat16") == ("sm_90a", "sm_100f")
    assert library.shipped_for("mha_fwd", d=63, dtype="bfloat16") == ()
    assert library.shipped_for("mha_fwd", d=64, dtype="float32") == ()


@pytest.mark.parametrize(
    ("capability", "arch"), [("8.9", "sm_89"), ("9.0", "sm_90a"), ("10.0", "sm_100f"), ("10.3", "sm_100f")]
)
def test_architecture(capability, arch):
    assert split_kv.architecture(capability) == arch


def test_the_package_knows_the_targets_of_the_abi_and_the_variants():
    """Also where there is no library: by files that `python -m kernels.tables` writes."""
    for path, text in tables.committed(VARIANTS).items():
        assert path.read_text() == text, f"{path.name}: run python -m kernels.tables"
    assert [v.key for v in library.SHIPPED] == [v.key for v in VARIANTS]
    assert list(TARGETS) == list(targets.described()) == [target.name for target in calls.TARGETS]


def test_a_mode_is_the_same_for_kernels_and_the_package():
    """Its fields, and the names of targets; a raw call takes an op and a mode."""
    assert [x.name for x in dataclasses.fields(Mode)] == [x.name for x in dataclasses.fields(abi.Mode)]
    assert all(name_of(v.op, native.raw_mode(v)) == v.name for v in VARIANTS)


def test_every_target_has_a_raw_call():
    modules = [importlib.import_module(f"{_host.__name__}.{x.name}") for x in pkgutil.iter_modules(_host.__path__)]
    raw = {name for module in modules for name, x in vars(module).items() if inspect.isfunction(x)}
    with_modes = {v.name for v in VARIANTS if v.op in (*FORWARD_OPS, *BACKWARD_OPS)}
    forms = re.compile("_shared_kv$|(?<=expert_product)_turned$")  # of one raw call
    assert {forms.sub("", name) for name in TARGETS if name not in with_modes} <= raw


@pytest.mark.parametrize("variant", {(v.name, v.packing): v for v in FORWARD}.values(), ids=lambda v: v.key)
def test_lowers_for_cuda_without_a_gpu(variant):
    f = jax.jit(functools.partial(function(variant), scale=0.125))
    arguments = operands(variant, s_q=70, h_q=8).arguments()
    lowered = f.trace(*arguments).lower(lowering_platforms=("cuda",))
    (call,) = (line for line in lowered.as_text().splitlines() if "custom_call" in line)
    assert f"@dsv4_fmha_{variant.name}(" in call
    assert "scale = 1.250000e-01 : f32" in call
    assert ("packing = " in call) == (variant.op == "dsv4_decode" or (variant.mode.d_v > 0 and "sparse" in variant.op))
    assert f'packing = "{variant.packing}"' in call or not variant.packing
    d_v = variant.mode.d_v or variant.d
    b, s_q, *_ = arguments[0].shape
    dtype, row = {"float16": "f16", "bfloat16": "bf16"}[variant.dtype], f"tensor<{b}x{s_q}x8x"
    o, lse = f"{row}{d_v}x{dtype}>", f"{row[:-1]}xf32>"
    assert re.search(rf"\({o}, {lse}, {row}(\d+)x{d_v}xf32>, {row}\1xf32>\)", call), call


@pytest.mark.parametrize(
    ("row_tiles", "key_tiles", "unit", "wanted"),
    [
        # the fastest splits on an H200: two, one, eight and sixteen sequences of two queries with 128 heads, 128 + 1024
        # keys
        (8, 18, 2, 9),
        (4, 18, 2, 9),
        (32, 18, 2, 3),
        (64, 18, 2, 2),
        (4, 10, 2, 5),  # two sequences with 64 heads, 128 + 512 keys
        (64, 10, 2, 1),  # thirty-two
        (4, 10, 1, 10),  # the same with few heads
        (64, 10, 1, 2),
        (32, 512, 2, 4),  # sixteen queries of 128 heads, 32768 keys
        (1, 1, 1, 1),
        (1, 3, 2, 2),
        (132, 10_000, 1, 1),
        (8192, 18, 2, 1),
    ],
)
def test_split_count(row_tiles, key_tiles, unit, wanted):
    assert attention.split_count(row_tiles, key_tiles, unit, 132) == wanted


def test_no_more_splits_than_units_of_keys_and_one_where_the_chip_is_full():
    for row_tiles, key_tiles, unit in itertools.product((1, 3, 40, 131, 132, 500), (1, 2, 7, 300), (1, 2)):
        splits = attention.split_count(row_tiles, key_tiles, unit, 132)
        assert 1 <= splits <= -(-key_tiles // unit)
        assert splits == 1 or row_tiles < 132


def span_of(q, s_kv):
    """The keys of one span for q, with one head, and a sink."""
    bounds = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    keys = jax.ShapeDtypeStruct((q.shape[0], s_kv, 1, q.shape[3]), q.dtype)
    return keys, bounds, bounds, jax.ShapeDtypeStruct(q.shape[2:3], jnp.float32)


def list_of(q, topk):
    """A pool, and lists of its keys."""
    pool, length = jax.ShapeDtypeStruct((4096, q.shape[3]), q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    return pool, jax.ShapeDtypeStruct((*q.shape[:2], topk), jnp.int32), length


def test_splits_by_what_is_built(monkeypatch):
    """By the tiles of one kernel; an extent that is not known, as in an exported batch, splits nothing."""
    extents = {"tile_m": 64, "tile_n": 64, "unit": 2, "threads": 1, "registers": 1, "smem_bytes": 1, "spill_bytes": 0}
    facts = {"ctas": 1, "cluster": 1, "splits": True, "cubin_bytes": 1, "evidence": "", **extents}
    choices = {"d": 512, "dtype": "bfloat16", "max_heads": ANY}
    row = library.BuiltVariant("k", "mla_span_fwd", "forward", "sm_90a", choices, **facts)
    q = jnp.zeros((1, 2, 64, 512), jnp.bfloat16)
    for variants, wanted in (
        ((row,), attention.split_count(2, 32, 2, 132)),
        ((dataclasses.replace(row, splits=False),), 1),
    ):
        monkeypatch.setattr(library, "variants", lambda variants=variants: variants)
        assert attention.parts("mla_span_fwd", PLAIN, q, span_of(q, 2048)).splits == wanted
        assert attention.parts("mha_fwd", PLAIN, q, (q, *span_of(q, 2048))).splits == 1
    few_heads = dataclasses.replace(row, op="dsv4_decode", tile_m=16, unit=1, choices={**choices, "max_heads": 16})
    monkeypatch.setattr(library, "variants", lambda: (row, few_heads))
    steps = jax.ShapeDtypeStruct((64, 1, 16, 512), jnp.bfloat16)
    splits = attention.parts("dsv4_decode", PLAIN, steps, (*list_of(steps, 128), *list_of(steps, 512))).splits
    assert splits == attention.split_count(64, 10, 1, 132) == 2
    (b,) = jax.export.symbolic_shape("b")
    prompts = jax.ShapeDtypeStruct((b, *q.shape[1:]), q.dtype)
    assert attention.parts("mla_span_fwd", PLAIN, prompts, span_of(prompts, 2048)).splits == 1


@pytest.mark.rest
@built
def test_a_call_gets_the_kernel_for_the_fewest_heads(variant):
    """Every kernel is built here, so the smallest that fits is known."""
    others = [
        v for v in FORWARD if (v.name, v.arch, v.d, v.dtype) == (variant.name, variant.arch, variant.d, variant.dtype)
    ]
    for h_q in (1, 8, 9, 16, 17, 32, 33, 128, 10_000):
        name = called(variant.key, h_q)
        assert (name is None) == (h_q > max(v.max_heads for v in others)), (h_q, name)
        assert (name == variant.key) == (heads_for(variant, h_q) == h_q), (h_q, name)


# The launch, against the DSL's own host stub.


@pytest.fixture(scope="module", params=[v for v in native.built(Forward) if v.dtype == "bfloat16"], ids=lambda v: v.key)
def stub(request, tmp_path_factory):
    if util.find_spec("cutlass") is None or shutil.which("gcc") is None:
        pytest.skip("needs nvidia-cutlass-dsl and gcc")
    return request.param, HostStub(request.param, tmp_path_factory.mktemp("oracle"))


def test_launch_is_what_the_host_stub_launches(stub):
    variant, host = stub
    row = next(row for row in library.manifest()["variants"] if row["key"] == variant.key)
    scale = 0.1
    addresses = {name: 0x7F00_0000_0000 + i * 0x1000_0000 for i, name in enumerate(addresses_of("forward"))}
    tiles = {name: row[name] for name in ("tile_m", "tile_n", "cluster")}
    for shape, processors, splits in itertools.product(shapes(variant.name), (1, 132), (1, 3)):
        if splits > 1 and not variant.splits:
            continue
        shape = shape._replace(d=variant.d, splits=splits, d_v=variant.mode.d_v)
        if variant.sources[0] in PAGES:  # of 64, 32 and 8 keys a box
            page = (64, 96, 8)[shape.s_kv % 3]
            shape = shape._replace(s_kv=-(-shape.s_kv // page) * page, page=page, pages=shape.b + 5)
        values = host_values(shape, scale, processors, addresses, variant.sources[0] in PACKED)
        if splits > 1:
            values["lse"] = values["lse_parts"]
        theirs = host.run(values)
        ours = plan(variant, shape, scale, **tiles, processors=processors, addresses=addresses)
        assert theirs.grid == (ours.grid, 1, 1), shape
        assert theirs.block == (row["threads"], 1, 1)
        assert theirs.cluster == (row["cluster"], 1, 1)
        assert theirs.smem_bytes == row["smem_bytes"]
        assert [len(x) for x in ours.params.values()] == [len(x) for x in theirs.params]
        for (name, mine), its in zip(ours.params.items(), theirs.params, strict=True):
            if (spec := ours.maps.get(name)) is not None:
                its_map = TensorMap.decode(its)
                assert its_map.address == ours[name]
                assert its_map.extents == tuple(spec.extents[: spec.rank])
                assert its_map.strides == tuple(spec.strides[: spec.rank - 1])
                is_code = name.startswith(("k", "v")) and "e4m3" in variant.sources[0]
                assert (its_map.swizzle, its_map.atom) == (SWIZZLES[spec.swizzle], 16) == (0 if is_code else 128, 16)
                box = tuple(spec.box[: spec.rank])
                if spec.rank == 5:  # q and o: the stub's box is a constant; ours shrinks with a small shape
                    assert its_map.box[0] == box[0] == 64
                    assert math.prod(box[1:]) <= math.prod(its_map.box[1:])
                elif variant.sources[0] in PAGES:  # the stub's is the least one
                    columns = variant.d if is_code else 64
                    assert (its_map.box, box) == ((columns, 8, 1, 1), (columns, ours["box0"], 1, 1))
                else:
                    assert its_map.box == box
            elif name == "scale_log2":  # whose product may be rounded differently in the last bit
                assert struct.unpack("<f", mine) == pytest.approx(struct.unpack("<f", its), rel=2e-7)
            else:
                assert mine == its, (name, shape)


@pytest.mark.parametrize("tile_n, keys", [(144, 16), (128, 64), (64, 64)])
def test_boxes_divide_a_page_and_a_tile(tile_n, keys):
    for page in (8, 24, 64, 192):
        launch = plan("mha_fwd_paged_window", Shape(2, 1, 20 * page, 8, 2, 64, page=page, window=90), tile_n=tile_n)
        boxes = launch["box0"], *(launch.maps[x].box[1] for x in ("k0.map", "v0.map"))
        assert boxes == (min(keys, page & -page),) * 3, page


@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
def test_merging_is_what_the_host_stub_launches(shape, combine_stub):
    if (row := next((v for v in library.held() if v.family == "combine"), None)) is None:
        pytest.skip("not built")
    addresses = {name: 0x7F00_0000_0000 + i * 0x1000_0000 for i, name in enumerate(addresses_of("forward"))}
    shape = shape._replace(splits=5)
    theirs = combine_stub.run(host_values(shape, 1.0, 132, addresses))
    ours = plan_combine(shape, threads=row.threads, tile_n=row.tile_n, addresses=addresses)
    assert (theirs.grid, theirs.block) == ((ours.grid, 1, 1), (row.threads, 1, 1))
    assert theirs.params == tuple(ours.params.values())


@pytest.mark.parametrize(
    ("rows", "processors", "smem"), [(264, 132, 0), (265, 132, 48 << 10), (528, 132, 48 << 10), (529, 132, 0)]
)
def test_few_ctas_of_a_merge_are_spread_over_the_chip(rows, processors, smem):
    """Of 128 threads, one a row of d 512: with so much shared memory, a processor takes four of them."""
    shape = Shape(1, 1, 64, rows, 1, 512, splits=2)
    assert plan_combine(shape, processors=processors).least_smem_bytes == smem


@pytest.fixture(scope="module")
def combine_stub(tmp_path_factory):
    if util.find_spec("cutlass") is None or shutil.which("gcc") is None:
        pytest.skip("needs nvidia-cutlass-dsl and gcc")
    return HostStub(next(v for v in VARIANTS if isinstance(v, Combine)), tmp_path_factory.mktemp("combine"))


def host_values(shape, scale, processors, addresses, packed=False):
    """The values that a kernel's host side may ask for, by the names that they have there."""
    pointers = {name: ctypes.c_void_p(x) for name, x in addresses.items()}
    ints = {name: ctypes.c_int32(x) for name, x in shape._asdict().items()}
    return {
        **pointers,
        **ints,
        "s_kv0": ints["s_kv"],
        **dict.fromkeys(("topk0", "topk1"), ints["topk"]),
        "s_batch0": ints["page" if packed else "s_kv"],
        "s_batch1": ints["page" if packed else "s_kv1"],
        "ctas": ctypes.c_int32(processors),
        "scale_log2": ctypes.c_float(scale * math.log2(math.e)),
        "eps": ctypes.c_float(native.EPS),
        "stream": ctypes.c_void_p(),
    }


@pytest.mark.parametrize("op", FORWARD_OPS)
@pytest.mark.parametrize(("tile_m", "cluster"), [(64, 1), (128, 1), (64, 2)])
def test_tiles_cover_every_row_once(op, tile_m, cluster):
    """By the definition of a tile: its box of rows, cut at the extents. The CTAs of a cluster have neighbouring
    tiles.
    """
    if cluster > 1 and not gathers(FORWARD_OPS[op]):
        pytest.skip("tiles hold heads of several queries")
    for shape in shapes(op):
        launch = plan(op, shape, tile_m=tile_m, cluster=cluster)
        s_q, group, h_kv, inner, outer, box_inner, box_outer, tiles_inner, tiles_outer, pairs, splits = (
            launch[param.name] for param in TILING
        )
        assert (launch.grid, splits) == (min(tiles_inner * tiles_outer * pairs * cluster, 132), 1)
        assert 1 <= box_inner * box_outer <= tile_m
        assert inner * outer == s_q * group == shape.s_q * shape.h_q // h_kv
        assert pairs == h_kv * shape.b
        assert (tiles_inner - 1) * cluster * box_inner < inner <= tiles_inner * cluster * box_inner
        assert (tiles_outer - 1) * box_outer < outer <= tiles_outer * box_outer
        queries = {o + i // group for o, i in itertools.product((0, outer - 1), (0, inner - 1))}
        assert (min(queries), max(queries)) == (0, s_q - 1)
        if gathers(FORWARD_OPS[op]):  # one query a tile
            assert (inner, box_outer) == (group, 1)


@pytest.mark.parametrize(
    ("s_q", "splits", "rows"),
    [(9, 1, 9), (1024, 1, 64), (1025, 1, 128), (2048, 1, 128), (2049, 1, 192), (512, 2, 64), (513, 2, 128)],
)
def test_few_rows_are_cut_into_small_tiles(s_q, splits, rows):
    """With 8 heads, 132 processors have 16 tiles each."""
    launch = plan("mla_span_fwd", Shape(1, s_q, 4096, 8, 8, 128, splits=splits), tile_m=192)
    assert (launch["box_inner"], launch["box_outer"]) == (1, rows)


@pytest.mark.parametrize(
    ("change", "scale", "says"),
    [
        ({"h_q": 7, "h_kv": 2}, 1.0, "h_q is 7, wanted a multiple of h_kv = 2"),
        ({"s_kv": 0}, 1.0, "s_kv is 0, wanted at least 1"),
        ({"s_q": 2**31}, 1.0, "s_q is 2147483648, the limit is 2147482624"),
        ({"s_q": 2**28}, 1.0, r"s_q \* h_q is 2147483648"),
        (
            {"b": 2**18, "s_q": 2**20, "h_q": 4, "h_kv": 4},
            1.0,
            "too many tiles of rows: 16384 x 4 KV heads x 262144 sequences",
        ),
        ({"s_kv": 2**31 - 1024, "h_kv": 8}, 1.0, r"s_kv \* h_kv is"),
        ({"s_kv1": 0}, 1.0, "s_kv of the second keys is 0, wanted at least 1"),
        ({"topk": 0}, 1.0, "topk is 0, wanted at least 1"),
        ({"topk": 2**31 - 1}, 1.0, "topk is 2147483647, the limit is"),
        ({"h_q": 0}, 1.0, "h_q is 0, wanted at least 1"),
        ({}, math.nan, "scale is nan, wanted a finite number > 0"),
        ({}, math.inf, "scale is inf"),
        ({}, 0.0, "scale is 0"),
    ],
)
def test_plan_refuses(change, scale, says):
    shape = Shape(1, 16, 16, 8, 1, 64, s_kv1=16, topk=4)._replace(**change)
    op = "mla_span_fwd" if shape.h_kv > 1 else "csa_fwd" if "topk" in change else "hca_fwd"
    with pytest.raises(ValueError, match=says):
        plan(op, shape, scale)


def test_plan_takes_shapes_beyond_32_bit_addresses():
    shape = Shape(2, 70_000, 1_000_000, 128, 1, 512, s_kv1=10_000_000, topk=2048)
    maps = plan(variant_of("hca_fwd_sm_90a_d512_bfloat16"), shape).maps
    assert maps["q.map"].strides[3] == maps["o.map"].strides[3] == 70_000 * 128 * 512 * 2
    assert [maps[f"cut_k{i}.map"].strides[3] for i in range(2)] == [1_000_000 * 512 * 2, 10_000_000 * 512 * 2]
    gathered = plan(variant_of("csa_fwd_sm_90a_d512_bfloat16"), shape)  # so none of its keys has a map
    assert list(gathered.maps) == ["q.map", "o.map"]
    by_tma = plan(variant_of("csa_fwd_sm_100f_d512_bfloat16"), shape).maps  # rows of all batch entries
    assert {name: tuple(x.extents[:2]) for name, x in by_tma.items()} == {
        "k0.map": (512, 2_000_000),
        "k1.map": (512, 20_000_000),
    }
    with pytest.raises(ValueError, match=r"b \* s_kv is 2200000000, the limit is 2147482624"):
        plan("csa_fwd", shape._replace(b=2200))


# On a GPU.


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.usefixtures("cuda")(test))


def check(variant, device=None, *, h_q=8, **extents):
    """With h_q heads, or the nearest number that the variant takes. Skips a variant for another architecture."""
    if variant.arch not in (local := library.local_architectures()):
        pytest.skip(f"is for {variant.arch}, here is {', '.join(local)}")
    x, scale = operands(variant, h_q=heads_for(variant, h_q), **extents), variant.d**-0.5
    f = jax.jit(functools.partial(function(variant), scale=scale))
    assert_right(jax.tree.map(np.asarray, f(*jax.device_put(x.arguments(), device))), x, scale)


@on_gpu
@built
def test_runs(variant):
    check(variant)
    check(variant, h_q=3, s_q=1, b=5, s_kv=1, s_kv1=1, topk=1)
    check(variant, h_q=65, s_q=20)
    if has_kv_heads(variant.name):
        check(variant, h_q=8, h_kv=2)


@on_gpu
@built
@pytest.mark.parametrize("splits", [2, 9])
def test_runs_split(variant, splits, monkeypatch):
    """More splits than most rows have key tiles."""
    if not variant.splits:
        pytest.skip("splits no keys")
    monkeypatch.setattr(attention, "split_count", lambda *_: splits)
    check(variant, s_q=3)
    check(variant, h_q=128, s_q=2, s_kv=400, s_kv1=500, topk=300)


@on_gpu
@pytest.mark.parametrize("variant", [v for v in BUILT if v.op.startswith("dsv4_decode")], ids=lambda v: v.key)
def test_runs_with_the_last_queries_split(variant, monkeypatch):
    if not variant.splits:
        pytest.skip("splits no keys")
    monkeypatch.setattr(attention, "_whole", lambda *_: 6)
    monkeypatch.setattr(attention, "split_count", lambda *_: 3)
    h_q = heads_for(variant, 128)
    check_pools(variant, operands(variant, b=5, h_q=h_q, s_q=2, s_kv=400, s_kv1=500, topk=300))


@on_gpu
@pytest.mark.parametrize(
    "variant", [v for v in BUILT if v.op in ("mla_sparse_fwd", "dsv4_decode")], ids=lambda v: v.key
)
def test_runs_on_a_pool_of_all_sequences(variant):
    check_pools(variant, operands(variant, h_q=heads_for(variant, 64), s_q=3))


def check_pools(variant, x):
    """With the keys of all sequences in a pool of each source."""
    if variant.arch not in (local := library.local_architectures()):
        pytest.skip(f"is for {variant.arch}, here is {', '.join(local)}")
    pools, scale = [], variant.d**-0.5
    for keys in x.sources:
        if keys.pool is not None:
            pools += [keys.pool, keys.seen_from, keys.seen_to]
            continue
        b, s_kv, _, d = keys.k.shape
        there = (keys.seen_from >= 0) & (keys.seen_from < s_kv)
        slots = np.where(there, keys.seen_from + s_kv * np.arange(b)[:, None, None], -1).astype(np.int32)
        pools += [keys.k.reshape(b * s_kv, d), slots, keys.seen_to]
    got = jax.jit(functools.partial(function(variant), scale=scale))(x.q, *pools, x.sink)
    assert_right(jax.tree.map(np.asarray, got), x, scale)


@on_gpu
@built
def test_runs_on_every_device(variant):
    for device in jax.local_devices(backend="cuda"):
        check(variant, device)


@on_gpu
@one_of_each_op
def test_runs_from_eight_threads(variant):
    x = jax.device_put(operands(variant).arguments())
    f = jax.jit(functools.partial(function(variant), scale=0.1))

    def run(_):
        return jax.block_until_ready(f(*x))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(64)))
    for result in results:
        assert all(map(jnp.array_equal, result, results[0]))


@on_gpu
def test_runs_inside_cuda_graphs():
    """Runs in a process of its own, with every op that can go into a command buffer."""
    code = """
import functools, jax, numpy as np
from jax_dsv4_fmha._host import library
from tests import test_ffi
for variant in test_ffi.ONE_OF_EACH_OP:
    if variant.arch not in library.local_architectures():
        continue
    test_ffi.check(variant)
    x = test_ffi.operands(variant, h_q=test_ffi.heads_for(variant, 8))
    x = jax.device_put(x.arguments())
    f = jax.jit(functools.partial(test_ffi.function(variant), scale=0.1))
    first = jax.tree.map(np.asarray, f(*x))
    for _ in range(3):
        again = jax.tree.map(np.asarray, f(*jax.tree.map(jax.numpy.copy, x)))
        assert all(map(np.array_equal, first, again))
"""
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    path = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), os.getcwd()])
    env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


@on_gpu
@one_of_each_op
def test_unknown_variant_lists_what_is_built(variant):
    x = operands(dataclasses.replace(variant, d=96)).arguments()
    if variant.mode.is_e4m3:  # whose keys say what d is: codes, RoPE's numbers in bfloat16, and a unit
        of_rope = 2 * ROPE if variant.mode.keeps_rope else 0
        of_d, of_kernel = (d + of_rope + abi.UNIT_BYTES for d in (96, 512))
        says = rf"window_kv: got shape \[2, \d+, {of_d}\], wanted \[2, \d+, {of_kernel}\]"
        with pytest.raises(ValueError, match=says):
            function(variant)(*x, scale=0.1)
        return
    says = rf"UNIMPLEMENTED: .*{variant.name}: no kernel for d=96, dtype=BF16.* on sm_\d+a?; built: .*{variant.key}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(function(variant)(*x, scale=0.1))


REFUSED = [  # what is wrong with an operand: while tracing, or None; and when the call runs, where that is not the same
    ("mha_fwd", "k", lambda x: x[0], r"k: got shape \[150, 1, 64\], wanted \[b, s_kv, h_kv, d\]"),
    ("mha_fwd", "k", lambda x: x[:1], r"k: got shape \[1, 150, 1, 64\], wanted \[2, 150, 1, 64\]"),
    ("mha_fwd", "v", lambda x: x[:, :9], r"v: got shape \[2, 9, 1, 64\], wanted \[2, 150, 1, 64\]"),
    ("mha_fwd", "k", lambda x: x.astype(np.float16), "k: got F16, wanted BF16 like q"),
    ("mha_fwd", "start", lambda x: x[:, :3], r"start: got shape \[2, 3\], wanted \[2, 70\]"),
    ("mha_fwd", "sink", lambda x: x[:3], r"sink: got shape \[3\], wanted \[8\]"),
    ("mha_fwd", "sink", lambda x: x.astype(jnp.bfloat16), "sink: got BF16, wanted F32"),
    ("mla_sparse_fwd", "kv", lambda x: x[:, :, None], r"kv: got .* wanted \[b, s_kv, d\]"),
    ("mla_sparse_fwd", "kv", lambda x: x[..., :64], r"kv: got shape \[2, 150, 64\], wanted \[2, 150, 512\]"),
    ("mla_sparse_fwd", "kv", lambda x: x[:, :0], (None, "s_kv is 0, wanted at least 1")),
    ("mla_sparse_fwd", "indices", lambda x: x[0], r"indices: got shape \[70, 100\], wanted \[b, s_q, topk\]"),
    ("mla_sparse_fwd", "indices", lambda x: x[..., :0], (None, "topk is 0, wanted at least 1")),
    ("mla_sparse_fwd", "indices", lambda x: x[:, 1:], r"indices: got shape \[2, 69, 100\], wanted \[2, 70, 100\]"),
    ("mla_sparse_fwd", "length", lambda x: x[:, 1:], r"length: got shape \[2, 69\], wanted \[2, 70\]"),
    ("csa_fwd", "window_kv", lambda x: x[:1], r"window_kv: got shape \[1, 150, 512\]"),
    ("csa_fwd", "kv", lambda x: x.astype(np.float16), "kv: got F16, wanted BF16 like q"),
    ("csa_fwd", "length", lambda x: x.astype(np.float32), "length: got F32, wanted S32"),
    ("hca_fwd", "kv", lambda x: x[:, :0], (None, "s_kv of the second keys is 0")),
    ("hca_fwd", "start2", lambda x: x[:1], r"start2: got shape \[1, 70\], wanted \[2, 70\]"),
    ("hca_fwd", "stop2", lambda x: x[:1], r"stop2: got shape \[1, 70\], wanted \[2, 70\]"),
]


def wrong(op, operand, change):
    """Arguments of a raw call, one of them changed."""
    variant = next(v for v in FORWARD if (v.name, v.dtype) == (op, "bfloat16"))
    x, names = list(operands(variant).arguments()), [text.split(":")[0] for text in TARGETS[op]["operands"]]
    x[names.index(operand)] = change(x[names.index(operand)])
    return x


@pytest.mark.parametrize(("op", "operand", "change", "says"), [row for row in REFUSED if row[3][0] is not None])
def test_a_raw_call_refuses_operands(op, operand, change, says):
    """While tracing, by `_host/targets.json`."""
    x, says = wrong(op, operand, change), says if isinstance(says, str) else says[0]
    with pytest.raises(ValueError, match=f"{op}: {says}"):
        jax.eval_shape(functools.partial(attention.attention, op, PLAIN, scale=0.1), *x)


def test_a_raw_call_takes_extents_that_are_not_known():
    b, n = jax.export.symbolic_shape("b, n")
    shapes = {"bfloat16": [(b, 4, 8, 64), (2, n, 1, 64)], "int32": [(b, 4), (n, 4)], "float32": [(8,)]}
    x = [jax.ShapeDtypeStruct(shape, dtype) for dtype, of_dtype in shapes.items() for shape in of_dtype]
    o, lse = jax.eval_shape(functools.partial(attention.attention, "mla_span_fwd", PLAIN, scale=0.1), *x)
    assert (o.shape, lse.shape) == ((b, 4, 8, 64), (b, 4, 8))


@on_gpu
@pytest.mark.parametrize(("op", "operand", "change", "says"), REFUSED)
def test_handler_refuses_operands(op, operand, change, says, monkeypatch):
    """A call that bypasses the code that counts splits from valid shapes, and the check while tracing."""
    monkeypatch.setattr(call, "check", lambda *_: None)
    monkeypatch.setattr(attention, "parts", lambda *_, **__: attention.Parts(0, 1))
    x, says = wrong(op, operand, change), says if isinstance(says, str) else says[1]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"(?s)INVALID_ARGUMENT: .*{says}"):
        jax.block_until_ready(attention.attention(op, PLAIN, *x, scale=0.1))
