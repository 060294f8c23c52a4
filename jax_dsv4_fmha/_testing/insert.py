"""Cases of a step's new entries of a cache: the kernel against its definition, and that against float64 in NumPy."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Cache
from .._check import Implementation
from .._dispatch.support import not_built
from .._host import library
from ..layers.insert import Entries, Rows, State, insert
from ..layers.pooling import RunningSums
from ..layers.rope import Rope
from .case import Case, Judgement, judgement

_ROPE, _EPS, _COLUMN, _PAGE = Rope(64, 160_000, 16, 4096), 1e-6, 4, 8
_LENGTHS = (9, 0, 1, 16, 57)  # in blocks: tokens follow them; an idle place, and a sequence that begins
_LIMITS = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-5}  # of an entry's greatest number
_PACKED = dict.fromkeys(
    ("v4_fp4", "index_fp4"), 0.34
)  # the same, of codes that may differ by one: by a third of the greatest, of e2m1

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class InsertCase(Case):
    """Entries of `s_q` tokens, in pages: each token's, or of blocks that are pooled; blocks of 4 overlap."""

    op = "kv_insert"

    d: int = 512
    """576: of 512 numbers that the norm covers, and RoPE's after them"""
    ratio: int = 0
    """tokens of a block; 0 where each token is an entry"""
    features: tuple[str, ...] = ()
    """the layout of packed entries, if they are packed; and "ragged": sequences with different numbers of new tokens"""

    @property
    def work(self) -> int:
        return len(_LENGTHS) * self.s_q * self.d * max(self.ratio, 1)

    @property
    def layout(self) -> str:
        return "".join(x for x in self.features if x != "ragged")

    @property
    def normed(self) -> int:
        """Numbers of an entry that the norm covers."""
        return self.d // 128 * 128

    @property
    def blocks(self) -> int:
        return 2 if self.ratio == 4 else 1

    @property
    def width(self) -> int:
        return 2 * self.blocks * self.d if self.ratio else self.d

    def operands(self, dtype: Any) -> tuple[Cache, State, Rows, Entries, jax.Array, jax.Array | None]:
        rng, b, ratio = self.rng(), len(_LENGTHS), max(self.ratio, 1)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), jnp.float32)

        table = jnp.asarray(rng.permutation(3 * b * 8)[: 8 * b].reshape(b, 8), jnp.int32)
        cache = Cache.zeros(3 * b * 8, _PAGE, self.d, dtype, table, layout=self.layout or None)
        state: State = None
        if self.ratio > 8:
            folded = jnp.asarray([[max(n * ratio - self.s_q, 0)] for n in _LENGTHS], jnp.int32)
            state = RunningSums(normal(b, self.s_q, self.width), normal(b, 3, self.d).at[:, 1].set(2.0), folded)
        elif self.ratio:
            state = Cache(normal(b, self.blocks * ratio + self.s_q - 1, self.width))
        ape = normal(ratio, self.width // 2) if self.ratio else None
        made = Entries(1 + normal(self.normed) / 4, _ROPE, _EPS, ratio, ape, is_transformed=self.d == 128)
        rows = Rows(normal(b, self.s_q, self.width + 12), _COLUMN, self.width)
        lengths = jnp.asarray([n and n * ratio + min(n, self.s_q - 1) for n in _LENGTHS], jnp.int32)
        counts = np.resize([self.s_q, 0, 1], b)
        return cache, state, rows, made, lengths, lengths - counts if "ragged" in self.features else None

    def _limit(self, dtype: str) -> float:
        return _PACKED.get(self.layout, 0.07) if self.layout else _LIMITS[dtype]

    def judge(self, implementation: Implementation) -> Judgement:
        return judgement(self.complaints(implementation), "new entries within limits, all else as it was")

    def complaints(self, implementation: Implementation) -> list[str]:
        if implementation == "reference":
            operands = self.operands(jnp.float32)
            cache, _ = self._run(operands, jnp.float32, False)
            found, wanted = np.asarray(cache.take(), np.float64), self._float64(operands)
            errors = {place: _off(found[place], x) for place, x in wanted.items()}
            untouched = np.ones(found.shape[:2], bool)
            for place in wanted:
                untouched[place] = False
            limit = self._limit("float32")
            wrong = [f"entry {place} off by {x:.1e}" for place, x in errors.items() if not x <= limit]
            return wrong + ["other entries have changed"] * bool(found[untouched].any())
        choices = {"d": self.normed, "dtype": self.dtype, "packing": self.layout, "pooled": self.ratio > 0}
        choices["rope"] = self.d > self.normed
        operands = self.operands(self.dtype)
        if not library.variants_for("kv_insert", **choices, hadamard=self.d == 128):
            raise not_built(self.op, "cache", operands[0].entries, "entries that a kernel is built for", ("kv_insert",))
        got, again, want = (self._run(operands, self.dtype, kernel) for kernel in (True, True, False))
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True)
        wrong = [] if all(bool((x == y).all()) for x, y in pairs) else ["other bits in the second run"]
        for x, y in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
            if not np.allclose(x, y, rtol=1e-5, atol=1e-5):
                wrong.append(f"the state is off by {np.abs(np.asarray(x) - np.asarray(y)).max():.1e}")
        found, right = (np.asarray(x[0].take(), np.float64) for x in (got, want))
        off = max(map(_off, found[right.any(-1)], right[right.any(-1)]), default=0.0)
        limit = self._limit(self.dtype)
        wrong += [f"an entry is off by {off:.1e}"] * (not off <= limit)
        return wrong + ["other entries have changed"] * bool(found[~right.any(-1)].any())

    def _run(self, operands: tuple[Any, ...], dtype: Any, kernel: bool) -> tuple[Cache, State]:
        cache, state, rows, made, lengths, start = operands

        def run(cache: Cache, state: State, product: jax.Array) -> tuple[Cache, State]:
            given = rows._replace(product=product)
            return insert(cache, state, given, made, lengths, jnp.dtype(dtype), kernel, start)

        exactly = {"xla_allow_excess_precision": False}  # or XLA leaves roundings out
        made_of: tuple[Cache, State] = jax.jit(run, compiler_options=exactly)(cache, state, rows.product)
        return made_of

    def _float64(self, operands: tuple[Any, ...]) -> dict[tuple[int, int], Numbers]:
        """New entries by sequence and index: a loop over the tokens that complete one."""
        _, state, rows, made, lengths, start = operands
        ratio, new = made.ratio, np.asarray(rows.take(), np.float64)
        found = {}
        begin = np.asarray(lengths - self.s_q if start is None else start)
        for n, (first, length) in enumerate(zip(begin, np.asarray(lengths), strict=True)):
            for position in range(max(first, 0), length):
                row = new[n, position - first]
                if not self.ratio:
                    found[n, position] = self._finished(row, position, made)
                elif (position + 1) % ratio == 0:
                    entry = self._pooled(n, position, int(first), new, state, made)
                    found[n, position // ratio] = self._finished(entry, position + 1 - ratio, made)
        return found

    def _pooled(self, n: int, last: int, begin: int, new: Numbers, state: State, made: Entries) -> Numbers:
        """The pool of the block (and the one before, where blocks overlap) that ends with token `last`."""
        d, first = self.d, last + 1 - self.blocks * made.ratio
        ape = np.asarray(made.ape, np.float64)
        greatest, weight, total = np.full(d, -np.inf), np.zeros(d), np.zeros(d)
        known = 0
        if isinstance(state, RunningSums):
            known = int(np.asarray(state.folded)[n, 0])
            if known > first:
                greatest, weight, total = (np.asarray(x, np.float64) for x in np.asarray(state.sums)[n])
        kept = np.asarray(state.tokens if isinstance(state, RunningSums) else state.entries, np.float64)  # type: ignore[union-attr]
        for position in range(max(first, known, 0), last + 1):
            if position >= begin:
                row = new[n, position - begin].copy()
                row[self.width // 2 :] += ape[position % made.ratio]
            else:
                row = kept[n, position % kept.shape[1]]
            part = slice(0, d) if position <= last - made.ratio else slice((self.blocks - 1) * d, self.blocks * d)
            kv, score = row[: self.width // 2][part], row[self.width // 2 :][part]
            most = np.maximum(greatest, score)
            decay, gain = np.exp(greatest - most), np.exp(score - most)
            greatest, weight, total = most, weight * decay + gain, total * decay + gain * kv
        return total / weight

    def _finished(self, x: Numbers, position: int, made: Entries) -> Numbers:
        """The entry after norm, RoPE and the Hadamard transform."""
        y, part = x.copy(), slice(self.normed)
        y[part] *= np.asarray(made.norm, np.float64) / np.sqrt(np.mean(x[part] ** 2) + made.eps)
        n = made.rotation.dims
        angle = (np.float32(position) * made.rotation.frequencies()).astype(np.float64)
        pairs = (y[-n::2] + 1j * y[-n + 1 :: 2]) * np.exp(1j * angle)
        y[-n::2], y[-n + 1 :: 2] = pairs.real, pairs.imag
        if made.is_transformed:
            i = np.arange(self.d)
            y = y @ (1.0 - 2.0 * (np.bitwise_count(i[:, None] & i) % 2)) / np.sqrt(self.d)
        return y


def _off(x: Numbers, wanted: Numbers) -> float:
    return float(np.abs(x - wanted).max() / np.abs(wanted).max())
