"""Times one layer of each kind of a whole DeepSeek-V4 on one GPU: `python -m examples.deepseek_v4.speed [CHECKPOINT]`.

A layer is attention, experts and hyper-connections, with random parameters and full caches, in bfloat16; with --packed
routed experts are in MXFP4, and attention's projections in FP8, as checkpoints have them. A checkpoint is read for its
config.json alone; without one the sizes are V4-Flash's, whose experts of a layer take 13 GB, or 3.4 in MXFP4. Times are
the host's: of many calls, each of which waits on the device for the one before, over their number. A row's last columns
are the sum over all layers and the head, and the tokens/s of that sum: a GPU that held the whole model would have them.
"""

import argparse
import collections
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsv4_fmha.layers import STEP_OPTIONS, Shared

from . import common, stand_in
from .model import Model
from .streams import Streams

FLASH = {
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000, "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4], "n_routed_experts": 256, "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048, "num_hash_layers": 3,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}  # fmt: skip
CONTEXTS = (8192, 131072, 1 << 20)
SEQUENCES = (1, 8, 64)
CHUNK = 4096


class Work(NamedTuple):
    """A step of `b` sequences, which then have `context` tokens each, or the last chunk of a prompt of so many."""

    context: int
    b: int
    tokens: int

    def __str__(self) -> str:
        what = f"step, b {self.b}" if self.tokens == 1 else f"chunk of {self.tokens}"
        return f"{what}, {self.context} tokens"


def main(
    checkpoint: str | None = None,
    config: dict[str, Any] = FLASH,
    contexts: Sequence[int] = CONTEXTS,
    sequences: Sequence[int] = SEQUENCES,
    chunk: int = CHUNK,
    calls: int = 20,
    file: str | None = None,
    packed: bool = False,
) -> list[dict[str, Any]]:
    """Prints each time once it is there, then the table, and returns its rows. config: where there is no checkpoint."""
    common.writable(file)
    model = Model.from_config(Path(checkpoint) / "config.json" if checkpoint else config)
    if model.delayed:
        raise NotImplementedError("V4.1: its layers attend to what earlier ones have made, so none has a time alone")
    works = [Work(context, b, 1) for context in contexts for b in sequences]
    works += [Work(context, 1, chunk) for context in contexts]
    kinds = [f"ratio {layer.ratio}" if layer.ratio else "window" for layer in model.layers]
    count, one = collections.Counter(kinds), dict(zip(kinds, model.layers, strict=True))
    rows: list[dict[str, Any]] = [{"work": str(work), "tokens": work.b * work.tokens, "ms": {}} for work in works]
    for kind, layer in one.items():
        few = dataclasses.replace(model, layers=(layer,), hashed=0)
        params = parameters(few, packed)
        for row, work in zip(rows, works, strict=True):
            row["ms"][kind] = of_layer(few, params, work, calls)
            print(f"{kind}: {work}, {row['ms'][kind]:.3f} ms", file=sys.stderr, flush=True)
            keep(file, count, rows)
    few = dataclasses.replace(few, experts=1, chosen=1)
    for row, work in zip(rows, works, strict=True):
        row["ms"]["head"] = of_head(few, params, work, calls)
    for row in rows:
        row["all"] = row["ms"]["head"] + sum(n * row["ms"][kind] for kind, n in count.items())
        row["tokens/s"] = row["tokens"] / row["all"] * 1e3
    print(" " * 30, *(f"{head:>12}" for head in (*rows[0]["ms"], f"{len(model.layers)} layers", "tokens/s")))
    for row in rows:
        print(
            f"{row['work']:30}", *(f"{x:12.3f}" for x in (*row["ms"].values(), row["all"])), f"{row['tokens/s']:12.0f}"
        )
    keep(file, count, rows)
    return rows


def keep(file: str | None, count: dict[str, int], rows: list[dict[str, Any]]) -> None:
    """Writes what is measured so far."""
    if file:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "count": count}
        Path(file).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def parameters(model: Model, packed: bool) -> Any:
    if not packed:
        return jax.jit(lambda key: model.joined(model.init(key, common.compute_dtype())))(jax.random.key(0))
    params = jax.jit(stand_in.without_experts(model, common.compute_dtype()))(jax.random.key(0))
    params["layers"][0]["moe"] |= stand_in.experts(model, jax.random.key(2))
    return model.joined(params)


