"""The suite indexer, beside XLA's way: scores and top-k of a prompt, and of a step of generation over pages; top-k of
given scores; scores at given entries with their gradients; the choice in two levels; a choice and the attention to what
was chosen.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._definitions.cache import Cache
from .._definitions.packed import LAYOUTS, layout_of_keys, quantize_cache
from .._definitions.span import Span
from .._host.indexer import indexer_topk
from .._ops.dsv4 import dsv4_attention
from .._ops.indexer import indexer_blocks, lightning_indexer, quantize_indexer
from .._ops.indexer_keys import E4M3
from .._ops.indexer_training import indexer_scores
from .measure import Operands
from .row import CallRow, Suite

_D = 128
_AT_A_TIME = 256  # queries that XLA scores at a time
_BLOCK, _CANDIDATES = 8, 2048  # of DeepSeek-V4.1's choice in two levels
_WINDOW, _ATTENTION_D = 128, 512  # of the attention to what is chosen
_RATIO = 4
_ATTENDED = ("attention_q", "window_kv", "compressed_kv", "sink")
"""operands of that attention"""


@dataclass(frozen=True, kw_only=True)
class IndexerRow(CallRow):
    """Queries over s_c compressed entries, of which each gets topk."""

    b: int = 1
    s_q: int = 4096
    s_c: int
    topk: int = 512

    @property
    def name(self) -> str:
        return f"{self.result}, {self.scored}, b{self.b} s{self.s_q}"

    @property
    @abstractmethod
    def result(self) -> str:
        """The result of a call, in the words that the name has for it."""

    @property
    @abstractmethod
    def scored(self) -> str:
        """The operands that scores are made of, in the words that the name has for them."""

    @property
    def result_bytes(self) -> float:
        return 4.0 * self.b * self.s_q * self.topk


@dataclass(frozen=True, kw_only=True)
class TopkRow(IndexerRow):
    """Top-k alone, of scores that are there."""

    op = "indexer_topk"

    @property
    def result(self) -> str:
        return f"top-k {self.topk} of {self.s_c}"

    @property
    def scored(self) -> str:
        return "given scores"

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def bytes(self) -> float:
        return 4.0 * self.b * self.s_q * self.s_c + self.result_bytes

    def operands(self, key: jax.Array) -> Operands:
        return {"scores": jax.random.normal(key, (self.b, self.s_q, self.s_c))}

    def ours(self, **operands: Any) -> Any:
        start = jnp.zeros((self.b, self.s_q), jnp.int32)
        return indexer_topk(operands["scores"], start, start + self.s_c, topk=self.topk)[0]

    def peer(self, name: str, **operands: Any) -> Any:
        return lax.top_k(operands["scores"], self.topk)[1]


@dataclass(frozen=True, kw_only=True)
class ScoringRow(IndexerRow):
    """Scores are made of q, keys and weights."""

    dtype: str
    h: int = 64

    @property
    def scored(self) -> str:
        return f"{self.dtype} h{self.h}"

    @property
    def is_quantized(self) -> bool:
        return bool(jnp.dtype(self.dtype) == E4M3)

    def drawn(self, key: jax.Array) -> Operands:
        """q, keys and weights before any is quantized."""
        keys = jax.random.split(key, 3)
        return {
            "q": jax.random.normal(keys[0], (self.b, self.s_q, self.h, _D), jnp.bfloat16),
            "k": jax.random.normal(keys[1], (self.b, self.s_c, _D), jnp.bfloat16),
            "weights": jax.random.normal(keys[2], (self.b, self.s_q, self.h)) * (_D * self.h) ** -0.5,
        }

    def operands(self, key: jax.Array) -> Operands:
        x = self.drawn(key)
        return dict(zip(x, quantize_indexer(**x), strict=True)) if self.is_quantized else x

    def some(self, key: jax.Array, count: int, of: int) -> jax.Array:
        """int32 `[b, s_q, count]`: for every query others, ascending."""

        def row(key: jax.Array) -> jax.Array:
            return jnp.sort(jnp.argsort(jax.random.bits(key, (of,)))[:count]).astype(jnp.int32)

        # the key of q: a change would draw other operands than those of the records
        keys = jax.random.split(jax.random.split(key, 3)[0], self.b * self.s_q)
        return lax.map(row, keys, batch_size=256).reshape(self.b, self.s_q, count)


@dataclass(frozen=True, kw_only=True)
class ChoiceRow(ScoringRow):
    """All entries are visible to all queries, or with a ratio what is past."""

    op = "lightning_indexer"

    ratio: int = 0

    @property
    def entries(self) -> str:
        return f"{self.s_c} of ratio {self.ratio}" if self.ratio else str(self.s_c)

    @property
    def result(self) -> str:
        return f"top-k {self.topk} of {self.entries}"

    @property
    def flops(self) -> float:
        """The products of q and k."""
        seen = self.s_q * self.s_c
        if self.ratio:
            seen = sum(min((t + 1) // self.ratio, self.s_c) for t in range(self.s_q))
        return 2.0 * _D * self.h * self.b * seen

    @property
    def key_bytes(self) -> float:
        return _D * jnp.dtype(self.dtype).itemsize + 4.0 * self.is_quantized

    @property
    def bytes(self) -> float:
        of_q = self.b * self.s_q * self.h * (_D * jnp.dtype(self.dtype).itemsize + 4)
        return of_q + self.b * self.s_c * self.key_bytes + self.result_bytes

    @property
    def choices(self) -> dict[str, Any]:
        span = Span.compressed(self.s_q, self.ratio) if self.ratio else Span.compressed(self.s_q, 1, self.s_c)
        return {"span": span, "implementation": "cubin", "block": _BLOCK}

    def ours(self, **operands: Any) -> Any:
        return lightning_indexer(**operands, **self.choices, topk=self.topk)

    def peer(self, name: str, **operands: Any) -> Any:
        return self._xla(lambda indices, position: indices, **operands)

    def _xla(
        self, then: Callable[..., Any], *attended: jax.Array, q: jax.Array, k: jax.Array, weights: jax.Array
    ) -> Any:
        """The usual way in jnp: products, ReLU and the sum in blocks of queries, then lax.top_k, and what follows from
        its indices, the queries' positions and further arrays with a row for each query.
        """

        keys = k[0]

        def block(rows: Any) -> Any:
            q, weights, position, *attended = rows
            products = jnp.einsum("nhd,sd->nhs", q, keys, preferred_element_type=jnp.float32)
            scores = jnp.einsum("nhs,nh->ns", jax.nn.relu(products), weights)
            if self.ratio:
                visible = jnp.arange(self.s_c) < ((position + 1) // self.ratio)[:, None]
                scores = jnp.where(visible, scores, -jnp.inf)
            return then(lax.top_k(scores, self.topk)[1], position, *attended)

        rows = (q[0], weights[0], jnp.arange(self.s_q, dtype=jnp.int32), *(x[0] for x in attended))
        blocks = tuple(x.reshape(-1, _AT_A_TIME, *x.shape[1:]) for x in rows)
        results = lax.map(block, blocks)
        return results.reshape(1, self.s_q, *results.shape[2:])


@dataclass(frozen=True, kw_only=True)
class StepRow(ChoiceRow):
    """A step of generation: the last queries of every sequence, over all entries, in pages."""

    page: int = 64
    of_4_bits: bool = False  # whether keys are, with queries in bfloat16

    @property
    def entries(self) -> str:
        return f"{super().entries} in pages"

    @property
    def scored(self) -> str:
        return super().scored + ", keys in e2m1" * self.of_4_bits

    @property
    def key_bytes(self) -> float:
        return LAYOUTS["index_fp4"].entry if self.of_4_bits else super().key_bytes

    def operands(self, key: jax.Array) -> Operands:
        x = self.drawn(key)
        cache = self._cache(x["k"])
        if self.is_quantized:
            x["q"], _, x["weights"] = quantize_indexer(x["q"], None, x["weights"])
        return x | {"k": cache}

    def _cache(self, k: jax.Array) -> Cache:
        """Pages in any order."""
        pages = self.b * self.s_c // self.page
        table = jax.random.permutation(jax.random.key(0), pages).astype(jnp.int32).reshape(self.b, -1)
        entries = k.reshape(pages, self.page, _D)
        if not (self.is_quantized or self.of_4_bits):
            return Cache(entries, table)
        layout = layout_of_keys(jnp.dtype(self.dtype))
        return Cache(quantize_cache(entries, layout), table, layout)


@dataclass(frozen=True, kw_only=True)
class BlocksRow(ChoiceRow):
    """The first level of a choice in two: blocks of entries."""

    op = "indexer_blocks"

    @property
    def result(self) -> str:
        return f"{self.topk} blocks of {_BLOCK} of {self.entries}"

    def ours(self, **operands: Any) -> Any:
        return indexer_blocks(**operands, **self.choices, count=self.topk)


@dataclass(frozen=True, kw_only=True)
class InsideBlocksRow(ChoiceRow):
    """The second level: entries inside given blocks."""

    @property
    def result(self) -> str:
        return f"top-k {self.topk} within {_CANDIDATES} blocks of {_BLOCK} of {self.entries}"

    @property
    def flops(self) -> float:
        return 2.0 * _D * self.h * self.b * self.s_q * _CANDIDATES * _BLOCK

    @property
    def bytes(self) -> float:
        return self.b * self.s_q * (2.0 * self.h * _D + 4 * _CANDIDATES) + self.result_bytes

    def operands(self, key: jax.Array) -> Operands:
        return super().operands(key) | {"blocks": self.some(key, _CANDIDATES, self.s_c // _BLOCK)}


@dataclass(frozen=True, kw_only=True)
class BlocksStepRow(BlocksRow, StepRow):
    """The first level in a step of generation."""


@dataclass(frozen=True, kw_only=True)
class InsideBlocksStepRow(InsideBlocksRow, StepRow):
    """The second level in a step of generation, whose queries have no keys in common."""

    @property
    def bytes(self) -> float:
        return super().bytes + self.b * _CANDIDATES * _BLOCK * self.key_bytes


@dataclass(frozen=True, kw_only=True)
class AttendedRow(ChoiceRow):
    """A choice, and attention to a window and what is chosen."""

    op = "lightning_indexer, dsv4_attention"

    @property
    def result(self) -> str:
        return f"top-k {self.topk} of {self.entries}, and attention to a window of {_WINDOW} and these"

    @property
    def flops(self) -> float:
        return super().flops + 4.0 * _ATTENTION_D * self.h * self.b * self.s_q * (self.topk + _WINDOW)

    @property
    def bytes(self) -> float:
        """The bytes of the indexer, and those of the rows of queries, o and keys."""
        read = self.b * self.s_q * self.h * 2 + self.b * (self.s_q + _WINDOW - 1 + self.s_c)
        return super().bytes + 2.0 * _ATTENTION_D * read

    def operands(self, key: jax.Array) -> Operands:
        x = super().operands(key)
        shapes = ((self.s_q, self.h), (self.s_q + _WINDOW - 1,), (self.s_c,))
        for name, shape, its_key in zip(_ATTENDED[:3], shapes, jax.random.split(key, 3), strict=True):
            x[name] = jax.random.normal(its_key, (self.b, *shape, _ATTENTION_D), jnp.bfloat16)
        return x | {"sink": jnp.linspace(-1, 1, self.h, dtype=jnp.float32)}

    def ours(self, **operands: Any) -> Any:
        q, window_kv, compressed_kv, sink = (operands.pop(name) for name in _ATTENDED)
        end = self.s_c * _RATIO  # so that all entries are visible
        return dsv4_attention(
            q, window_kv, compressed_kv, window=Span.sliding_window(self.s_q, _WINDOW, _WINDOW - 1), ratio=_RATIO,
            indices=super().ours(**operands), q_offset=end, sink=sink, implementation="cubin",
        )  # fmt: skip

    def peer(self, name: str, **operands: Any) -> Any:
        attention_q, *keys_and_sink = (operands.pop(name) for name in _ATTENDED)

        def attend(indices: jax.Array, position: jax.Array, q: jax.Array) -> jax.Array:
            return _xla_attention(indices, position, q, *keys_and_sink)

        return self._xla(attend, attention_q, **operands)


@dataclass(frozen=True, kw_only=True)
class ScoresRow(ScoringRow):
    """Scores at topk given entries, and their gradients."""

    op = "indexer_scores"

    @property
    def result(self) -> str:
        return f"scores at {self.topk} of {self.s_c} and their gradients"

    @property
    def flops(self) -> float:
        """The products of scores, those of dq, dk and dweights' scores again."""
        return 4 * 2.0 * _D * self.h * self.b * self.s_q * self.topk

    @property
    def bytes(self) -> float:
        return 2.0 * _D * (3 * self.b * self.s_q * self.h + 4 * self.b * self.s_c) + 3 * self.result_bytes

    def operands(self, key: jax.Array) -> Operands:
        cotangent = jax.random.normal(key, (self.b, self.s_q, self.topk))
        return super().operands(key) | {"indices": self.some(key, self.topk, self.s_c), "cotangent": cotangent}

    def ours(self, **operands: Any) -> Any:
        def scores(*x: jax.Array) -> jax.Array:
            return indexer_scores(*x, implementation="cubin")

        return _with_gradients(scores, **operands)

    def peer(self, name: str, **operands: Any) -> Any:
        return _with_gradients(_xla_scores, **operands)


