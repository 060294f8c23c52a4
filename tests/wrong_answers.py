"""The results of kernels with planted faults, so that a test can tell each fault from all others."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from interpreter.kernels import attention
from interpreter.kernels.attention import Operands
from interpreter.machine.state import Array
from jax_dsv4_fmha import Cache
from jax_dsv4_fmha._testing import float64
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


def with_v(change: Callable[[Array], Array]) -> Answer:
    """The result with another V; K stays."""
    return lambda x, scale: attention.answer(replace_keys(x, lambda k: k, change), scale)


def with_keys(change: Callable[[Array], Array]) -> Answer:
    """The result with other keys, which are values too."""
    return lambda x, scale: attention.answer(replace_keys(x, change, change), scale)


def replace_keys(x: Operands, k: Callable[[Array], Array], v: Callable[[Array], Array]) -> Operands:
    sources = (dataclasses.replace(keys, k=k(keys.k), v=v(keys.v)) for keys in x.sources)
    return dataclasses.replace(x, sources=tuple(sources))


def first_64_columns(k: Array) -> Array:
    return np.where(np.arange(k.shape[-1]) < 64, k, 0).astype(k.dtype)


def halves_exchanged(k: Array) -> Array:
    return np.roll(k, k.shape[-1] // 2, -1)


def rows_exchanged(distance: int) -> Callable[[Array], Array]:
    """Row j is row j ^ distance, or zeros after the last one."""

    def exchanged(k: Array) -> Array:
        j = np.arange(k.shape[1]) ^ distance
        there = j < k.shape[1]
        return np.where(there[:, None, None], k[:, np.where(there, j, 0)], 0).astype(k.dtype)

    return exchanged


def half_of_each(half_of: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns a function that keeps of each key j one half of its columns, half_of(j), and makes the others zeros."""

    def halved(k: Array) -> Array:
        kept = np.arange(k.shape[-1]) // (k.shape[-1] // 2) == half_of(np.arange(k.shape[1]))[:, None, None]
        return np.where(kept, k, 0).astype(k.dtype)

    return halved


