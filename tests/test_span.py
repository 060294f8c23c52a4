"""Spans against the rules written out, position by position."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha import Span

S_Q, S_KV, B = 23, 31, 2


def visible(span: Span) -> np.ndarray:
    start, stop = span.bounds(B, S_Q, S_KV)
    assert start.shape == stop.shape == (B, S_Q)
    assert start.dtype == stop.dtype == jnp.int32
    assert (start >= 0).all() and (start <= S_KV).all() and (stop >= 0).all() and (stop <= S_KV).all()
    j = np.arange(S_KV)
    return (np.asarray(start)[..., None] <= j) & (j < np.asarray(stop)[..., None])


def rule(sees) -> np.ndarray:
    return np.array([[[sees(n, i, j) for j in range(S_KV)] for i in range(S_Q)] for n in range(B)])


OFFSETS = [0, 5, -4, 40, np.int32(3), np.array([2, -7], np.int32)]


@pytest.mark.parametrize("offset", OFFSETS, ids=str)
def test_rules_of_positions(offset):
    at = np.broadcast_to(offset, B)
    np.testing.assert_array_equal(visible(Span.causal(S_Q, offset)), rule(lambda n, i, j: j <= i + at[n]))
    np.testing.assert_array_equal(
        visible(Span.sliding_window(S_Q, 6, offset)), rule(lambda n, i, j: i + at[n] - 6 < j <= i + at[n])
    )
    np.testing.assert_array_equal(
        visible(Span.compressed(S_Q, 4, offset)), rule(lambda n, i, j: j < (i + at[n] + 1) // 4)
    )


def test_lengths():
    lengths = np.array([0, 17], np.int32)
    np.testing.assert_array_equal(visible(Span.lengths(lengths)), rule(lambda n, i, j: j < lengths[n]))


def test_segments():
    rng = np.random.default_rng(0)
    q_ids = rng.integers(0, 6, (B, S_Q), np.int32)  # in any order
    kv_ids = np.sort(rng.integers(1, 5, (B, S_KV), np.int32), axis=1)
    np.testing.assert_array_equal(
        visible(Span.segments(q_ids, kv_ids)), rule(lambda n, i, j: q_ids[n, i] == kv_ids[n, j])
    )


def test_segments_from_cumulative_lengths():
    cu_seqlens = jnp.array([0, 4, 4, 9, S_Q], jnp.int32)
    ids = jnp.searchsorted(cu_seqlens, jnp.arange(S_Q), side="right").astype(jnp.int32)
    span = Span.segments(jnp.broadcast_to(ids, (B, S_Q))) & Span.causal(S_Q)
    begin = [0] * 4 + [4] * 5 + [9] * (S_Q - 9)
    np.testing.assert_array_equal(visible(span), rule(lambda n, i, j: begin[i] <= j <= i))


def test_segments_in_any_order():
    """Ids need not ascend: padding with 0 at the end belongs to no earlier segment."""
    rng = np.random.default_rng(0)
    lengths = np.array([[5, 9, 0, 8], [4, 1, 20, 2]])
    kv_ids = np.stack([np.repeat([7, -3, 5, 2, 0], [*n, S_KV - n.sum()]) for n in lengths]).astype(np.int32)
    q_ids = rng.permuted(np.resize([7, -3, 5, 2, 0, 6], (B, S_Q)), axis=1).astype(np.int32)
    want = rule(lambda n, i, j: q_ids[n, i] == kv_ids[n, j])
    np.testing.assert_array_equal(visible(Span.segments(q_ids, kv_ids)), want)
    np.testing.assert_array_equal(visible(jax.jit(Span.segments)(q_ids, kv_ids)), want)


def test_many_segments():
    """More ids than a step of the search tells apart, 31; and no loop, whose every pass would be a launch."""
    lengths = np.random.default_rng(0).integers(1, 4, 1500)
    ids = np.repeat(np.random.default_rng(1).permutation(1500), lengths)[None].astype(np.int32)
    end = np.cumsum(lengths)
    f = jax.jit(Span.segments)
    start, stop = f(ids).bounds(1, ids.size, ids.size)
    np.testing.assert_array_equal(start[0], np.repeat(end - lengths, lengths))
    np.testing.assert_array_equal(stop[0], np.repeat(end, lengths))
    assert "while" not in f.lower(ids).as_text()


def test_a_segment_in_two_places():
    """It is no interval: an error where the ids are known; otherwise nobody sees it."""
    ids = np.array([[1, 1, 2, 2, 1]], np.int32)
    says = r"Span.segments: kv_ids: got 1 in several places of row 0, wanted the keys of a segment side by side"
    with pytest.raises(ValueError, match=says):
        Span.segments(ids)
    start, stop = jax.jit(Span.segments)(ids).bounds(1, 5, 5)
    np.testing.assert_array_equal(np.maximum(stop - start, 0), [[0, 0, 2, 2, 0]])
    assert start[0, 2] == 2


def test_blocks_of_a_row_are_not_those_of_its_segments():
    """Span.compressed counts from the row's first token: combining it with segments is an error, also after a jit."""
    ids = np.array([[1] * 7 + [2] * 5], np.int32)
    entry_ids = np.array([[1, 2]], np.int32)
    segments = jax.jit(lambda: Span.segments(ids, entry_ids) & Span(0, 2))()
    for f in (lambda: segments & Span.compressed(12, 4), lambda: Span.compressed(12, 4) & Span.causal(12) & segments):
        with pytest.raises(ValueError, match=r"first token, wanted Span.compressed_segments\(ids, ratio\) for packed"):
            f()