def _with_gradients(f: Callable[..., jax.Array], *, indices: jax.Array, cotangent: jax.Array, **x: jax.Array) -> Any:
    scores, back = jax.vjp(lambda q, k, weights: f(q, k, weights, indices), x["q"], x["k"], x["weights"])
    return scores, back(cotangent)


def _xla_scores(q: jax.Array, k: jax.Array, weights: jax.Array, indices: jax.Array) -> jax.Array:
    keys = jax.vmap(lambda k, i: k[i])(k, indices)
    products = jnp.einsum("bnhd,bntd->bnht", q, keys, preferred_element_type=jnp.float32)
    return jnp.einsum("bnht,bnh->bnt", jax.nn.relu(products), weights)


def _xla_attention(
    indices: jax.Array,
    position: jax.Array,
    q: jax.Array,
    window_kv: jax.Array,
    compressed_kv: jax.Array,
    sink: jax.Array,
) -> jax.Array:
    """o `[n, h, d]` of a block of queries, each with a softmax over its window, the entries and a sink."""
    near = window_kv[0][position[:, None] + jnp.arange(_WINDOW)]
    keys = jnp.concatenate([near, compressed_kv[0][indices]], 1)
    logits = jnp.einsum("nhd,ntd->nht", q, keys, preferred_element_type=jnp.float32) * _ATTENTION_D**-0.5
    sinks = jnp.broadcast_to(sink[:, None], (*logits.shape[:2], 1))
    p = jax.nn.softmax(jnp.concatenate([logits, sinks], -1))[..., :-1]
    return jnp.einsum("nht,ntd->nhd", p.astype(q.dtype), keys, preferred_element_type=jnp.float32).astype(q.dtype)


