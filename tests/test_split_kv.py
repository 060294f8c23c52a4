"""The number of SMs for which keys are split."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest

from jax_dsv4_fmha import Cache, dsv4_decode, sparse_fmha
from jax_dsv4_fmha._host import attention, library, split_kv
from jax_dsv4_fmha._host.mode import PLAIN

from .helpers import every_kernel


def device(capability, **attributes):
    return types.SimpleNamespace(compute_capability=capability, **attributes)


def lists(q, *keys):
    """Operands of a raw call over lists of so many keys of pools, and a sink."""
    shapes = ((4096, q.shape[3]), None, q.shape[:2])
    of_lists = [shape or (*q.shape[:2], n) for n in keys for shape in shapes]
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (*of_lists, q.shape[2:3])]


def splits(op, q, *keys, packing=None):
    return attention.parts(op, PLAIN, q, lists(q, *keys), packing=packing).splits


@pytest.mark.parametrize(
    "devices, sms",
    [
        ([], 132),
        ([device("9.0", core_count=78)], 78),
        ([device("9.0", core_count=132), device("9.0", core_count=114)], 114),
        ([device("10.0", core_count=148)], 132),
        ([device("9.0")], 132),
    ],
    ids=["none", "H20", "the fewest", "another architecture", "not said"],
)
def test_the_devices_own_number_of_sms(monkeypatch, devices, sms):
    """Also in the call itself: one query of 64 heads and 8192 keys is split for that many."""
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    assert split_kv.processors("sm_90a") == sms
    facts = {"threads": 1, "registers": 1, "smem_bytes": 1, "spill_bytes": 0, "cubin_bytes": 1, "evidence": ""}
    facts |= {"tile_m": 64, "tile_n": 64, "unit": 1, "ctas": 1, "cluster": 1, "splits": True}
    choices = {"d": 512, "dtype": "bfloat16", "max_heads": library.ANY}
    row = library.BuiltVariant("k", "mla_sparse_fwd", "forward", "sm_90a", choices, **facts)
    monkeypatch.setattr(library, "variants", lambda: (row,))
    q = jax.ShapeDtypeStruct((40, 1, 64, 512), jnp.bfloat16)
    assert splits("mla_sparse_fwd", q, 8192) == split_kv.split_count(40, 128, 1, sms)


def test_fewer_sms_are_other_splits():
    assert len({split_kv.split_count(40, 128, 1, sms) for sms in (78, 114, 132)}) > 1


@pytest.mark.parametrize(
    ("row_tiles", "key_tiles", "unit", "splits"),
    [
        (1, 1, 2, 1),  # half a unit is one
        (1, 3, 2, 2),
        (1, 17, 2, 9),
        (1, 10, 2, 5),  # a unit each
        (2, 128, 2, 64),
        (1, 300, 2, 75),  # two units each: a merge of 150 would take longer
        (100, 300, 1, 5),  # 500 parts in four waves take less time than 100 whole ones in one
        (132, 300, 1, 1),
    ],
)
def test_keys_are_split_by_units(row_tiles, key_tiles, unit, splits):
    assert split_kv.split_count(row_tiles, key_tiles, unit, 132) == splits


@pytest.mark.rest
@pytest.mark.skipif("sm_100f" not in {v.arch for v in library.held()}, reason="Blackwell's kernels are not built")
@pytest.mark.parametrize(
    ("op", "b", "s_q", "heads", "keys", "tiles"),
    [
        ("dsv4_decode", 2, 1, 64, 640, 2),
        ("dsv4_decode", 2, 1, 65, 640, 4),  # a pair of CTAs a query
        ("mla_sparse_fwd", 1, 2, 300, 640, 12),
    ],
)
def test_a_pair_of_ctas_is_two_tiles_of_rows(monkeypatch, op, b, s_q, heads, keys, tiles):
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_100f",))
    monkeypatch.setattr(attention, "processors", lambda _: 148)
    q = jax.ShapeDtypeStruct((b, s_q, heads, 512), jnp.bfloat16)
    got = splits(op, q, 128, keys - 128, packing="") if op == "dsv4_decode" else splits(op, q, keys)
    assert got == split_kv.split_count(tiles, keys // 64, 1, 148) > 1
    kv = jax.ShapeDtypeStruct((b, 4096, 1, 512), jnp.bfloat16)
    few = jax.ShapeDtypeStruct((1, 1, 8, 512), jnp.bfloat16)  # rows that share their keys: a pair, whatever they are
    bounds = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    (_, of_span) = attention.parts("mla_span_fwd", PLAIN, few, (kv, bounds, bounds, bounds))
    assert of_span == split_kv.split_count(2, 64, 1, 148)


def test_a_program_without_a_device_is_made_for_hopper(monkeypatch):
    monkeypatch.setattr(library, "variants", every_kernel)
    monkeypatch.setattr(library, "local_architectures", lambda: ())
    q = jax.ShapeDtypeStruct((1, 1, 64, 512), jnp.bfloat16)
    assert attention._splitting("mla_sparse_fwd", q).arch == "sm_90a"


def test_without_a_backend(monkeypatch):
    def nothing(**_):
        raise RuntimeError("no such backend")

    monkeypatch.setattr(jax, "local_devices", nothing)
    assert split_kv.processors("sm_90a") == 132 and library.local_architectures() == ()


@pytest.mark.parametrize(
    ("queries", "tiles", "key_tiles", "whole", "splits"),
    [
        (266, 2, 18, 264, 18),  # 128 heads: 4 turns of 132 tiles, and 4 tiles in 18 parts each
        (284, 2, 18, 264, 3),
        (296, 2, 18, 0, 1),  # 64 tiles in two parts each would gain less than a launch costs
        (296, 1, 10, 0, 1),  # nor would 32 in four parts
        (134, 2, 18, 132, 18),
        (256, 2, 18, 0, 1),  # the last turn has 116 tiles
        (264, 2, 18, 0, 1),
        (60, 2, 18, 0, 1),  # no whole turn
        (33, 5, 18, 26, 3),  # turns do not end where queries do: 130 tiles, then 35
        (1, 500, 18, 0, 1),  # one query is not cut
    ],
)
def test_only_the_last_turn_is_split(queries, tiles, key_tiles, whole, splits):
    assert split_kv.whole_queries(queries, tiles, key_tiles, 1, 132) == whole
    assert split_kv.split_count((queries - whole) * tiles, key_tiles, 1, 132) == splits


@pytest.mark.skipif(not library.held(), reason="no kernels are built")
def test_a_step_splits_its_last_turn(monkeypatch):
    """34 sequences of two queries with 128 heads: 136 tiles, of which the last two queries' four are split."""
    monkeypatch.setattr(attention, "processors", lambda _: 132)
    cache = Cache.zeros(4, 64, 512, jnp.bfloat16, jnp.zeros((34, 16), jnp.int32), layout="v4_fp8")
    f = functools.partial(dsv4_decode, ratio=4, window=128, implementation="cubin")
    q, indices = jnp.zeros((34, 2, 128, 512), jnp.bfloat16), jnp.zeros((34, 2, 1024), jnp.int32)
    call = jax.jit(f).trace(q, cache, cache, lengths=jnp.full(34, 900), indices=indices)
    assert "tensor<2x1x128x18x512xf32>" in call.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(not library.held(), reason="no kernels are built")
