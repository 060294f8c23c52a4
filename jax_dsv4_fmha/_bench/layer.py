"""The suite layer: whole layers of DeepSeek-V4-Flash, and the time of each of their parts.

The compiled program tells which part a kernel belongs to. A matrix product is what XLA gives to cuBLAS or Triton, with
the sum of its splits, and what unpacks its matrix. Every other kernel has the name that `jax_dsv4_fmha.layers` gives
with `jax.named_scope`; a fusion has the name of its last operation.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Cache, quantize_cache
from .._cli.report import table as as_table
from ..layers import STEP_OPTIONS, DSV4Attention, LayerCache, Shared, from_config
from .measure import KERNEL_BY_KERNEL, Contestant, Operands, Times, by_the_host_s_clock
from .row import Row, Suite
from .tables import spread

CONTEXT = 16384  # tokens of each sequence in a step
FLASH = {
    "hidden_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000, "compress_rope_theta": 160000,
    "compress_ratios": [0, 4, 128],
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}  # fmt: skip
"""V4-Flash, with one layer of each kind"""
ALL_RATIOS = (0, 0, *(4, 128) * 20, 4)
"""of its 43 layers"""
ALIKE = 8  # layers of one kind in a program, where a kind is timed in a graph
PRODUCTS, OTHER = "products", "other"
PARTS = ("attention", "indexer", "compressor", "append", "rope", "norm")


@functools.cache
def _of_matrices(layer: DSV4Attention) -> int:
    """The number of numbers in all matrices."""
    params = jax.eval_shape(layer.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1)


@dataclass(frozen=True, kw_only=True)
class LayerRow(Row):
    """A prompt, its gradient, or a step of generation, in one kind of layer."""

    op = "DSV4Attention"
    kernels_named_by = "hlo_op"

    b: int
    s_q: int
    s_kv: int
    ratio: int
    has_gradient: bool = False
    cache: str = "bfloat16"
    """its dtype, in a step"""
    packed: bool = False
    """whether projections are in FP8"""

    @property
    def name(self) -> str:
        what = "gradient and layer" if self.has_gradient else "layer"
        kind = _kind(self.ratio) + ", packed" * self.packed
        work = f"step after {self.s_kv}, b{self.b}" if self.is_step else f"prompt of {self.s_q}"
        return f"{what} {kind}, {work}" + ", FP8" * (self.cache != "bfloat16")

    @property
    def is_step(self) -> bool:
        return self.s_q != self.s_kv

    @property
    def layer(self) -> DSV4Attention:
        return next(layer for layer in from_config(FLASH) if layer.ratio == self.ratio)

    @property
    def passes(self) -> int:
        return 3 if self.has_gradient else 1

    @property
    def flops(self) -> float:
        """Products with all matrices and with the visible keys."""
        layer = self.layer
        of_keys = 4.0 * layer.d * layer.heads * self._seen
        return self.passes * (2.0 * self.b * self.s_q * _of_matrices(layer) + of_keys)

    @property
    def bytes(self) -> float:
        """The bytes of matrices, x, y and cached keys, for all passes."""
        layer = self.layer
        cached = layer.d * self._seen if self.is_step else 0
        saved = sum(x.size for x in jax.tree.leaves(self._params) if x.dtype == jnp.uint8) if self.packed else 0
        return self.passes * (2.0 * (_of_matrices(layer) + 2 * self.b * self.s_q * layer.hidden + cached) - saved)

    def _made(self, key: jax.Array) -> Any:
        params = self.layer.init(key, jnp.bfloat16)
        params = self.layer.packed(params) if self.packed else params
        return self.layer.joined(params) if self.is_step else params

    @property
    def _params(self) -> Any:
        return jax.eval_shape(self._made, jax.random.key(0))

    @property
    def _seen(self) -> int:
        """The number of pairs of a query and a key that it sees."""
        layer, tokens = self.layer, np.arange(self.s_kv - self.s_q, self.s_kv) + 1
        past = tokens // self.ratio if self.ratio else np.zeros_like(tokens)
        if layer.indexer is not None:
            past = np.minimum(past, layer.indexer.topk)
        return self.b * int(past.sum() + np.minimum(tokens, layer.window).sum())

    @property
    def sets(self) -> int:
        return 1

    def inputs(self, sets: int) -> list[Operands]:
        layer = self.layer
        shape = self.b, self.s_q, layer.hidden
        operands = {
            "params": jax.jit(self._made)(jax.random.key(0)),
            "x": jax.random.normal(jax.random.key(1), shape, jnp.bfloat16),
            # not x itself, with whose products XLA would merge those of dy, and copy both matrices side by side
            "dy": jax.random.normal(jax.random.key(3), shape, jnp.bfloat16),
            "lengths": jnp.full(self.b, self.s_kv, jnp.int32),  # not known while tracing, as a server has them
        }
        return [operands]

    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        return {name: self.compiled(inputs, KERNEL_BY_KERNEL)}

    def compiled(self, inputs: Sequence[Operands], options: Mapping[str, str | bool]) -> Contestant:
        """The layer. A step updates its cache in place, and keeps it."""
        layer, cache = self.layer, self.filled() if self.is_step else None

        def ours(
            cache: LayerCache | None,
            params: Any,
            x: jax.Array,
            dy: jax.Array,
            lengths: jax.Array,
            shared: Shared | None = None,
        ) -> Any:
            if cache is not None:
                out = layer.step(params, x, cache, shared, lengths=lengths)
                return out.cache, out.y
            y, vjp = jax.vjp(lambda params, x: layer(params, x).y, params, x)
            return None, (vjp(dy) if self.has_gradient else y)

        program = jax.jit(ours, donate_argnums=0).lower(cache, **inputs[0]).compile(compiler_options=dict(options))

        def run(operands: Operands) -> Any:
            nonlocal cache
            cache, result = program(cache, **operands)
            return result

        return Contestant(run, inputs, program.as_text() or "")

    def filled(self) -> LayerCache:
        """The cache of a step, with random entries: among equal scores of index keys a choice would take longer."""
        empty = self.layer.cache(self.b, self.s_kv, jnp.dtype(self.cache))
        keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(empty))))

        def is_packed(x: Any) -> bool:
            return isinstance(x, Cache) and x.is_packed

        def random(x: Any) -> Any:
            if is_packed(x):
                return replace(x, entries=_packed(next(keys), x))
            return jax.random.normal(next(keys), x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        cache: LayerCache = jax.tree.map(random, empty, is_leaf=is_packed)
        return cache

    def times(self, measured: dict[str, Times], contestants: Mapping[str, Contestant]) -> dict[str, Times]:
        """The measured times, with the time of every part in them."""
        return with_parts(measured, contestants)


def _packed(key: jax.Array, cache: Cache) -> jax.Array:
    """Random entries of a packed cache, page by page."""

    @jax.jit
    def page(key: jax.Array) -> jax.Array:
        return quantize_cache(jax.random.normal(key, (cache.page, cache.packing.d), jnp.bfloat16), cache.layout)

    return jax.lax.map(page, jax.random.split(key, cache.entries.shape[0]))


@dataclass(frozen=True, kw_only=True)
class StackRow(Row):
    """A step of generation through the attention of many layers, in one program: all of the model's, or of one kind.

    Layers of a kind share parameters. Each has a cache of its own, and takes the sum of what came before it.
    """

    op = "DSV4Attention"
    kernels_named_by = "hlo_op"

    b: int
    s_kv: int
    ratio: int | None = None
    """of all layers; None for the model's"""
    cache: str = "bfloat16"

    @property
    def name(self) -> str:
        kind = "" if self.ratio is None else f" {_kind(self.ratio)}"
        what = f"{len(self.layers)} layers{kind}, step after {self.s_kv}, b{self.b}"
        return what + ", FP8" * (self.cache != "bfloat16")

    @property
    def layers(self) -> list[LayerRow]:
        ratios = ALL_RATIOS if self.ratio is None else (self.ratio,) * ALIKE
        kinds = {
            ratio: LayerRow(b=self.b, s_q=1, s_kv=self.s_kv, ratio=ratio, cache=self.cache) for ratio in set(ratios)
        }
        return [kinds[ratio] for ratio in ratios]

    @property
    def flops(self) -> float:
        return sum(layer.flops for layer in self.layers)

    @property
    def bytes(self) -> float:
        return sum(layer.bytes for layer in self.layers)

    @property
    def sets(self) -> int:
        return 1

    def inputs(self, sets: int) -> list[Operands]:
        of_kinds = {layer.ratio: layer.inputs(1)[0] for layer in set(self.layers)}
        one = {name: next(iter(of_kinds.values()))[name] for name in ("x", "lengths")}
        return [{"params": {ratio: x["params"] for ratio, x in of_kinds.items()}, **one}]

    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        return {name: self.compiled(inputs, KERNEL_BY_KERNEL)}

    def compiled(self, inputs: Sequence[Operands], options: Mapping[str, str | bool]) -> Contestant:
        """All layers. A step updates the caches in place, and keeps them."""
        caches = [layer.filled() for layer in self.layers]

        def ours(caches: list[Any], params: Any, x: jax.Array, lengths: jax.Array) -> tuple[list[Any], jax.Array]:
            kept: list[Any] = []
            for row, cache in zip(self.layers, caches, strict=True):
                out = row.layer.step(params[row.ratio], x, cache, lengths=lengths)
                x, kept = x + out.y, [*kept, out.cache]
            return kept, x

        program = jax.jit(ours, donate_argnums=0).lower(caches, **inputs[0]).compile(compiler_options=dict(options))

        def run(operands: Operands) -> Any:
            nonlocal caches
            caches, result = program(caches, **operands)
            return result

        return Contestant(run, inputs, program.as_text() or "")

    def times(self, measured: dict[str, Times], contestants: Mapping[str, Contestant]) -> dict[str, Times]:
        """The times and those of every part; and by the host's clock in a CUDA graph, by defaults and STEP_OPTIONS."""
        ((name, ours),) = contestants.items()
        rounds = len(measured[name]["rounds"])
        clocked = {}
        for how, options in (("graph", {}), ("at once", STEP_OPTIONS)):
            again = self.compiled(ours.sets, options)
            clocked[how] = by_the_host_s_clock(lambda again=again: again.run(ours.sets[0]), rounds)  # type: ignore[misc]
        return with_parts(measured, contestants) | clocked


