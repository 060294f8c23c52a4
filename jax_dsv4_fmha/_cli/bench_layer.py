"""The layer suite of `bench`: whole layers of DeepSeek-V4-Flash, and the time of each of their parts.

The compiled program tells which part a kernel belongs to. A matrix product is what XLA gives to cuBLAS or Triton, with
the sum of its splits. Every other kernel has the name that `jax_dsv4_fmha.layers` gives with `jax.named_scope`; a
fusion has the name of its last operation.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._testing.cases import Case
from ..layers import DSV4Attention, LayerCache, from_config
from .report import table as as_table

OP = "DSV4Attention"
GRADIENT = "gradient"
CONTEXT = 16384  # tokens of each sequence in a step
FLASH = {
    "hidden_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000, "compress_rope_theta": 160000,
    "compress_ratios": [0, 4, 128],
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}  # fmt: skip
PRODUCTS, OTHER = "products", "other"
PARTS = ("attention", "indexer", "compressor", "append", "rope", "norm")


def cases() -> list[Case]:
    """A prompt, its gradient, and a step of generation, for each kind of layer."""
    return [
        Case(OP, b, s_q, s_kv, 64, 1, 512, shared_kv=True, ratio=ratio, features=features)
        for b, s_q, s_kv, features in ((1, 4096, 4096, ()), (1, 4096, 4096, (GRADIENT,)), (64, 1, CONTEXT, ()))
        for ratio in FLASH["compress_ratios"]  # type: ignore[attr-defined]
    ]


def name(c: Case) -> str:
    what = "gradient and layer" if GRADIENT in c.features else "layer"
    kind = f"of ratio {c.ratio}" if c.ratio else "with a window alone"
    return f"{what} {kind}, " + (f"prompt of {c.s_q}" if c.s_q == c.s_kv else f"step after {c.s_kv}, b{c.b}")


def layer_of(c: Case) -> DSV4Attention:
    return next(layer for layer in from_config(FLASH) if layer.ratio == c.ratio)


def work(c: Case) -> tuple[float, float]:
    """`bench.work`: products with all matrices and with the visible keys; bytes of matrices, x, y and cached keys."""
    layer = layer_of(c)
    matrices = [x.size for x in jax.tree.leaves(jax.eval_shape(layer.init, jax.random.key(0))) if x.ndim > 1]
    first = c.s_kv - c.s_q
    positions = range(first, first + c.s_q)
    past = sum((p + 1) // c.ratio for p in positions) if c.ratio else 0
    if layer.indexer is not None:
        past = sum(min((p + 1) // c.ratio, layer.indexer.topk) for p in positions)
    seen = c.b * (past + sum(min(p + 1, layer.window) for p in positions))
    flops = 2.0 * c.b * c.s_q * sum(matrices) + 4.0 * layer.d * layer.heads * seen
    moved = 2.0 * (sum(matrices) + 2 * c.b * c.s_q * layer.hidden + (layer.d * seen if first else 0))
    passes = 3 if GRADIENT in c.features else 1
    return passes * flops, passes * moved


def contestant(c: Case, options: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """A function that runs a layer, its operands, and the program's text. A step updates its cache in place, and keeps
    it.
    """
    layer = layer_of(c)

    def params(key: jax.Array) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, layer.init(key))

    operands = {
        "params": jax.jit(params)(jax.random.key(0)),
        "x": jax.random.normal(jax.random.key(1), (c.b, c.s_q, layer.hidden), jnp.bfloat16),
        # not x itself, with whose products XLA would merge those of dy, and copy both matrices side by side
        "dy": jax.random.normal(jax.random.key(3), (c.b, c.s_q, layer.hidden), jnp.bfloat16),
    }
    cache: LayerCache | None = None
    if c.s_q != c.s_kv:
        shapes = jax.eval_shape(lambda: layer.cache(c.b, c.s_kv))
        keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(shapes))))
        cache = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), shapes)

    def ours(cache: LayerCache | None, params: Any, x: jax.Array, dy: jax.Array) -> Any:
        if cache is not None:
            out = layer.step(params, x, cache, lengths=c.s_kv)
            return out.cache, out.y
        y, vjp = jax.vjp(lambda params, x: layer(params, x).y, params, x)
        return None, (vjp(dy) if GRADIENT in c.features else y)

    program = jax.jit(ours, donate_argnums=0).lower(cache, **operands).compile(compiler_options=dict(options))

    def run(operands: Any) -> Any:
        nonlocal cache
        cache, result = program(cache, **operands)
        return result

    return run, operands, program.as_text() or ""


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
    words = re.findall(r"\w+", path[1]) if path else []
    sums_splits = words[-1:] == ["dot_general"] and " reduce(" in body
    if 'custom_call_target="__cublas' in line or " dot(" in body or sums_splits:
        return PRODUCTS
    if "append" in words:
        return "append"
    return next((word for word in words if word in PARTS), OTHER)


def rest(parts: Mapping[str, float]) -> float:
    """The share of time that is neither products nor attention."""
    return 1 - (parts.get(PRODUCTS, 0) + parts.get("attention", 0)) / sum(parts.values())


def table(rows: Iterable[dict[str, Any]], spread: Callable[[Sequence[float]], float]) -> str:
    columns = (PRODUCTS, *PARTS, OTHER)
    lines = []
    for row in rows:
        line = [row["name"], *["-"] * (len(columns) + 3)]
        if ours := row["times"].get("ours"):
            times = (ours["seconds"], *(ours["parts"].get(part, 0) for part in columns))
            total, *each = (f"{t * 1e6:.1f}" for t in times)
            line[1:] = [total, f"{spread(ours['rounds']):.1%}", *each, f"{rest(ours['parts']):.1%}"]
        lines.append(line)
    return as_table(["row", "us", "spread", *columns, "rest"], lines) + "\nrest: neither matrix products nor attention"
