"""The suites dsv4, dense and window: prompts of attention, beside jax.nn's ways or our own two passes."""

import importlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import dsv4_attention, fmha, merge, sparse_fmha
from .._definitions.cache import Cache
from .._definitions.e4m3 import BF16_ROPE, E4M3
from .._definitions.span import Span
from .measure import Operands
from .row import CallRow, Suite


@dataclass(frozen=True, kw_only=True)
class AttentionRow(CallRow):
    """One call whose results are (o, lse)."""

    b: int
    s_q: int
    s_kv: int
    h_q: int
    d: int = 512
    dtype: str = "bfloat16"

    @property
    @abstractmethod
    def keys(self) -> str:
        """The keys that a query sees, in the words that the name has for them."""

    @property
    def heads(self) -> str:
        return f"h{self.h_q}"

    @property
    def kind(self) -> str:
        """A part of the name for entries that are not usual; "" for bfloat16."""
        return "" if self.dtype == "bfloat16" else f" {self.dtype}"

    @property
    def name(self) -> str:
        return f"d {self.d} {self.keys} b{self.b} s{self.s_q} {self.heads}{self.kind}"

    @property
    @abstractmethod
    def visible(self) -> int:
        """The number of pairs of a query and a key that it sees."""

    @property
    def d_v(self) -> int:
        """The first numbers of a latent are V; others, for RoPE, are K alone."""
        return min(self.d, 512)

    @property
    def flops(self) -> float:
        return 2.0 * (self.d + self.d_v) * self.h_q * self.visible

    def normal(self, keys: Iterator[jax.Array], *shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, self.dtype)


@dataclass(frozen=True, kw_only=True)
class PromptRow(AttentionRow):
    """Its operands are arrays."""

    has_sink: bool = True

    @property
    @abstractmethod
    def key_rows(self) -> int:
        """The number of keys in all batch entries and heads."""

    @property
    def bytes(self) -> float:
        operands = jax.eval_shape(self.operands, jax.random.key(0))
        read = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(operands))
        return float(read + self.b * self.s_q * self.h_q * (self.d + self.d_v + 4))

    def operands(self, key: jax.Array) -> Operands:
        keys = iter(jax.random.split(key, 8))
        arrays = {"q": self.normal(keys, self.b, self.s_q, self.h_q, self.d), **self.others(keys)}
        if self.has_sink:
            arrays["sink"] = jax.random.normal(next(keys), (self.h_q,))
        return arrays

    @abstractmethod
    def others(self, keys: Iterator[jax.Array]) -> Operands:
        """The operands beside q and the sink."""

    def indices(self, keys: Iterator[jax.Array], topk: int, entries: int) -> Operands:
        """Draws other entries for every query; none where a query sees them all."""
        if not topk:
            return {}
        some = lambda key: jnp.argsort(jax.random.bits(key, (entries,)))[:topk]  # noqa: E731
        per_query = jax.random.split(next(keys), self.b * self.s_q)
        indices = jax.lax.map(some, per_query, batch_size=256)
        return {"indices": indices.reshape(self.b, self.s_q, topk)}

    def seen(self, span: Span, s_kv: int) -> int:
        """Counts the pairs of a query and one of s_kv keys that it sees in a span."""
        start, stop = (np.asarray(x, np.int64) for x in span.bounds(self.b, self.s_q, s_kv))
        return int(np.maximum(stop - start, 0).sum())