def _kind(ratio: int) -> str:
    return f"of ratio {ratio}" if ratio else "with a window alone"


def with_parts(measured: Mapping[str, Times], contestants: Mapping[str, Contestant]) -> dict[str, Times]:
    return {
        name: found | {"parts": parts(contestants[name].text, found["kernels"])} for name, found in measured.items()
    }


def parts(text: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """The time of each part, from instructions' times and the program's text."""
    bodies = dict(re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    lines = dict(re.findall(r"^ *(?:ROOT )?%?([\w.-]+) = (.*)$", text, re.M))
    found: dict[str, float] = defaultdict(float)
    for instruction, time in seconds.items():
        line = lines.get(instruction, "")
        called = re.search(r"calls=%?([\w.-]+)", line)
        found[_part(line, bodies.get(called[1], "") if called else "")] += time
    return dict(found)


def _part(line: str, body: str) -> str:
    path = re.search(r'op_name="([^"]*)"', line)
    names = re.findall(r"\w+", path[1]) if path else []
    sums_splits = names[-1:] == ["dot_general"] and " reduce(" in body
    of_product = re.search('custom_call_target="(__cublas|dsv4_fmha_(few_rows_product|unpack_matrix))', line)
    if of_product or " dot(" in body or sums_splits:
        return PRODUCTS
    if "append" in names:
        return "append"
    found = [name for name in names if name in PARTS]
    if found[:1] == ["attention"]:  # also what it composes of passes
        return found[-1]
    return found[0] if found else OTHER


def rest(parts: Mapping[str, float]) -> float:
    """The share of time that is neither products nor attention."""
    return 1 - (parts.get(PRODUCTS, 0) + parts.get("attention", 0)) / sum(parts.values())


def table(rows: Sequence[dict[str, Any]]) -> str:
    columns = (PRODUCTS, *PARTS, OTHER)
    lines = []
    for row in rows:
        line = [row["name"], *["-"] * (len(columns) + 4)]
        if ours := row["times"].get("ours"):
            seconds = (ours["seconds"], *(ours["parts"].get(part, 0) for part in columns))
            total, *its_parts = (f"{t * 1e6:.1f}" for t in seconds)
            launches = str(ours.get("launches", "-"))
            line[1:] = [total, f"{spread(ours['rounds']):.1%}", launches, *its_parts, f"{rest(ours['parts']):.1%}"]
        lines.append(line)
    head = ["row", "us", "spread", "launches", *columns, "rest"]
    notes = ["rest: neither matrix products nor attention"]
    us = {row["name"]: row["times"]["ours"]["seconds"] * 1e6 for row in rows if "ours" in row["times"]}
    for stack in (row for row in SUITE.rows if isinstance(row, StackRow)):
        names = [layer.name for layer in stack.layers]
        if {stack.name, *names} <= us.keys():
            (times,) = (row["times"] for row in rows if row["name"] == stack.name)
            said = f"{stack.name}: {us[stack.name]:.0f} us; alone they take {sum(us[name] for name in names):.0f}"
            if {"graph", "at once"} <= times.keys():
                graph, at_once = (f"{times[how]['seconds'] * 1e6:.0f}" for how in ("graph", "at once"))
                said += f"; by the host's clock, in a CUDA graph {graph}, with STEP_OPTIONS {at_once}"
            notes.append(said)
    return "\n".join([as_table(head, lines), *notes])


_SIZES: tuple[dict[str, Any], ...] = (
    {"b": 1, "s_q": 4096, "s_kv": 4096},
    {"b": 1, "s_q": 4096, "s_kv": 4096, "has_gradient": True},
    *(
        {"b": b, "s_q": 1, "s_kv": CONTEXT, "cache": cache}
        for b in (1, 8, 64, 128)
        for cache in ("bfloat16", "float8_e4m3fn")
    ),
    *(
        {"b": b, "s_q": 1, "s_kv": CONTEXT, "cache": cache, "packed": True}
        for b in (1, 8, 64, 128)
        for cache in ("bfloat16", "float8_e4m3fn")
    ),
)
_RATIOS: Any = FLASH["compress_ratios"]
_STACKS = tuple(
    StackRow(b=64, s_kv=CONTEXT, ratio=ratio, cache=cache)
    for ratio in (None, *_RATIOS)
    for cache in ("bfloat16", "float8_e4m3fn")
)
_LAYERS = tuple(LayerRow(ratio=ratio, **sizes) for sizes in _SIZES for ratio in _RATIOS)
SUITE = Suite("layer", "#2f6f7f", _LAYERS + _STACKS, table)