def random(tree: Any) -> Any:
    """The same tree with random numbers."""
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(tree))))
    is_number = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype) if is_number(x) else x, tree)


def of_layer(model: Model, params: Any, work: Work, calls: int) -> float:
    """ms of attention, experts and connections of the only layer."""
    tokens, lengths = jnp.zeros((work.b, work.tokens), jnp.int32), jnp.full(work.b, work.context)

    def call(cache: Any, params: Any, x: jax.Array, tokens: jax.Array, lengths: jax.Array) -> Any:
        def attend(layer: Any, p: Any, x: jax.Array, cache: Any, shared: Shared) -> Any:
            if work.tokens == 1:
                return layer.step(p, x, cache, shared, lengths=lengths)
            return layer(p, x, cache, shared, start=lengths - work.tokens, lengths=lengths)

        streams = Streams.of(x, jnp.ones(x.shape[:3]))
        of_layer = model.of_layer(0, params, {})
        streams, out, _ = model.block(
            model.layers[0], params["layers"][0], of_layer, streams, tokens, cache, Shared(), attend
        )
        return out.cache, streams.after()

    (cache,) = random(model.cache(work.b, work.context, common.compute_dtype()).layers)
    x = random(jnp.zeros((*tokens.shape, model.streams, model.hidden), common.compute_dtype()))
    return timed(call, calls, cache, params, x, tokens, lengths)


def of_head(model: Model, params: Any, work: Work, calls: int) -> float:
    """ms from the streams of each sequence's last token to its logits."""

    def call(_: None, params: Any, x: jax.Array) -> Any:
        return None, model.logits(params, Streams.of(x, jnp.ones(x.shape[:3])))

    x = random(jnp.zeros((work.b, 1, model.streams, model.hidden), common.compute_dtype()))
    return timed(call, calls, None, params, x)


def timed(call: Callable[..., Any], calls: int, cache: Any, *operands: Any) -> float:
    """ms of a call, compiled as a step is, which gets the cache of the call before it."""
    f = jax.jit(call, donate_argnums=0, compiler_options=STEP_OPTIONS)
    return median(lambda cache: f(cache, *operands), calls, cache)


def median(f: Callable[[Any], tuple[Any, Any]], calls: int, cache: Any) -> float:
    """ms of f, from a cache to the next one and a result: the median of three times so many calls."""
    found: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(calls if found else 2):  # the first calls compile and warm up
            cache, y = f(cache)
        jax.block_until_ready(y)
        found.append((time.perf_counter() - began) / calls * 1e3)
    return statistics.median(found[1:])


def parser(description: str, sequences: Sequence[int], of_step: str = "of a step") -> argparse.ArgumentParser:
    """The options of programs that time V4-Flash's sizes."""
    made, number = argparse.ArgumentParser(description=description), common.at_least(1)

    def several(name: str, given: Sequence[int], what: str) -> None:
        shown = ", ".join(map(str, given))
        made.add_argument(name, type=number, nargs="+", default=given, help=f"{what} (default: {shown})")

    made.add_argument("checkpoint", nargs="?", help="a directory with config.json; by default V4-Flash's sizes")
    several("--contexts", CONTEXTS, "tokens")
    several("--sequences", sequences, of_step)
    made.add_argument("--chunk", type=number, default=CHUNK, help=f"tokens of a prompt (default: {CHUNK})")
    made.add_argument("--calls", type=number, default=20, help="that a time is the mean of (default: 20)")
    made.add_argument("--json", dest="file", help="a file for the same numbers")
    common.option_compiled(made)
    return made


def parsed(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The arguments of such a program."""
    found = vars(parser.parse_args())
    if found["checkpoint"] is None and jax.default_backend() == "cpu":
        parser.error("V4-Flash's sizes want a GPU, and there is none here; give a directory with a smaller config.json")
    return found


def arguments() -> dict[str, Any]:
    made = parser(__doc__.split("\n\n")[0], SEQUENCES)
    made.add_argument("--packed", action="store_true", help="routed experts in MXFP4, and projections in FP8")
    return parsed(made)


if __name__ == "__main__":
    common.run(main, **arguments())