@dataclass(frozen=True, kw_only=True)
class FmhaRow(PromptRow):
    """K and V, or from d 512 on with one KV head one array that is both. Its peers are cuDNN and XLA through jax.nn,
    and "flash_attention_3", by the package dew_flash_attn where it is installed.
    """

    op = "fmha"

    h_kv: int = 1
    has_sink: bool = False
    is_causal: bool = False
    window: int | None = None  # of keys that a query sees, where it does not see all
    segments: int = 1  # equally long ones of a row of tokens; a query sees keys of its own

    @property
    def shared_kv(self) -> bool:
        return self.d >= 512 and self.h_kv == 1

    @property
    def keys(self) -> str:
        kind = f"window {self.window}" if self.window else "causal" if self.is_causal else "full"
        return kind if self.segments == 1 else f"{kind} in {self.segments} segments"

    @property
    def heads(self) -> str:
        return f"h{self.h_q}" if self.shared_kv or self.h_kv == self.h_q else f"h{self.h_q}/{self.h_kv}"

    @property
    def visible(self) -> int:
        return self.seen(self._span_of(self._ids()) or Span(0, self.s_kv), self.s_kv)

    @property
    def key_rows(self) -> int:
        return self.b * self.h_kv * self.s_kv

    @property
    def span(self) -> Span | None:
        if self.window:
            return Span.sliding_window(self.s_q, self.window, self.s_kv - self.s_q)
        return Span.causal(self.s_q, self.s_kv - self.s_q) if self.is_causal else None

    def _ids(self) -> jax.Array | None:
        if self.segments == 1:
            return None
        ids = jnp.arange(self.s_kv, dtype=jnp.int32) // (self.s_kv // self.segments)
        return jnp.broadcast_to(ids, (self.b, self.s_kv))

    def _span_of(self, ids: jax.Array | None) -> Span | None:
        if ids is None:
            return self.span
        return Span.segments(ids) & self.span if self.span else Span.segments(ids)

    def others(self, keys: Iterator[jax.Array]) -> Operands:
        shape = self.b, self.s_kv, self.h_kv, self.d
        arrays = {name: self.normal(keys, *shape) for name in ("k", "v")[: 1 if self.shared_kv else 2]}
        return arrays if (ids := self._ids()) is None else arrays | {"ids": ids}

    def ours(self, **operands: Any) -> Any:
        d_v, span = self.d_v if self.shared_kv else None, self._span_of(operands.pop("ids", None))
        return fmha(**operands, d_v=d_v, span=span, implementation="cubin")

    def peer(self, name: Any, **operands: Any) -> Any:
        """jax.nn has no sinks, so it runs without."""
        if name == "flash_attention_3":
            return self._by_flash_attention_3(**operands)
        q, k = operands["q"], operands["k"]
        logits = 4 * self.b * self.h_q * self.s_q * self.s_kv
        if name == "xla" and logits > _memory() // 4:
            raise MemoryError(f"{logits / 2**30:.0f} GiB of logits")
        return jax.nn.dot_product_attention(
            q,
            k,
            operands.get("v", k),
            is_causal=self.is_causal or self.window is not None,
            local_window_size=(self.window - 1, 0) if self.window else None,
            implementation=name,
        )

    def _by_flash_attention_3(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None = None, sink: jax.Array | None = None
    ) -> jax.Array:
        package = importlib.import_module("dew_flash_attn")
        window = (self.window - 1, 0) if self.window else (-1, -1)
        how = {"is_causal": self.is_causal or bool(self.window), "window_size": window, "sinks": sink}
        if ids is None:
            found: jax.Array = package.flash_mha(q, k, v, **how)
            return found
        length = self.s_kv // self.segments
        starts = jnp.arange(self.b * self.segments + 1, dtype=jnp.int32) * length
        packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        found = package.flash_mha_varlen(*packed, starts, length, **how)
        return found.reshape(q.shape)


def _memory() -> int:
    return (jax.local_devices(backend="cuda")[0].memory_stats() or {})["bytes_limit"]


@dataclass(frozen=True, kw_only=True)
class SparseRow(PromptRow):
    """Each query sees topk of all keys."""

    op = "sparse_fmha"

    topk: int

    @property
    def keys(self) -> str:
        return f"top-k {self.topk} of {self.s_kv}"

    @property
    def visible(self) -> int:
        return self.b * self.s_q * self.topk

    @property
    def key_rows(self) -> int:
        return self.b * self.s_kv

    def others(self, keys: Iterator[jax.Array]) -> Operands:
        return {"kv": self.normal(keys, self.b, self.s_kv, self.d), **self.indices(keys, self.topk, self.s_kv)}

    def ours(self, **operands: Any) -> Any:
        return sparse_fmha(**operands, d_v=self.d_v, implementation="cubin")


