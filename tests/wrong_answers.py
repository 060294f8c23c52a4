"""The results of kernels with planted faults, so that a test can tell each fault from all others."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from interpreter import attention
from interpreter.attention import Operands
from interpreter.state import Array
from jax_dsv4_fmha._testing.compare import KERNEL, compare

Answer = Callable[[Operands, float], tuple[Array | None, Array]]
"""(o, lse) for operands and a scale; no o where only lse is predicted"""


def assert_given(got: Sequence[Array], answer: tuple[Array | None, Array]) -> None:
    """Compares with the tolerances of a right answer."""
    foretold = [(name, g, a) for name, g, a in zip(KERNEL, got, answer, strict=True) if a is not None]
    names, results, answers = zip(*foretold, strict=True)
    for verdict in compare(results, answers, {name: KERNEL[name] for name in names}):
        assert verdict.passed, f"wrong, and not in the way that was foretold: {verdict}"


def at_scale(change: Callable[[float], float]) -> Answer:
    return lambda x, scale: attention.answer(x, change(scale))


def with_keys_at(where: Callable[[Array], Array]) -> Answer:
    """The result if key j were the one at `where(j)`, with zeros after the last one."""

    def moved(array: Array) -> Array:
        s_kv = array.shape[1]
        j = where(np.arange(s_kv))
        return np.where((j < s_kv)[:, None, None], array[:, np.minimum(j, s_kv - 1)], 0).astype(array.dtype)

    return lambda x, scale: attention.answer(replace_keys(x, moved, moved), scale)


def with_k(change: Callable[[Array], Array]) -> Answer:
    """The result with another K; V stays."""
    return lambda x, scale: attention.answer(replace_keys(x, change, lambda v: v), scale)


def replace_keys(x: Operands, k: Callable[[Array], Array], v: Callable[[Array], Array]) -> Operands:
    sources = (dataclasses.replace(keys, k=k(keys.k), v=v(keys.v)) for keys in x.sources)
    return dataclasses.replace(x, sources=tuple(sources))


def first_64_columns(k: Array) -> Array:
    return np.where(np.arange(k.shape[-1]) < 64, k, 0).astype(k.dtype)


def swizzled_once(k: Array) -> Array:
    """The result of reading with a 128-byte swizzle what was written without: of the 8 chunks of a slab of row r, c is
    c ^ r % 8.
    """
    slabs = k.reshape(*k.shape[:-1], -1, 8, 8)
    row = np.arange(k.shape[1]) % 8
    where = (np.arange(8) ^ row[:, None])[None, :, None, None, :, None]
    return np.take_along_axis(slabs, np.broadcast_to(where, slabs.shape), axis=-2).reshape(k.shape)


def maximum_of_a_lane(x: Operands, scale: float) -> tuple[None, Array]:
    """The result where four lanes share a row, two columns of eight each, and each weighs by its own maximum; lane 0
    writes lse.
    """
    (keys,) = x.sources
    logits = scale * np.einsum("bqhd,bkd->bqhk", x.q.astype(np.float64), keys.k[:, :, 0].astype(np.float64))
    seen = keys.counts[:, :, None] > 0
    lanes = [seen & (np.arange(x.shape.s_kv) % 8 // 2 == lane) for lane in range(4)]
    with np.errstate(divide="ignore", invalid="ignore"):
        tops = [np.max(logits, -1, where=mine, initial=-np.inf) for mine in lanes]
        weights = (
            np.exp(np.where(mine, logits - top[..., None], -np.inf)) for mine, top in zip(lanes, tops, strict=True)
        )
        return None, tops[0] + np.log(sum(w.sum(-1) for w in weights))
