"""The suite gqa: steps of grouped-query attention over caches of K and of V, as gpt-oss, Llama and Qwen have them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.cache import Cache
from .._ops.gqa_decode import gqa_decode
from .attention import AttentionRow
from .decode import PAGE
from .measure import Operands
from .row import CallRow, Suite


@dataclass(frozen=True, kw_only=True)
class HeadsStepRow(AttentionRow):
    """The last s_q tokens of sequences of s_kv tokens, or up to `fewer` tokens fewer, over pages. Its peers: our call
    over "contiguous" caches, and cuDNN through jax.nn over such, without the sink; for caches in FP8 our call over
    "bfloat16".
    """

    op = "gqa_decode"

    s_q: int = 1
    h_kv: int = 8
    fewer: int = 0  # with a window
    window: int | None = None
    page: int = PAGE  # 0 means contiguous caches
    caches: str = "bfloat16"  # the dtype of their entries

    @property
    def keys(self) -> str:
        where = f"pages of {self.page}" if self.page else "contiguous"
        tokens = f"{self.s_kv - self.fewer} to {self.s_kv}" if self.fewer else self.s_kv
        return f"step, {f'window {self.window} of ' if self.window else ''}{tokens} in {where}"

    @property
    def heads(self) -> str:
        return f"h{self.h_q}/{self.h_kv}"

    @property
    def kind(self) -> str:
        return super().kind if self.caches == "bfloat16" else f" {self.caches}"

    @property
    def d_v(self) -> int:
        return self.d

    @property
    def entries(self) -> int:
        """Entries of a cache that some query of a sequence sees."""
        return min(self.s_kv, self.window + self.s_q - 1) if self.window else self.s_kv

    @property
    def visible(self) -> int:
        return sum(self.b * min(self.s_kv - i, self.window or self.s_kv) for i in range(self.s_q))

    @property
    def bytes(self) -> float:
        read = 2 * jnp.dtype(self.caches).itemsize * self.b * self.entries * self.h_kv * self.d
        return float(read + self.b * self.s_q * self.h_q * (4 * self.d + 4))

    def operands(self, key: jax.Array) -> Operands:
        """Pages are in random order."""
        q, sink, *of_caches = jax.random.split(key, 6)

        def cache(of_entries: jax.Array, of_table: jax.Array) -> Cache:
            page = self.page or self.s_kv
            pages = self.b * self.s_kv // page
            held = jax.random.normal(of_entries, (pages, page, self.h_kv * self.d), self.dtype).astype(self.caches)
            table = jax.random.permutation(of_table, pages).astype(jnp.int32).reshape(self.b, -1)
            return Cache(held, table if self.page else None)

        return {
            "q": jax.random.normal(q, (self.b, self.s_q, self.h_q, self.d), self.dtype),
            "k_cache": cache(*of_caches[:2]),
            "v_cache": cache(*of_caches[2:]),
            "lengths": self.s_kv - jnp.arange(self.b, dtype=jnp.int32) % (self.fewer + 1),
            "sink": jax.random.normal(sink, (self.h_q,)),
        }

    def ours(self, **operands: Any) -> Any:
        return gqa_decode(**operands, window=self.window, implementation="cubin")

    def peer(self, name: Any, **operands: Any) -> Any:
        q, caches = operands["q"], (operands["k_cache"], operands["v_cache"])
        k, v = (x.entries.reshape(self.b, self.s_kv, self.h_kv, self.d) for x in caches)
        return jax.nn.dot_product_attention(q, k, v, implementation=name)

    def of(self, name: str) -> CallRow:
        if name == "bfloat16":
            return replace(self, caches=name)
        return replace(self, page=0) if name in ("contiguous", "cudnn") else self

    def function(self, name: str) -> Callable[..., Any]:
        return functools.partial(self.peer, name) if name == "cudnn" else super().function(name)


def _all(b: int, d: int) -> HeadsStepRow:
    return HeadsStepRow(b=b, s_kv=8192, h_q=64, d=d, peers=("contiguous", "cudnn"))


def _window(b: int, d: int) -> HeadsStepRow:
    return HeadsStepRow(b=b, s_kv=1024, h_q=64, d=d, window=128, peers=("contiguous",))


SUITE = Suite(
    "gqa",
    "#5b4b9a",
    (
        *(_all(b, d) for d in (64, 128) for b in (1, 8, 64, 256)),
        *(replace(_all(b, 256), peers=()) for b in (1, 8, 64, 256)),
        *(_window(b, d) for d in (64, 128, 256) for b in (1, 8, 64, 256)),
        *(
            replace(row(b, d), caches="float8_e4m3fn", peers=("bfloat16",))
            for row, bs in ((_all, (8, 64, 256)), (_window, (64,)))
            for d in (64, 128)
            for b in bs
        ),
        replace(_all(64, 64), page=16),
        *(replace(_all(b, 64), s_q=s_q, peers=()) for s_q in (2, 4, 8) for b in (1, 64, 256)),
        replace(_window(64, 64), s_q=4, peers=()),
        *(
            replace(_window(64, d), fewer=63, caches=caches, peers=())
            for d in (64, 128)
            for caches in ("bfloat16", "float8_e4m3fn")
        ),
        *(replace(_all(64, 64), s_q=s_q, caches="float8_e4m3fn", peers=()) for s_q in (2, 4, 8)),
        replace(_all(64, 256), caches="float8_e4m3fn", peers=()),
    ),
)