@dataclass(frozen=True, kw_only=True)
class LayerRow(PromptRow):
    """A window and compressed entries, or topk of them, in one pass; two passes, merged, are its peer."""

    op = "dsv4_attention"

    s_c: int
    ratio: int
    topk: int = 0
    window: int = 128
    page: int = 0  # entries of a page; 0 means a contiguous array

    @property
    def keys(self) -> str:
        compressed = f"top-k {self.topk} of {self.s_c}" if self.topk else f"{self.s_c} of ratio {self.ratio}"
        return f"window {self.window} + {compressed}" + (" in pages" if self.page else "")

    @property
    def near(self) -> Span:
        """The queries stand at the end of a context, and so does the window cache."""
        return Span.sliding_window(self.s_q, self.window, self.s_kv - self.s_q)

    @property
    def far(self) -> Span:
        return Span.compressed(self.s_q, self.ratio, max(self.s_c * self.ratio, self.s_kv) - self.s_q)

    @property
    def visible(self) -> int:
        near = self.seen(self.near, self.s_kv)
        if self.topk:
            return near + self.b * self.s_q * self.topk
        return near + self.seen(self.far, self.s_c)

    @property
    def key_rows(self) -> int:
        return self.b * (self.s_kv + self.s_c)

    def others(self, keys: Iterator[jax.Array]) -> Operands:
        window_kv, compressed_kv = (self.normal(keys, self.b, s, self.d) for s in (self.s_kv, self.s_c))
        arrays: Operands = {"window_kv": window_kv, "compressed_kv": compressed_kv}
        if self.page:
            pages = compressed_kv.reshape(-1, self.page, self.d)
            table = jax.random.permutation(next(keys), len(pages)).astype(jnp.int32)
            arrays["compressed_kv"] = Cache(pages, table.reshape(self.b, -1))
        return arrays | self.indices(keys, self.topk, self.s_c)

    def ours(self, **operands: Any) -> Any:
        return self._call(operands)

    def peer(self, name: Any, **operands: Any) -> Any:
        assert name == "two_pass"
        q, kv, indices = operands["q"], operands["compressed_kv"], operands.get("indices")
        near = fmha(q, operands["window_kv"][:, :, None], span=self.near, implementation="cubin")
        if indices is None:
            far = fmha(q, kv[:, :, None], span=self.far, implementation="cubin")
        else:
            _, stop = self.far.bounds(self.b, self.s_q, self.s_c)
            far = sparse_fmha(q, kv, jnp.where(indices < stop[..., None], indices, -1), implementation="cubin")
        return merge([near, far], operands.get("sink"))

    def _call(self, operands: Operands, precision: str | None = None) -> Any:
        how: dict[str, Any] = {"window": self.near, "ratio": self.far, "precision": precision}
        return dsv4_attention(**operands, **how, implementation="cubin")

    def of(self, name: str) -> CallRow:
        return replace(self, page=0) if name == "contiguous" else self


@dataclass(frozen=True, kw_only=True)
class E4m3Row(LayerRow):
    """A layer by products of e4m3; the peer "bfloat16" is our usual call, "bf16_rope" keeps RoPE in bfloat16."""

    @property
    def kind(self) -> str:
        return f" {E4M3} products"

    def ours(self, **operands: Any) -> Any:
        return self._call(operands, E4M3)

    def peer(self, name: Any, **operands: Any) -> Any:
        return self._call(operands, {"bfloat16": None, "bf16_rope": BF16_ROPE}[name])


@dataclass(frozen=True, kw_only=True)
class CausalE4m3Row(FmhaRow):
    """All keys up to the query's own by products of e4m3: a window that covers them; the peer "bfloat16" is `fmha`."""

    op = "dsv4_attention"

    @property
    def kind(self) -> str:
        return f" {E4M3} products"

    def ours(self, **operands: Any) -> Any:
        q, k = operands["q"], operands["k"]
        return dsv4_attention(q, k[:, :, 0], window=self.s_kv, precision=E4M3, implementation="cubin")

    def peer(self, name: Any, **operands: Any) -> Any:
        assert name == "bfloat16"
        return super().ours(**operands)


