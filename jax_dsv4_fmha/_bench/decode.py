"""The suite decode: steps of generation over caches, beside XLA's way, and 61 of them in a row."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.cache import Cache
from .._definitions.e4m3 import E4M3
from .._definitions.packed import LAYOUTS, quantize_cache
from .._definitions.span import Span
from .._dispatch.seen_slots import seen_slots
from .._dispatch.sources import SelectionSource
from .._ops.decode import dsv4_decode
from .._ops.dsv4 import dsv4_attention
from .attention import AttentionRow, FmhaRow, layer
from .measure import Contestant, Operands, Times, compiled, under_graphs
from .row import CallRow, Row, Suite

PAGE = 64
_ENTRIES = 16384  # of the compressed cache, for each sequence
_CACHES = {
    "": (None, None),
    "fp8": ("v4_fp8", "v4_fp8"),
    "v4_fp4": ("v4_fp8", "v4_fp4"),
    "v41_fp4": ("v41_fp8", "v41_fp4"),
}
"""layouts of the window cache and the compressed cache, by the kind of a row"""


@dataclass(frozen=True, kw_only=True)
class DecodeRow(AttentionRow):
    """The last tokens of sequences of s_kv tokens, over pages."""

    op = "dsv4_decode"

    ratio: int
    topk: int = 0
    window: int = 128
    page: int = PAGE
    caches: str = ""  # a key of _CACHES

    @property
    def layouts(self) -> tuple[str | None, str | None]:
        return _CACHES[self.caches]

    @property
    def entries(self) -> int:
        """The number of entries that a sequence has in the compressed cache."""
        return self.s_kv // self.ratio

    @property
    def keys(self) -> str:
        compressed = f"top-k {self.topk} of {self.entries}" if self.topk else f"{self.entries} of ratio {self.ratio}"
        return f"window {self.window} + {compressed}"

    @property
    def kind(self) -> str:
        return f" {self.caches}" if self.caches else super().kind

    @property
    def visible(self) -> int:
        return self.b * self.s_q * (self.window + (self.topk or self.entries))

    @property
    def bytes(self) -> float:
        """An entry counts for every query that selects it, and the window once for a sequence."""
        near, far = self.window + self.s_q - 1, self.topk * self.s_q or self.entries
        near_bytes, far_bytes = (2 * self.d if x is None else LAYOUTS[x].entry for x in self.layouts)
        read = self.b * (near * near_bytes + far * far_bytes + self.s_q * 4 * self.topk)
        return float(read + self.b * self.s_q * self.h_q * (4 * self.d + 4))

    def operands(self, key: jax.Array) -> Operands:
        """Sequences that fill their pages, which are in random order, and indices that are random permutations."""
        keys = iter(jax.random.split(key, 8))
        arrays: Operands = {
            "q": self.normal(keys, self.b, self.s_q, self.h_q, self.d),
            "window_cache": self._cache(keys, self.window + self.s_q - 1, self.layouts[0]),
            "compressed_cache": self._cache(keys, self.entries, self.layouts[1]),
            "lengths": jnp.full((self.b,), self.s_kv, jnp.int32),
            "sink": jax.random.normal(next(keys), (self.h_q,)),
        }
        if self.topk:
            rows = permutations(next(keys), self.b * self.s_q, self.entries, self.topk)
            arrays["indices"] = rows.reshape(self.b, self.s_q, self.topk)
        return arrays

    def _cache(self, keys: Iterator[jax.Array], entries: int, layout: str | None) -> Cache:
        pages = -(-entries // self.page)
        table = jax.random.permutation(next(keys), self.b * pages).astype(jnp.int32).reshape(self.b, pages)
        held = self.normal(keys, self.b * pages, self.page, self.d)
        return Cache(held, table) if layout is None else Cache(quantize_cache(held, layout), table, layout)

    def ours(self, **operands: Any) -> Any:
        return dsv4_decode(**operands, ratio=self.ratio, window=self.window, implementation="cubin")

    def peer(self, name: str, **operands: Any) -> Any:
        return self._xla(**operands)

    def _xla(
        self, *, q: Any, window_cache: Cache, compressed_cache: Cache, lengths: Any, sink: Any, indices: Any = None
    ) -> Any:
        """The usual way in jnp: gather the entries, two products and a softmax between them."""
        sources = seen_slots(
            self.s_q, window_cache, compressed_cache, lengths, indices, self.ratio, self.window, with_kernel=False
        )
        parts = [x for source in sources for x in source.parts()]
        keys = jnp.concatenate([_gather(x) for x in parts], 2)
        there = [(x.indices >= 0) & (jnp.arange(x.indices.shape[2]) < x.length[..., None]) for x in parts]
        seen = jnp.concatenate(there, 2)
        s = jnp.einsum("bshd,bsnd->bshn", q, keys, preferred_element_type=jnp.float32) * self.d**-0.5
        s = jnp.concatenate(
            [jnp.where(seen[:, :, None], s, -jnp.inf), jnp.broadcast_to(sink[:, None], (*q.shape[:-1], 1))], -1
        )
        p = jax.nn.softmax(s)[..., :-1].astype(q.dtype)
        return jnp.einsum("bshn,bsnd->bshd", p, keys)

    def of(self, name: str) -> CallRow:
        return replace(self, caches="fp8") if name == "v4_fp8" else self


@dataclass(frozen=True, kw_only=True)
class ChunkRow(DecodeRow):
    """A chunk of a prompt by products of e4m3, from a cache's bytes. The peer "unpacked" unpacks keys to bfloat16, and
    attends to these, as a layer does without `precision`.
    """

    @property
    def kind(self) -> str:
        return f" {self.caches} {E4M3} products"

    @property
    def first(self) -> int:
        return self.s_kv - self.s_q

    def operands(self, key: jax.Array) -> Operands:
        """Indices of entries that are past for all queries."""
        arrays = super().operands(key)
        past = self.first // self.ratio
        return arrays | {"indices": jnp.where(arrays["indices"] < past, arrays["indices"], arrays["indices"] - past)}

    def ours(self, **operands: Any) -> Any:
        return dsv4_decode(**operands, ratio=self.ratio, window=self.window, precision=E4M3, implementation="cubin")

    def peer(self, name: str, **operands: Any) -> Any:
        near, far = operands.pop("window_cache"), operands.pop("compressed_cache")
        begin = self.first - self.window + 1
        kv = near.take(jnp.broadcast_to(jnp.arange(begin, self.s_kv, dtype=jnp.int32), (self.b, self.s_kv - begin)))
        del operands["lengths"]
        window = Span.sliding_window(self.s_q, self.window, self.first - begin)
        at: dict[str, Any] = {"q_offset": self.first, "window": window, "ratio": self.ratio}
        return dsv4_attention(window_kv=kv, compressed_kv=far.take(), **operands, **at, implementation="cubin")

    def of(self, name: str) -> CallRow:
        return self


@dataclass(frozen=True, kw_only=True)
class LayersRow(Row):
    """A step of a whole model's attention: one call for each layer.

    The peer "graph" is ours too: the step by the host's clock, under CUDA graphs, many steps in a row. So its ratio
    shows the gaps between kernels.
    """

    layer: DecodeRow
    layers: int

    @property
    def name(self) -> str:
        return f"{self.layers} layers of {self.layer.name}"

    @property
    def flops(self) -> float:
        return self.layers * self.layer.flops

    @property
    def bytes(self) -> float:
        return self.layers * self.layer.bytes

    @property
    def case(self) -> dict[str, Any]:
        return {**self.layer.case, "layers": self.layers}

    @property
    def calls(self) -> set[CallRow]:
        return self.layer.calls

    @property
    def sets(self) -> int:
        return 1

    def inputs(self, sets: int) -> list[Operands]:
        layers = self.layer.inputs(sets * self.layers)
        return [{"q": layers[0]["q"], "layers": layers}]

    def ours(self, *, q: jax.Array, layers: list[Operands]) -> Any:
        """One call after the other, each with the previous one's o as its q; all read pages at the places of the
        first.
        """
        first = layers[0]
        for operands in layers:
            caches = {
                name: replace(operands[name], block_table=first[name].block_table)
                for name in ("window_cache", "compressed_cache")
            }
            q, _ = self.layer.ours(**operands | caches | {"q": q, "lengths": first["lengths"]})
        return q

    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        return {} if name == "graph" else {name: compiled(name, self.ours, inputs)}

    def times(self, measured: dict[str, Times], contestants: Mapping[str, Contestant]) -> dict[str, Times]:
        if "graph" not in self.peers or "ours" not in measured:
            return measured
        (operands,) = contestants["ours"].sets
        return measured | {"graph": under_graphs(self.ours, operands, len(measured["ours"]["rounds"]))}


def permutations(key: jax.Array, rows: int, n: int, some: int) -> jax.Array:
    """int32 [rows, some]: in each row another permutation of n, a power of two, by a hash that is one to one."""
    bits = n.bit_length() - 1
    x = jnp.arange(some, dtype=jnp.uint32)
    for factor in jax.random.bits(key, (4, rows, 1)) | 1:
        x = x * factor % n
        x ^= x >> (bits + 1) // 2
    return x.astype(jnp.int32)


def _gather(source: SelectionSource) -> Any:
    pool, slots = source.keys[0], source.indices
    if not source.is_packed:
        return pool[slots]
    layout = LAYOUTS[source.layout]
    page = layout.page_entries(pool.shape[1])

    def read(start: Any, size: int) -> Any:
        return jax.vmap(lambda page, at: jax.lax.dynamic_slice(pool, (page, at), (1, size))[0])(
            (slots // page).ravel(), start.ravel()
        ).reshape(*slots.shape, size)

    return layout.decode(*map(read, layout.starts(slots % page, page), layout.parts))


def step(h_q: int, topk: int, b: int, caches: str = "", peers: tuple[str, ...] = (), s_q: int = 2) -> DecodeRow:
    """Two new tokens, or as many as drafts are verified, in a layer of ratio 4."""
    return DecodeRow(b=b, s_q=s_q, s_kv=4 * _ENTRIES, h_q=h_q, ratio=4, topk=topk, caches=caches, peers=peers)


def _dense(caches: str) -> DecodeRow:
    """One new token that sees the window and all of a long cache."""
    return DecodeRow(b=16, s_q=1, s_kv=32768, h_q=128, ratio=1, caches=caches, peers=("xla",))


def _chunk(s_q: int, h_q: int, topk: int) -> Row:
    """A chunk of a prompt, whose compressed entries are in pages."""
    return layer(h_q, s_q, topk=topk, ratio=4, s_c=16384, page=PAGE, peers=("contiguous",))


SUITE = Suite(
    "decode",
    "#a06000",
    (
        *(
            step(h, k, b, caches, ("xla", "batch_invariant") if b <= 64 else ())
            for h, k in ((128, 1024), (64, 512))
            for caches in ("", "fp8")
            for b in (2, 64, 128, 148)
        ),
        *(step(64, 512, b, caches, ("v4_fp8",)) for caches in ("v4_fp4", "v41_fp4") for b in (64, 128)),
        step(128, 1024, 64, "v4_fp4", ("v4_fp8",)),
        *(step(128, 1024, b, "fp8", s_q=8) for b in (2, 64)),
        _chunk(2048, 64, 512),
        *(
            ChunkRow(b=1, s_q=4096, s_kv=4 * n, h_q=h, ratio=4, topk=k, caches=caches, peers=("unpacked",))
            for h, k in ((128, 1024), (64, 512))
            for caches, n in (("fp8", 8192), ("fp8", 65536), ("v41_fp4", 65536))
        ),
        FmhaRow(b=16, s_q=1, s_kv=32768, h_q=128, peers=("cudnn", "xla")),
        *(_dense(caches) for caches in ("", "fp8")),
        *(LayersRow(layer=step(128, 1024, b, "fp8"), layers=61, peers=("graph",)) for b in (2, 64)),
    ),
)