@pytest.mark.parametrize(
    ("b", "heads", "d", "pool", "parts"),
    [
        (1, 64, 576, False, "4x1x64x16"),  # 4096 tiles: 31 turns of 132, and 4
        (1, 128, 576, False, "4x1x128x16"),
        (1, 64, 512, False, "4x1x64x16"),
        (2, 64, 576, True, "8x1x64x16"),
        (2, 64, 576, False, None),  # sequences with keys of their own
        (1, 16, 576, False, None),  # two CTAs run on an SM
    ],
)
def test_a_prompt_splits_its_last_turn(monkeypatch, b, heads, d, pool, parts):
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(attention, "processors", lambda _: 132)
    q, kv = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((b, 4096, heads, d), (b, 8192, d)[pool:]))
    indices = jax.ShapeDtypeStruct((b, 4096, 2048), jnp.int32)
    f = functools.partial(sparse_fmha, d_v=512, implementation="cubin")
    text = jax.jit(f).trace(q, kv, indices).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{parts}x512xf32>" in text if parts else "x512xf32>" not in text.replace("x0x512xf32>", "")


@pytest.mark.skipif(not library.held(), reason="no kernels are built")
@pytest.mark.parametrize(
    ("packing", "b", "heads", "whole"),
    [
        ("v4_fp8", 67, 128, 132),
        ("v4_fp8", 67, 64, 132),
        ("", 67, 64, 132),
        ("", 67, 16, 0),  # two CTAs run on an SM
    ],
)
def test_a_call_s_last_turn(monkeypatch, packing, b, heads, whole):
    monkeypatch.setattr(library, "local_architectures", lambda: ("sm_90a",))
    monkeypatch.setattr(attention, "processors", lambda _: 132)
    q = jax.ShapeDtypeStruct((b, 2, heads, 512), jnp.bfloat16)
    assert attention.parts("dsv4_decode", PLAIN, q, lists(q, 128, 1024), packing=packing).whole == whole