def by_e4m3(row: LayerRow) -> E4m3Row:
    return E4m3Row(**{**vars(row), "peers": ("bfloat16", "bf16_rope")})


def dense(d: int, b: int, s: int, h_q: int, h_kv: int, **fields: Any) -> FmhaRow:
    return FmhaRow(d=d, b=b, s_q=s, s_kv=s, h_q=h_q, h_kv=h_kv, **{"peers": ("cudnn", "xla"), **fields})


def causal(*sizes: int, **fields: Any) -> FmhaRow:
    return dense(*sizes, is_causal=True, **fields)


def window(*sizes: int, **fields: Any) -> FmhaRow:
    return dense(*sizes, window=128, **fields)


_HOPPERS = ("cudnn", "flash_attention_3")
_BOTH_ORDERS = ("cudnn", "xla", "batch_invariant")


def layer(h_q: int, s_q: int = 4096, **fields: Any) -> LayerRow:
    return LayerRow(b=1, s_q=s_q, s_kv=s_q + 127, h_q=h_q, **{"peers": ("two_pass",), **fields})


_OF_LAYER = ("two_pass", "batch_invariant")


def top_k(h_q: int, s_kv: int, topk: int, **fields: Any) -> SparseRow:
    return SparseRow(b=1, s_q=4096, s_kv=s_kv, h_q=h_q, topk=topk, **fields)


SUITES = (
    Suite(
        "dsv4",
        "#4053d3",
        (
            *(
                layer(h, topk=k, ratio=4, s_c=s_c, peers=_OF_LAYER)
                for h, k in ((128, 1024), (64, 512), (32, 512), (16, 512), (8, 512))
                for s_c in (8192, 65536)
            ),
            *(top_k(h, s_kv, k) for h, k in ((128, 1024), (64, 512)) for s_kv in (8192, 65536)),
            layer(128, ratio=128, s_c=512, peers=_OF_LAYER),
            *(
                by_e4m3(layer(h, topk=k, ratio=4, s_c=s_c))
                for h, k in ((128, 1024), (64, 512))
                for s_c in (8192, 65536)
            ),
            CausalE4m3Row(b=1, s_q=4096, s_kv=4096, h_q=128, d=512, is_causal=True, peers=("bfloat16",)),
        ),
    ),
    Suite(
        "dense",
        "#b51d14",
        (
            causal(512, 1, 4096, 128, 1, peers=_BOTH_ORDERS),
            causal(512, 1, 8192, 128, 1),
            causal(512, 1, 8192, 32, 4, peers=_BOTH_ORDERS),  # as in Gemma 4's global layers, which have V of their own
            causal(512, 1, 4096, 16, 2),
            causal(64, 4, 8192, 16, 16),
            causal(128, 2, 8192, 16, 16, peers=_BOTH_ORDERS),
            dense(128, 2, 8192, 16, 16),
            causal(128, 2, 8192, 16, 16, dtype="float16"),
            causal(256, 2, 8192, 8, 1),
            *(causal(d, 1, 8192, 64, 8, peers=_HOPPERS) for d in (64, 128)),  # as in gpt-oss, in Qwen 3
            causal(64, 1, 8192, 64, 8, segments=8, has_sink=True, peers=_HOPPERS[1:]),
            causal(128, 1, 512, 16, 16),
            causal(128, 64, 128, 16, 16),
        ),
    ),
    Suite(
        "window",
        "#00806c",
        (
            *(window(512, 1, 4096, h, 1, has_sink=True, peers=_BOTH_ORDERS) for h in (128, 64, 16)),
            window(128, 2, 8192, 16, 1),
            window(64, 1, 8192, 64, 8, has_sink=True, peers=_HOPPERS),
        ),
    ),
)