@pytest.mark.parametrize("window", [1, 6, 2**31 - 1])
@pytest.mark.parametrize("offset", [2**31 - 1, 2**31 - 24, -(2**31), -(2**31) + 9])
def test_positions_do_not_wrap_around(offset, window):
    """Beyond 2**31 - 2 a query has position 2**31 - 2, after any possible key."""
    p = np.minimum(np.arange(S_Q, dtype=np.int64) + offset, 2**31 - 2)
    np.testing.assert_array_equal(visible(Span.causal(S_Q, offset)), rule(lambda n, i, j: j <= p[i]))
    np.testing.assert_array_equal(visible(Span.compressed(S_Q, 3, offset)), rule(lambda n, i, j: j < (p[i] + 1) // 3))
    np.testing.assert_array_equal(
        visible(Span.sliding_window(S_Q, window, offset)), rule(lambda n, i, j: p[i] - window < j <= p[i])
    )


def test_and_keeps_what_both_show():
    lengths = jnp.array([9, 20], jnp.int32)
    both = Span.sliding_window(S_Q, 7) & Span.lengths(lengths) & Span(2, S_KV)
    np.testing.assert_array_equal(visible(both), rule(lambda n, i, j: max(2, i - 6) <= j <= min(i, lengths[n] - 1)))


def test_is_a_pytree_and_traces():
    span = jax.jit(lambda offset: Span.causal(S_Q, offset) & Span.lengths(offset))(jnp.array([3, 8], jnp.int32))
    assert isinstance(span, Span)
    assert len(jax.tree.leaves(span)) == 2
    np.testing.assert_array_equal(visible(span), rule(lambda n, i, j: j < min(i + (4, 9)[n], (3, 8)[n])))


def test_errors():
    with pytest.raises(ValueError, match=r"window: got 0, wanted an int >= 1"):
        Span.sliding_window(4, 0)
    with pytest.raises(ValueError, match=r"offset: got float32\[2\], wanted int32\[b\]"):
        Span.causal(4, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"kv_ids: got int32\[3, 5\], wanted int32\[b=2, s_kv\]"):
        Span.segments(jnp.zeros((2, 4), jnp.int32), jnp.zeros((3, 5), jnp.int32))
    with pytest.raises(ValueError, match=r"wanted shapes that broadcast"):
        Span.causal(4) & Span.causal(5)
    with pytest.raises(TypeError):
        Span.causal(4) & 3


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: Span.segments(ids) & Span.causal(9),
        lambda ids: Span.segments(ids, ids[:, :5]),
        lambda ids: Span.compressed_segments(ids, 2),
        lambda ids: Span.sliding_window(9, 4, ids[:, 0]) & Span.lengths(ids[:, 1]),
        lambda ids: Span.compressed(9, 4),
    ],
    ids=["segments", "segments of others", "compressed_segments", "window", "compressed"],
)
def test_nothing_is_compiled_again_for_the_same_shapes(make, caplog):
    """Outside of jit, where each operation is a program of its own; values may differ."""

    def of(ids: list[int]) -> list[str]:
        return compiled(lambda: make(jnp.array([ids], jnp.int32)), caplog)

    jax.clear_caches()
    assert of([1, 1, 1, 2, 2, 2, 2, 7, 7])
    assert of([3, 3, 4, 4, 4, 5, 5, 5, 5]) == []


def test_a_new_length_compiles_nothing(caplog):
    """Where all is known outside of jit."""

    def make(n):
        span = Span.sliding_window(n, 3, 5) & Span.causal(n, 5) & Span(1, n)
        return span, span.bounds(2, n, 7), Span.compressed(n, 4)

    make(8)
    assert compiled(lambda: make(9), caplog) == []
    assert "iota" in jax.jit(lambda: make(9)).lower().as_text(), "a program has no lists of numbers"
    got, want = (jax.tree.leaves(f()) for f in (lambda: make(9), jax.jit(lambda: make(9))))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype == np.int32 and x.shape == y.shape


def compiled(f, caplog):
    """What JAX compiles in a call."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.block_until_ready(f())
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling ")]
