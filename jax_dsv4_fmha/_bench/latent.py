"""The suite latent: latents of 576 numbers, whose first 512 are V, in prompts and steps; and of 512 beside them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.cache import Cache
from .._definitions.packed import LAYOUTS, quantize_cache
from .._ops.mla_decode import mla_decode
from .attention import AttentionRow, FmhaRow, causal, top_k
from .decode import PAGE, permutations
from .measure import Operands
from .row import Suite


@dataclass(frozen=True, kw_only=True)
class LatentStepRow(AttentionRow):
    """The last tokens of sequences of s_kv tokens, over the pages of one cache, where each sees topk of them."""

    op = "mla_decode"

    s_q: int = 1
    d: int = 576
    topk: int
    layout: str = "v32_fp8"  # "": numbers of dtype

    @property
    def keys(self) -> str:
        return f"step, top-k {self.topk} of {self.s_kv}"

    @property
    def kind(self) -> str:
        return f" {self.layout}" if self.layout else super().kind

    @property
    def visible(self) -> int:
        return self.b * self.s_q * self.topk

    @property
    def bytes(self) -> float:
        """An entry counts for every query that selects it."""
        read = self.visible * ((LAYOUTS[self.layout].entry if self.layout else 2 * self.d) + 4)
        return float(read + self.b * self.s_q * self.h_q * (2 * self.d + 2 * self.d_v + 4))

    def operands(self, key: jax.Array) -> Operands:
        """Sequences that fill their pages, which are in random order, and positions that are random permutations."""
        keys, pages = iter(jax.random.split(key, 5)), self.s_kv // PAGE
        table = jax.random.permutation(next(keys), self.b * pages).astype(jnp.int32).reshape(self.b, pages)
        some = lambda key: jax.random.normal(key, (PAGE, self.d), self.dtype)  # noqa: E731
        page = (lambda key: quantize_cache(some(key), self.layout)) if self.layout else some
        held = jax.lax.map(page, jax.random.split(next(keys), self.b * pages), batch_size=256)
        return {
            "q": self.normal(keys, self.b, self.s_q, self.h_q, self.d),
            "cache": Cache(held, table, self.layout) if self.layout else Cache(held, table),
            "lengths": jnp.full((self.b,), self.s_kv, jnp.int32),
            "indices": permutations(next(keys), self.b * self.s_q, self.s_kv, self.topk).reshape(self.b, self.s_q, -1),
        }

    def ours(self, **operands: Any) -> Any:
        return mla_decode(**operands, implementation="cubin")


def _step(b: int, h_q: int) -> LatentStepRow:
    return LatentStepRow(b=b, s_kv=8192, h_q=h_q, topk=2048)


SUITE = Suite(
    "latent",
    "#7a4b00",
    (
        *(top_k(h, s_kv, 2048, d=576) for h in (128, 64, 16, 8) for s_kv in (8192, 65536)),
        *(top_k(h, 8192, 2048) for h in (64, 8)),
        top_k(64, 8192, 2051),
        *(causal(576, 1, 4096, h, 1, peers=()) for h in (128, 16)),
        FmhaRow(d=576, b=16, s_q=1, s_kv=32768, h_q=128),
        *(_step(b, 128) for b in (2, 64, 128)),
        _step(64, 64),
        *(LatentStepRow(b=64, s_kv=8192, h_q=8, d=512, topk=2051, layout=x) for x in ("", "v41_fp8")),
    ),
)