def slabs_in_order(k: Array) -> Array:
    """The result of reading slabs of 64 columns as if those of both halves took turns, where they lie in order."""
    slab = np.arange(8)
    return k.reshape(*k.shape[:-1], 8, 64)[..., 2 * (slab % 4) + slab // 4, :].reshape(k.shape)


def swizzled_once(k: Array) -> Array:
    """The result of reading with a 128-byte swizzle what was written without: of the 8 chunks of a slab of row r, c is
    c ^ r % 8.
    """
    slabs = k.reshape(*k.shape[:-1], -1, 8, 8)
    row = np.arange(k.shape[1]) % 8
    where = (np.arange(8) ^ row[:, None])[None, :, None, None, :, None]
    return np.take_along_axis(slabs, np.broadcast_to(where, slabs.shape), axis=-2).reshape(k.shape)


def swizzled_as_64(array: Array) -> Array:
    """Rows of 128 bytes that were written with a swizzle of 128 bytes, read as rows of 64 bytes with one of 64."""
    n, rows, *rest = array.shape
    slabs = np.pad(array, ((0, 0), (0, -rows % 8), (0, 0), (0, 0))).reshape(n, -1, 8, rest[0], rest[1] // 64, 8, 8)
    row, chunk = np.indices((8, 8))
    place = 64 * row + 16 * chunk
    place ^= (place >> 7 & 3) << 4
    row, chunk = place // 128, place // 16 % 8
    found = np.moveaxis(slabs, (2, 5), (0, 1))[row, chunk ^ row]
    return np.moveaxis(found, (0, 1), (2, 5)).reshape(n, -1, *rest)[:, :rows]


def with_descriptors_of_64(x: Operands, scale: float) -> tuple[Array, Array]:
    """Products read Q and K so; a tile has rows of Q as they lie in memory."""
    rows = swizzled_as_64(x.q.reshape(x.q.shape[0], -1, 1, x.q.shape[-1]))
    x = replace_keys(x, swizzled_as_64, lambda v: v)
    return attention.answer(dataclasses.replace(x, q=rows.reshape(x.q.shape)), scale)


def logits(x: Operands, scale: float) -> Array:
    """float64 [b, s_q, h_q, s_kv], -inf where a query does not see the key; for one head of keys."""
    (keys,) = x.sources
    products = scale * np.einsum("bqhd,bkd->bqhk", x.q.astype(np.float64), keys.k[:, :, 0].astype(np.float64))
    return np.where(keys.counts[:, :, None] > 0, products, -np.inf)


def without_rescaling(tile: int) -> Answer:
    """O of each tile of keys stays as it was for the maximum of the tiles until then; the sum of a row does not."""

    def answer(x: Operands, scale: float) -> tuple[Array, Array]:
        s = logits(x, scale)
        ends = np.minimum((np.arange(s.shape[-1]) // tile + 1) * tile, s.shape[-1]) - 1
        tops = np.maximum.accumulate(s, -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            top = tops[..., -1]
            lse = top + np.log(np.exp(s - top[..., None]).sum(-1))
            total = np.exp(np.logaddexp(lse, x.sink.astype(np.float64)) - top)
            p = np.nan_to_num(np.exp(s - tops[..., ends]) / total[..., None])
        v = np.nan_to_num(x.sources[0].v[:, :, 0].astype(np.float64))
        return np.einsum("bqhk,bkd->bqhd", p, v), np.where(np.isneginf(top), -np.inf, lse)

    return answer


def maximum_of_a_part(parts: int, part_of: Callable[[Array], Array]) -> Answer:
    """Lets `parts` threads share a row, each the keys j with part_of(j) its number; each weighs by its own maximum, and
    the first writes lse."""

    def answer(x: Operands, scale: float) -> tuple[None, Array]:
        s = logits(x, scale)
        of = part_of(np.arange(s.shape[-1]))
        mine = [np.where(of == part, s, -np.inf) for part in range(parts)]
        tops = [y.max(-1) for y in mine]
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = (np.exp(y - top[..., None]).sum(-1) for y, top in zip(mine, tops, strict=True))
            return None, tops[0] + np.log(sum(np.nan_to_num(x) for x in sums))

    return answer


def with_keys_for(queries: Callable[[Array], Array], where: Callable[[Array], Array]) -> Answer:
    """Answers as `with_keys_at` does for some queries, and right for the others."""

    def answer(x: Operands, scale: float) -> tuple[Array, Array]:
        chosen = queries(np.arange(x.shape.s_q))[None, :, None]
        (o, lse), (other_o, other_lse) = with_keys_at(where)(x, scale), attention.answer(x, scale)
        return np.where(chosen[..., None], o, other_o), np.where(chosen, lse, other_lse)

    return answer


def absent_as_zeros(tile: int) -> Answer:
    """All of a tile of selected keys is seen, and what is absent is zeros; a source without keys is not visited."""

    def answer(x: Operands, scale: float) -> tuple[Array, Array]:
        sources = []
        for keys in x.sources:
            many = keys.counts.sum(-1)
            counts = np.concatenate([keys.counts, np.where(many > 0, -many % tile, 0)[..., None]], -1)
            last = np.zeros_like(keys.k[:, :1])
            k, v = (np.concatenate([y, last], 1) for y in (keys.k, keys.v))
            sources.append(dataclasses.replace(keys, k=k, v=v, counts=counts))
        return attention.answer(dataclasses.replace(x, sources=tuple(sources)), scale)

    return answer


def with_the_second(change: Callable[[Array], Array]) -> Answer:
    """The result with other keys, which are values too, of the second source."""

    def answer(x: Operands, scale: float) -> tuple[Array, Array]:
        first, second = x.sources
        other = change(second.k)
        return attention.answer(
            dataclasses.replace(x, sources=(first, dataclasses.replace(second, k=other, v=other))), scale
        )

    return answer


def a_scale_for_two_groups(x: Operands, scale: float) -> tuple[Array, Array]:
    """The result if odd groups of `v4_fp4` entries have the scales of the even ones before them."""
    near, far = x.sources
    assert far.pool is not None
    page = far.pool.shape[1] // 368
    entries = far.pool.reshape(-1, page, 368)[..., 224:238].reshape(-1, 14).astype(int)
    k = far.k.astype(np.float64)
    by_number = {far.k[n, j].tobytes(): (n, j) for n, j in np.ndindex(far.k.shape[:2])}
    cache = Cache(far.pool, None, "v4_fp4")
    for place in range(len(entries)):
        found = float64._entry(cache, place // page, place % page, ring=False)
        at = by_number.get(found.astype(far.k.dtype)[None].tobytes())
        if at is not None:
            wrong = np.repeat(np.exp2(np.repeat(entries[place, ::2], 2) - entries[place]), 32)
            k[at][:, :448] *= wrong
    changed = dataclasses.replace(far, k=k.astype(far.k.dtype), v=k.astype(far.k.dtype))
    return attention.answer(dataclasses.replace(x, sources=(near, changed)), scale)


def without_the_second(x: Operands, scale: float) -> tuple[Array, Array]:
    """A query that sees keys of the first source sees none of the second."""
    first, second = x.sources
    counts = np.where(first.counts.any(-1)[..., None], 0, second.counts)
    return attention.answer(dataclasses.replace(x, sources=(first, dataclasses.replace(second, counts=counts))), scale)


def at_positions(
    tile: int, keys: Callable[[Array], Array] = lambda j: j, values: Callable[[Array, int], Array] = lambda j, head: j
) -> Answer:
    """The result if position j of a query's list had the key of position keys(j), and its weight in a head went to the
    value of position values(j, head). Each source fills whole tiles, with zeros where nothing is listed; what is masked
    stays where it is."""

    def listed(x: Operands, n: int, i: int) -> tuple[Array, Array]:
        found, seen = [], []
        for kind, source in zip(("span", "selection")[-len(x.sources) :], x.sources, strict=True):
            s_kv = source.k.shape[1]
            if kind == "span":
                entries = np.arange(source.seen_from[n, i], source.seen_to[n, i])
            else:
                entries = source.seen_from[n, i, : max(source.seen_to[n, i], 0)]
            present = (entries >= 0) & (entries < s_kv)
            rows = np.where(present[:, None], source.k[n, np.where(present, entries, 0), 0].astype(np.float64), 0)
            rest = -len(entries) % tile
            found.append(np.pad(rows, ((0, rest), (0, 0))))
            seen.append(np.pad(present, (0, rest)))
        return np.concatenate(found), np.concatenate(seen)

    def answer(x: Operands, scale: float) -> tuple[Array, Array]:
        (o, lse), (b, s_q, h_q, _) = (np.zeros_like(y) for y in attention.answer(x, scale)), x.q.shape
        for n, i in np.ndindex(b, s_q):
            k, seen = listed(x, n, i)
            j = np.arange(len(k))
            k = k[keys(j)]
            for head in range(h_q):
                with np.errstate(divide="ignore", invalid="ignore"):
                    s = np.where(seen, scale * k @ x.q[n, i, head].astype(np.float64), -np.inf)
                    lse[n, i, head] = np.logaddexp.reduce(s, initial=-np.inf)
                    total = np.logaddexp(lse[n, i, head], x.sink[head])
                    p = np.where(seen, np.exp(s - total), 0) if seen.any() else np.zeros(len(k))
                o[n, i, head] = p[values(j, head)] @ k
        return o, lse

    return answer
