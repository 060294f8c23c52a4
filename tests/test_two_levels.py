"""The indexer's choice in two levels, of DeepSeek-V4.1: blocks of entries, then entries within them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dsv4_fmha as lib
from jax_dsv4_fmha import Quantized, Span, indexer_blocks, indexer_scores, lightning_indexer
from jax_dsv4_fmha._definitions import indexer as definition
from jax_dsv4_fmha._dispatch import two_levels
from jax_dsv4_fmha._host import indexer as raw
from jax_dsv4_fmha._host import library
from tests.test_indexer import S_C, S_Q, B, chosen_by_loop, kernel_operands, operands, past, scores_by_loop


@pytest.mark.parametrize("count", [1, 3, 9])
def test_chooses_what_a_loop_chooses(count):
    """Blocks of 4 by their greatest entry, always with the newest; entries within them."""
    q, k, weights = operands()
    offset, block = jnp.array([2, 60], jnp.int32), 4
    visible, s = past(2, offset), scores_by_loop(q, k, weights)
    greatest, some = np.full((B, S_Q, 6), -np.inf), np.zeros((B, S_Q, 6), bool)
    for n, i, j in zip(*np.nonzero(visible), strict=True):
        some[n, i, j // block] = True
        greatest[n, i, j // block] = max(greatest[n, i, j // block], s[n, i, j])
    for n, i in np.ndindex(B, S_Q):
        if visible[n, i].any():
            greatest[n, i, np.flatnonzero(visible[n, i])[-1] // block] = np.inf
    seen = {"span": Span.compressed(S_Q, 2, offset)}
    blocks = indexer_blocks(q, k, weights, count=count, block=block, **seen)
    np.testing.assert_array_equal(blocks, chosen_by_loop(greatest, some, count))
    within = (np.asarray(blocks)[..., None] == np.arange(S_C) // block).any(2)
    got = lightning_indexer(q, k, weights, topk=5, blocks=blocks, block=block, **seen)
    np.testing.assert_array_equal(got, chosen_by_loop(s, visible & within, 5))


def parts():
    """Operands, the entries from `start` to `stop` that each query sees, and their scores by a loop."""
    q, k, weights = operands()
    start = np.array([[0, 3, 3, 5, 9, 23], [7, 7, 2, 2, 11, 0]], np.int32)
    stop = np.array([[9, 3, 23, 6, 22, 23], [16, 22, 23, 7, 12, 23]], np.int32)
    return (q, k, weights), start, stop, scores_by_loop(q, k, weights)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_blocks_from_the_first_entry_that_a_query_sees(count):
    """Each query's are those of its entries alone, if these are of its own packed sequence."""
    x, start, stop, s = parts()
    block, topk = 4, 5
    of_sequences = Span.compressed_segments(jnp.zeros((1, 1), jnp.int32), 1).rules
    how = {"span": Span(jnp.asarray(start), jnp.asarray(stop), of_sequences), "block": block}
    blocks = indexer_blocks(*x, count=count, **how)
    got = lightning_indexer(*x, topk=topk, blocks=blocks, **how)
    for n, i in np.ndindex(B, S_Q):
        own = s[n, i, start[n, i] : stop[n, i]]
        greatest = [own[j : j + block].max() for j in range(0, len(own), block)]
        best = sorted(range(len(greatest)), key=lambda j: (j != len(greatest) - 1, -greatest[j], j))[:count]
        np.testing.assert_array_equal(blocks[n, i], sorted(best) + [-1] * (count - len(best)))
        seen = np.isin(np.arange(len(own)) // block, best)[None, None]
        chosen = chosen_by_loop(own[None, None], seen, topk)[0, 0]
        np.testing.assert_array_equal(got[n, i], np.where(chosen < 0, -1, chosen + start[n, i]))


@pytest.mark.parametrize("from_start", [False, True])
def test_composition_of_kernels(from_start, monkeypatch):
    """What kernels are given, and what is made of their results, with definitions in their place."""

    def indexer_scores(q, weights, k, k_scale, start, stop, skip):
        s = definition.scores(q, k, weights) * k_scale[:, None]
        j = jnp.arange(-(-s.shape[2] // 32) * 32)
        s = jnp.pad(s, ((0, 0), (0, 0), (0, len(j) - s.shape[2])), constant_values=7.0)
        seen = (start[..., None] <= j) & (j < stop[..., None]) & ((stop - start)[..., None] > skip)
        return jnp.where(seen, s, jnp.where(j % 2, 1e9, jnp.nan))  # anything

    def indexer_topk(scores, start, stop, topk, return_scores=False):
        j = jnp.arange(scores.shape[2])
        return definition.best(scores, (start[..., None] <= j) & (j < stop[..., None]), topk)

    (q, k, weights), start, stop, _ = parts()
    for name, f in (("indexer_scores", indexer_scores), ("indexer_topk", indexer_topk)):
        monkeypatch.setattr(raw, name, f)
    monkeypatch.setattr(raw, "indexer_scores_at", lambda q, k, w, i: definition.scores_at(q, k, w, i))
    how, scale, bounds = (
        {"block": 4, "from_start": from_start},
        jnp.ones((B, S_C)),
        (jnp.asarray(start), jnp.asarray(stop)),
    )
    for count in (1, 2, 5):
        (got,) = two_levels.greatest_blocks(q, weights, k, scale, *bounds, count=count, **how)
        (want,) = definition.greatest_blocks(q, weights, k, scale, *bounds, count=count, **how)
        np.testing.assert_array_equal(got, want)
        seen = q, weights, k, scale, want, *bounds
        within = two_levels.choose_within(q, weights, k, scale, want, *bounds, topk=3, **how)
        np.testing.assert_array_equal(within[0], definition.select_within(*seen, topk=3, **how)[0])


@pytest.mark.parametrize("from_start", [False, True])
def test_composition_of_kernels_for_blocks(from_start, monkeypatch):
    """What the kernels that judge blocks and list their entries are given, with definitions in their place."""
    block = 4

    def indexer_blocks(q, weights, k, k_scale, start, stop, oldest, newest, count):
        s = definition.scores(q, k, weights) * k_scale[:, None]
        s = jnp.where(jnp.arange(s.shape[2]) >= start[..., None], s, -jnp.inf)
        greatest = jnp.pad(s, ((0, 0), (0, 0), (0, -s.shape[2] % block))).reshape(*s.shape[:2], -1, block).max(-1)
        j = jnp.arange(greatest.shape[2])
        greatest = jnp.where((stop - start)[..., None] > block * count, greatest, jnp.nan)  # else anything
        return definition.best(greatest, (oldest[..., None] <= j) & (j < newest[..., None]), count)[0]

    def indexer_within(q, weights, k, k_scale, blocks, start, first, last, topk, from_start):
        base = start if from_start else jnp.zeros_like(start)
        entries = base[..., None, None] + blocks[..., None] * block + jnp.arange(block)
        entries = jnp.where(blocks[..., None] < 0, -1, entries).reshape(*start.shape, -1)
        (s,) = definition.scores_at(q, k, weights, entries)
        j = jnp.arange(s.shape[2])
        return definition.best(s, (first[..., None] <= j) & (j < last[..., None]), topk)

    (q, k, weights), start, stop, _ = parts()
    monkeypatch.setattr(raw, "BLOCK", block)
    monkeypatch.setattr(two_levels, "for_all", lambda op, **choices: True)
    for f in (indexer_blocks, indexer_within):
        monkeypatch.setattr(raw, f.__name__, f)
    operands = q, weights, k, jnp.ones((B, S_C))
    bounds = jnp.asarray(start), jnp.asarray(stop)
    for count in (1, 2, 5):
        how = {"block": block, "from_start": from_start}
        (want,) = definition.greatest_blocks(*operands, *bounds, count=count, **how)
        if not from_start:
            (got,) = two_levels.greatest_blocks(*operands, *bounds, count=count, **how)
            np.testing.assert_array_equal(got, want)
        got = two_levels.choose_within(*operands, want, *bounds, topk=3, **how)
        wanted = definition.select_within(*operands, want, *bounds, topk=3, **how)
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_allclose(got[1], wanted[1], rtol=1e-5)


TARGETS = ("indexer_blocks", "indexer_within", "indexer_scores", "indexer_scores_at", "indexer_topk")


@pytest.mark.parametrize(
    ("s_q", "b", "here"), [(37, 2, ()), (37, 2, ("sm_90a",)), (5000, 1, ("sm_90a",)), (37, "b", ())]
)
def test_export_for_cuda(s_q, b, here, monkeypatch):
    """Scores are half a GiB at most, and on Hopper a level is a custom call. A program that is made where no device is
    has no kernel that an architecture lacks."""
    monkeypatch.setattr(library, "local_architectures", lambda: here)

    def f(q, k, weights):
        seen = {"span": Span.compressed(s_q, 1, 65536), "implementation": "cubin"}
        blocks = indexer_blocks(q, k, weights, count=2048, **seen)
        return lightning_indexer(q, k, weights, topk=512, blocks=blocks, **seen)

    (n,) = jax.export.symbolic_shape("b") if b == "b" else (b,)
    of = ((s_q, 32, 128), jnp.bfloat16), ((65536, 128), jnp.bfloat16), ((s_q, 32), jnp.float32)
    shapes = [jax.ShapeDtypeStruct((n, *shape), dtype) for shape, dtype in of]
    text = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=lib.EXPORT_CHECKS)(*shapes).mlir_module()
    calls = {t: text.count(f"custom_call @dsv4_fmha_{t}(") for t in TARGETS}
    second = ("indexer_within",) if here else ("indexer_scores_at", "indexer_topk")
    assert calls == dict.fromkeys(TARGETS, 0) | dict.fromkeys(("indexer_blocks", *second), 1)
    if s_q == 5000:
        sizes = [math.prod(map(int, x.split("x"))) for x in re.findall(r"tensor<([0-9x]+)xf32>", text)]
        assert 2**25 < max(sizes) <= 2**27


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("h", "dtype", "count"),
    [
        *((h, t, 20) for h in (32, 64) for t in (jnp.bfloat16, jnp.float8_e4m3fn)),
        *((32, jnp.bfloat16, count) for count in (1, 90)),
    ],
)
def test_kernels(cuda, h, dtype, count, monkeypatch):
    """Blocks and entries exactly by the kernels' own scores of all entries, which
    `tests/test_indexer.py` compares with the reference; several blocks of queries, NaN, spans that begin
    and end within a block."""
    s_q, s_c, block, topk = 37, 600, 8, 24
    with jax.default_device(cuda):
        monkeypatch.setattr(raw, "WORKSPACE", 4 * 2 * 640 * 16)
        q, k, weights = kernel_operands(dtype, s_q=s_q, s_c=s_c, h=h)
        codes = k.codes if isinstance(k, Quantized) else k
        codes = codes.at[:, jnp.array([8, 9, 10, 11, 12, 13, 14, 15, 100])].set(jnp.nan)
        x = q, Quantized(codes, k.scales) if isinstance(k, Quantized) else codes, weights
        rng = np.random.default_rng(8)
        start = rng.integers(0, 300, (2, s_q)).astype(np.int32)
        stop = np.minimum(start + rng.integers(-5, 500, (2, s_q)), s_c).astype(np.int32)
        start[:, :3], stop[:, :2], stop[:, 2] = 0, s_c, 100
        seen = {"span": Span(jnp.asarray(start), jnp.asarray(stop)), "implementation": "cubin"}
        visible = (start[..., None] <= np.arange(s_c)) & (np.arange(s_c) < stop[..., None])

        everything, values = map(np.asarray, lightning_indexer(*x, topk=s_c, return_scores=True, **seen))
        scores = np.full((2, s_q, s_c), -np.inf, np.float32)
        n, i, j = np.nonzero(everything >= 0)
        scores[n, i, everything[n, i, j]] = values[n, i, j]
        nothing = np.where(visible & ~np.isnan(scores), scores, -np.inf)
        greatest = np.pad(nothing, ((0, 0), (0, 0), (0, -s_c % block)), constant_values=-np.inf)
        greatest = greatest.reshape(2, s_q, -1, block).max(-1)
        of_block = np.arange(len(greatest[0, 0]))
        some = (start[..., None] // block <= of_block) & (of_block * block < np.maximum(stop, start)[..., None])
        some &= (stop > start)[..., None]
        greatest[of_block == (stop[..., None] - 1) // block] = np.inf
        blocks = indexer_blocks(*x, count=count, block=block, **seen)
        np.testing.assert_array_equal(blocks, chosen_by_loop(greatest, some, count))

        named = np.where(visible, np.arange(s_c), -1).astype(np.int32)
        there = np.array(raw.indexer_scores_at(q, codes, weights, jnp.asarray(named))[0])
        if isinstance(k, Quantized):
            half = q.astype(jnp.bfloat16), codes.astype(jnp.bfloat16), weights
            of_16_bits = np.array(indexer_scores(*half, jnp.asarray(named), implementation="cubin"))
            number = np.isfinite(of_16_bits)
            np.testing.assert_array_equal(np.isnan(there), np.isnan(of_16_bits))
            off = np.linalg.norm(there[number] - of_16_bits[number]) / np.linalg.norm(of_16_bits[number])
            assert off < 5e-4  # sums of products of 8 bits are rounded to some 14 bits
            there = there * np.asarray(k.scales)[:, None]
        within = (np.asarray(blocks)[..., None] == np.arange(s_c) // block).any(2)
        how = {"topk": topk, "blocks": blocks, "block": block, "return_scores": True}
        indices, values = lightning_indexer(*x, **how, **seen)
        there = np.where(np.isnan(there), np.float32(-3e38), there)
        np.testing.assert_array_equal(indices, chosen_by_loop(there, visible & within, topk))
        got = np.where(np.asarray(indices) >= 0, np.take_along_axis(there, np.maximum(indices, 0), -1), -np.inf)
        np.testing.assert_array_equal(np.where(np.isnan(values), np.float32(-3e38), values), got)
