"""Engrams, V4.1's memory of n-grams: rows of large tables, found by hashes of the last tokens, join the streams.

    rows = table[hash of the last 2, …, n tokens, for each head]
    keys, value = w rows                                             a key for each stream, a value for all
    X = X + sigmoid(± √|norm(X) · norm(keys)|) value

Words are hashed, not tokens: tokens that differ in case, accents or blanks alone are one word.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .packed import whole

BLOCK = 32
"""numbers of a table's row that have one scale"""


class History(NamedTuple):
    """The last words of each sequence, a cache beside those of the layers."""

    words: jax.Array
    """int32 `[b, longest - 1 + tokens that can be taken back]`"""
    end: jax.Array
    """int32 `[b]`: how many tokens the sequence has with them"""

    def with_block_table(self, block_table: jax.Array) -> "History":
        return self

    def rings(self) -> "History":
        return self

    def take(self, places: jax.Array) -> "History":
        return History(*(x[places] for x in self))

    def put(self, places: jax.Array, taken: "History") -> "History":
        return History(*(x.at[places].set(y, mode="drop") for x, y in zip(self, taken, strict=True)))

    def before(self, start: jax.Array) -> jax.Array:
        """The words before position `start` `[b]`, which is not after the end."""
        places = (start - self.end)[:, None] + jnp.arange(self.words.shape[1])
        return jnp.take_along_axis(self.words, jnp.maximum(places, 0), 1)


