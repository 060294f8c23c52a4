"""Steps of generation of q before its norm and RoPE: their meaning, which kernels run, and what a GPU answers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Cache, dsv4_decode, quantize_cache, reference
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._ops.rope import normed_then_turned, turned
from jax_dsv4_fmha.layers import DSV4Attention, Rope
from tests.helpers import normal

LENGTHS = [700, 130, 0, 5]
LAYOUTS = {"bf16": (None, None), "fp8": ("v4_fp8", "v4_fp8"), "fp4": ("v41_fp8", "v41_fp4")}


def step(heads, s_q=1, layouts=(None, None), window_alone=False, d=512, dtype=jnp.bfloat16):
    """A step, in parts: q, the caches, and how; three sequences and an idle place."""
    b, dims = len(LENGTHS), min(64, d // 2)
    q = 8 * normal(0, b, s_q, heads, d, dtype=dtype)
    entries = [0.125 * normal(i, b, room, d, dtype=dtype) for i, room in ((1, 175), (2, 175))]
    packed = (x if layout is None else quantize_cache(x, layout) for x, layout in zip(entries, layouts, strict=True))
    caches = [Cache(x, None, layout or "v4_fp8") for x, layout in zip(packed, layouts, strict=True)]
    lengths = jnp.array(LENGTHS, jnp.int32)
    positions = jnp.maximum(lengths, s_q)[:, None] + jnp.arange(-s_q, 0, dtype=jnp.int32)
    how = {"lengths": lengths, "sink": normal(3, heads), "rope_table": Rope(dims).table(positions)}
    if window_alone:
        return q, caches[:1], how
    past = np.maximum(np.array(LENGTHS) // 4, 1)
    chosen = np.random.default_rng(4).integers(0, past[:, None, None], (b, s_q, 70))
    return q, caches, how | {"ratio": 4, "indices": jnp.asarray(chosen, jnp.int32)}


def in_passes(how, eps, op=dsv4_decode):
    """The same by a norm, RoPE, attention, and RoPE back."""
    table, others = how["rope_table"], {name: x for name, x in how.items() if name != "rope_table"}

    def run(q, *caches):
        o, lse = op(turned(q, table, 1) if eps is None else normed_then_turned(q, table, eps), *caches, **others)
        return turned(o, table, -1), lse

    return run


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_norm_and_rope_are_those_apart(implementation, eps):
    q, caches, how = step(4, s_q=3, d=16, dtype=jnp.float32)
    how["implementation"] = implementation
    for x, y in zip(dsv4_decode(q, *caches, **how, norm_eps=eps), in_passes(how, eps)(q, *caches), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_norm_without_a_table():
    q, caches, how = step(4, d=16, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"dsv4_decode: norm_eps: got 0.1, wanted None without a rope_table"):
        dsv4_decode(q, *caches, lengths=how["lengths"], ratio=4, norm_eps=0.1)


def called(f, *operands):
    """The custom calls of a program for GPUs, in order."""
    text = f.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @dsv4_fmha_(\w+)", text)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize(
    "heads, kind, kernel",
    [(64, "bf16", "dsv4_decode"), (128, "fp8", "dsv4_decode"), (8, "fp4", "dsv4_decode"), (8, "bf16", None)],
)
def test_a_kernel_turns_where_it_is_made_for_the_heads(heads, kind, kernel, eps):
    """Few heads with unpacked caches have a kernel of their own, which does not turn."""
    q, caches, how = step(heads, s_q=2, layouts=LAYOUTS[kind])
    f = jax.jit(functools.partial(dsv4_decode, **how, norm_eps=eps))
    passes = ["rope" if eps is None else "norm_rope", "dsv4_decode", "rope"]
    assert sorted(called(f, q, *caches)) == sorted(["seen_slots", *([f"{kernel}_turned"] if kernel else passes)])


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_layers_step_has_no_pass_over_its_queries(dtype):
    layer = DSV4Attention(hidden=64, heads=64, q_rank=32, o_groups=2, o_rank=16)
    params, x = layer.init(jax.random.key(0), jnp.bfloat16), jnp.ones((2, 1, 64), jnp.bfloat16)
    f = jax.jit(lambda params, x, cache: layer.step(params, x, cache, lengths=7))
    attends = "mla_sparse_fwd_turned" if dtype == jnp.bfloat16 else "dsv4_decode_turned"
    assert called(f, params, x, layer.cache(2, 9, dtype)) == ["kv_insert", "seen_slots", attends]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "kind, heads, s_q, window_alone, eps",
    [
        ("bf16", 64, 1, False, 1e-2),
        ("bf16", 128, 3, False, 1e-2),
        ("bf16", 64, 1, True, 1e-2),
        ("bf16", 128, 40, False, None),  # keys of some queries are split
        ("fp8", 64, 1, False, 1e-2),
        ("fp8", 64, 2, True, 1e-2),
        ("fp8", 128, 40, False, 1e-2),
        ("fp4", 8, 3, False, None),
        ("fp4", 128, 1, False, None),
    ],
)
def test_a_kernel_turns_as_passes_do(kind, heads, s_q, window_alone, eps):
    """It rounds less: beside passes in float32 its error is no greater than that of passes in 16 bits."""
    if "sm_90a" not in library.local_architectures():
        pytest.skip("needs a kernel that turns q")
    q, caches, how = step(heads, s_q, LAYOUTS[kind], window_alone)
    runs = jax.jit(functools.partial(dsv4_decode, **how, norm_eps=eps)), jax.jit(in_passes(how, eps))
    assert any(name.endswith("_turned") for name in called(runs[0], q, *caches))
    wide = jax.jit(in_passes(how, eps, op=reference.dsv4_decode))
    want, got, apart = (f(x, *caches) for f, x in zip((wide, *runs), (q.astype(jnp.float32), q, q), strict=True))
    for exact, *given in zip(want, got, apart, strict=True):
        there = jnp.isfinite(exact)
        assert all((jnp.isfinite(x) == there).all() for x in given)
        error, of_passes = (jnp.linalg.norm(jnp.where(there, x.astype(jnp.float32) - exact, 0)) for x in given)
        assert error <= 1.05 * of_passes and error <= 1e-2 * jnp.linalg.norm(jnp.where(there, exact, 0))