_DTYPES = ("float8_e4m3fn", "bfloat16")
_XLA = ("xla",)
SUITE = Suite(
    "indexer",
    "#5b6b1f",
    (
        *(ChoiceRow(s_c=s_c, dtype="float8_e4m3fn") for s_c in (8192, 16384)),
        *(ChoiceRow(s_c=s_c, dtype="bfloat16", peers=_XLA) for s_c in (8192, 16384)),
        *(StepRow(b=64, s_q=2, s_c=16384, dtype=t) for t in _DTYPES),
        *(StepRow(b=b, s_q=1, s_c=262144, dtype=t) for t in _DTYPES for b in (1, 8)),
        *(TopkRow(s_c=s_c, topk=k, peers=_XLA) for k in (512, 1024) for s_c in (8192, 16384)),
        TopkRow(b=64, s_q=2, s_c=16384, peers=_XLA),
        *(ChoiceRow(s_q=32768, s_c=8192, dtype=t, ratio=ratio) for t in _DTYPES for ratio in (4, 0)),
        *(
            row
            for t in _DTYPES
            for row in (
                ChoiceRow(s_c=65536, h=32, dtype=t),
                BlocksRow(s_c=65536, h=32, dtype=t, topk=2048),
                InsideBlocksRow(s_c=65536, h=32, dtype=t),
            )
        ),
        *(
            row
            for t in _DTYPES
            for row in (
                BlocksStepRow(b=64, s_q=1, s_c=131072, h=32, dtype=t, topk=2048),
                InsideBlocksStepRow(b=64, s_q=1, s_c=131072, h=32, dtype=t),
            )
        ),
        BlocksStepRow(b=64, s_q=1, s_c=131072, h=32, dtype="bfloat16", topk=2048, of_4_bits=True),
        InsideBlocksStepRow(b=64, s_q=1, s_c=131072, h=32, dtype="bfloat16", of_4_bits=True),
        ScoresRow(s_c=8192, dtype="bfloat16", peers=_XLA),
        *(AttendedRow(s_c=s_c, dtype="bfloat16", peers=_XLA) for s_c in (8192, 16384)),
    ),
)