@dataclasses.dataclass(frozen=True)
class Engrams:
    """The shape of the tables, and where they are."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    """of each layer's table"""
    longest: int
    """tokens of the longest n-gram; the shortest has 2"""
    heads: int
    d: int
    """numbers in a row"""
    buckets: int
    """rows that a head has for n-grams of a length, or as many more as make a prime"""
    words: int
    pad: int
    """the token that stands before every sequence"""

    def __post_init__(self) -> None:
        if (found := tuple(int(p.sum()) for p in self.primes)) != self.rows:
            raise ValueError(f"engrams: got tables of {self.rows} rows, wanted {found}, the sums of primes")

    @functools.cached_property
    def primes(self) -> np.ndarray:
        """`[layers, longest - 1, heads]`: the sizes of buckets, each prime used once."""
        used: set[int] = set()

        def following(n: int) -> int:
            while n in used or any(n % k == 0 for k in range(2, int(n**0.5) + 1)):
                n += 1
            used.add(n)
            return n

        def of_lengths() -> list[list[int]]:
            found = []
            for _ in range(self.longest - 1):
                found.append([at := following(self.buckets)])
                found[-1] += [at := following(at) for _ in range(self.heads - 1)]
            return found

        return np.array([of_lengths() for _ in self.layers], np.int64)

    @functools.cached_property
    def factors(self) -> np.ndarray:
        """`[layers, longest]`: an odd number for each word back, small enough for a product in 64 bits."""
        bound = max(1, np.iinfo(np.int64).max // self.words // 2)
        draws = [
            np.random.default_rng(10007 * layer).integers(0, bound, self.longest, np.int64) for layer in self.layers
        ]
        return 2 * np.array(draws) + 1

    def found(
        self,
        word: jax.Array,
        tokens: jax.Array,
        history: History | None,
        start: Any,
        count: jax.Array | None,
        place: jax.Array | None = None,
    ) -> tuple[jax.Array, History | None]:
        """The rows int32 `[b, s, layers, (longest - 1) heads]` of tokens `[b, s]`, and the history after them.

        Args:
          word: int32 `[vocabulary]`, of each token.
          history: of the words before; None is none, and then none is kept.
          start: an int or int32 `[b]`, the position of the first token: the history's end, or before it, which takes
            tokens back.
          count: int32 `[b]`: how many of the tokens are no padding, with a history.
          place: without a history: int32 `[b, s]`, the position of each token in its document, if there are several.
        """
        n, pad, start = self.longest - 1, word[self.pad], jnp.broadcast_to(jnp.asarray(start), len(tokens))
        earlier = jnp.full((len(tokens), n), pad) if history is None else history.before(start)
        kept = earlier.shape[1]
        earlier = jnp.where(start[:, None] + jnp.arange(-kept, 0) < 0, pad, earlier)
        line = jnp.concatenate([earlier, word[tokens]], 1)
        rows = self._rows(line[:, kept - n :], pad, place)
        if history is None:
            return rows, None
        after = jnp.take_along_axis(line, count[:, None] + jnp.arange(kept), 1), start + count
        is_new = count > 0
        return rows, History(
            jnp.where(is_new[:, None], after[0], history.words), jnp.where(is_new, after[1], history.end)
        )

    def _rows(self, line: jax.Array, pad: jax.Array, place: jax.Array | None) -> jax.Array:
        """The rows of words `[b, longest - 1 + s]`: each has the words before it, in its document."""
        s, primes = line.shape[1] - (self.longest - 1), self.primes.reshape(len(self.layers), -1)
        with jax.enable_x64(True):
            back = [line[:, self.longest - 1 - n :][:, :s, None].astype(jnp.int64) for n in range(self.longest)]
            if place is not None:
                back = [jnp.where(place[..., None] >= n, x, pad.astype(jnp.int64)) for n, x in enumerate(back)]
            mixed, rows = back[0] * self.factors[:, 0], []
            for n in range(1, self.longest):
                mixed ^= back[n] * self.factors[:, n]
                rows.append(mixed[..., None] % self.primes[:, n - 1])
            return (jnp.concatenate(rows, -1) + np.cumsum(primes, 1) - primes).astype(jnp.int32)


@jax.named_scope("engram")
def recalled(p: Any, table: Any, x: jax.Array, rows: jax.Array, eps: float) -> jax.Array:
    """The streams x `[b, s, n, hidden]` with what a layer's table has in rows `[b, s, columns]`.

    table: {"rows": e4m3 `[all rows, d]`, "scales": e8m0 `[all rows, d / 32]`}.
    """
    n, m = x.shape[2:]
    values = table["rows"][rows].astype(jnp.float32)
    scales = table["scales"][rows].astype(jnp.float32)
    values = (values.reshape(*scales.shape, BLOCK) * scales[..., None]).reshape(values.shape).astype(x.dtype)
    made = (values.reshape(*values.shape[:2], -1) @ whole(p["wkv"], x.dtype)).astype(jnp.float32)
    key, value, h = made[..., : n * m].reshape(x.shape), made[..., None, n * m :], x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(h), -1) + eps) * jax.lax.rsqrt(jnp.mean(jnp.square(key), -1) + eps)
    match = (h * p["q"] * p["k"] * key).sum(-1) * scale * m**-0.5
    gate = jax.nn.sigmoid(jnp.sign(match) * jnp.sqrt(jnp.maximum(jnp.abs(match), 1e-6)))
    return (h + gate[..., None] * value).astype(x.dtype)


def words(tokenizer: str | Path) -> np.ndarray:
    """The word int32 of each token of a tokenizer.json: equal for tokens that are read alike."""
    from tokenizers import Regex, Tokenizer, normalizers

    blank = "\ue000"  # stands for a token that is one blank, which Strip would take away
    alike = normalizers.Sequence(
        [
            normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), blank),
            normalizers.Strip(), normalizers.Replace(blank, " "),
        ]
    )  # fmt: skip
    read, known = Tokenizer.from_file(str(tokenizer)), dict[str, int]()
    found = []
    for token in range(read.get_vocab_size()):
        text = read.decode([token], skip_special_tokens=False)
        part = "\N{REPLACEMENT CHARACTER}" in text  # of a character
        found.append(
            known.setdefault(read.id_to_token(token) if part else alike.normalize_str(text) or text, len(known))
        )
    return np.array(found, np.int32)
