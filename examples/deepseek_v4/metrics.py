"""Draws what training measured: `python -m examples.deepseek_v4.metrics metrics.jsonl… --plot PICTURE`.

`Log` says it while the program runs: a line now and then, and for each step a line of JSON, as `Step` has them.
"""

import argparse
import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha.layers import DSV4Attention, Output, Shared, rope

from . import common
from .data import Row
from .model import Model

PEAK = {"H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""dense bfloat16 FLOP/s of a device whose kind has this in its name"""
PART_OF = {"attention": "products", "moe": "moe"}
"""the part of a layer's matrices, by the name of its parameters; all others are of connections"""
SAMPLED = 32
"""queries of a sequence by which an indexer is judged"""
PANELS = (
    ("loss", "loss of tokens"),
    ("of_indexers", "loss of indexers"),
    ("grad_norm", "norm of the gradient"),
    ("load", "busiest expert's tokens / mean"),
    ("recall", "attention that indexers found"),
    ("tokens_per_second", "tokens/s"),
)


class Step(NamedTuple):
    """The numbers that a step computes."""

    loss: Any
    """of tokens"""
    of_indexers: Any
    """the sum of their losses"""
    grad_norm: Any
    """before it is clipped"""
    load: Any
    """`[layers]`: tokens of the busiest expert over the mean of all experts"""
    recall: Any
    """`[layers with an indexer]`: see `recall`"""
    length: Any
    """of sequences whose tokens see as many before them on average as these, documents told apart"""


def recall(layer: DSV4Attention, out: Output, shared: Shared, place: jax.Array, past: Any) -> jax.Array:
    """The share of attention to past entries that goes to the chosen ones: 1 where an indexer finds all that counts.

    It is judged by some queries of each sequence, of those with more past entries than are chosen; without such
    queries the share is 1.

    Args:
      out, shared: the result of the layer's attention, and what it was given.
      place: int32 `[b, s]`, the position of each query in its document.
      past: the first and the end of its past entries, int32 `[b, s]` each.
    """
    now, indexed = jax.lax.stop_gradient((shared.after(out), out.indexed))
    every = max(place.shape[1] // SAMPLED, 1)
    q, lse, place, start, stop, indices = (
        x[:, every - 1 :: every] for x in (indexed.attention_q, indexed.lse, place, *past, now.indices)
    )
    q = q.astype(jnp.float32)
    if layer.norm_heads:
        q = q * jax.lax.rsqrt(jnp.mean(jnp.square(q), -1, keepdims=True) + layer.eps)
    q, kv = rope(q, place, layer.rope), now.compressed.astype(jnp.float32)
    logits = jnp.einsum("bshd,bnd->bshn", q, kv) * layer.d**-0.5
    n = jnp.arange(kv.shape[1])
    seen = (n >= start[..., None]) & (n < stop[..., None])
    mass = jnp.where(seen, jnp.exp(logits - lse[..., None]).sum(2), 0)
    b, s = start.shape
    rows = jnp.arange(b)[:, None, None], jnp.arange(s)[:, None]
    chosen = jnp.zeros(seen.shape, bool).at[*rows, jnp.where(indices < 0, len(n), indices)].set(True, mode="drop")
    share = jnp.where(chosen, mass, 0).sum(-1) / jnp.maximum(mass.sum(-1), 1e-30)
    counts = stop - start > indices.shape[-1]
    return jnp.where(counts.any(), jnp.where(counts, share, 0).sum() / jnp.maximum(counts.sum(), 1), 1.0)


def flops(model: Model, s: float) -> float:
    """Counts a token's flop in a step: three times the forward pass's, without what the backward pass computes anew."""
    return 3 * sum(flops_of_parts(model, s).values())


def flops_of_parts(model: Model, s: float) -> dict[str, float]:
    """A token's flop in the forward pass, by the parts of parts.py, in a sequence of s tokens."""
    found = defaultdict(float, head=2 * model.hidden * model.vocabulary)
    for layer, sizes in zip(model.layers, matrices(model), strict=True):
        past = s / 2 / layer.ratio if layer.ratio else 0  # entries before a token, on average
        seen = min(layer.window, s / 2) + (min(past, layer.indexer.topk) if layer.indexer else past)
        for part, n in sizes.items():
            found[part] += 2 * n * (model.chosen / model.experts if part == "experts" else 1)
        found["attention"] += 4 * layer.heads * layer.d * seen
        found["indexer"] += 2 * layer.indexer.heads * layer.indexer.d * past if layer.indexer else 0
    return dict(found)


@functools.cache
def matrices(model: Model) -> list[dict[str, int]]:
    """Counts the numbers of each layer's matrices by part: "experts" are the routed ones, and "moe" the rest of it."""
    found = []
    for p in jax.eval_shape(lambda: model.init(jax.random.key(0)))["layers"]:
        sizes = defaultdict(int)
        for path, x in jax.tree_util.tree_leaves_with_path(p):
            of, name = path[0].key, path[-1].key
            part = "experts" if name in ("w13", "w2") else PART_OF.get(of, "connections")
            sizes[part] += x.size if x.ndim > 1 and name != "ape" else 0
        found.append(dict(sizes))
    return found


class Log:
    """Says what steps computed, in lines and in a file, and stops the program at a loss that is no number.

    A step is looked at when the next one has begun, so that devices do not wait for it. Every process looks at every
    step; the first one writes.

    Args:
      directory: of the file metrics.jsonl, and of the batch of such a loss. None keeps neither.
      first: the step from which on this program runs; the file keeps the lines of those before it.
    """

    def __init__(
        self, model: Model, devices: int, tokens: int, every: int, directory: Any, first: int, last: int
    ) -> None:
        self.model, self.tokens, self.every, self.last = model, tokens, every, last
        peak = next((x for name, x in PEAK.items() if name in jax.devices()[0].device_kind), None)
        self.peak = peak and peak * devices
        self.directory = Path(directory) if directory else None
        self.is_first = jax.process_index() == 0
        self.found = list[Step]()
        self.times = list[float]()
        self.waiting: tuple[int, Any, Step] | None = None
        self.file = self.directory / "metrics.jsonl" if self.directory and self.is_first else None
        if self.file:
            self.directory.mkdir(parents=True, exist_ok=True)
            kept = [line for line in read(self.file) if line["step"] < first] if self.file.exists() else []
            self.file.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def add(self, step: int, rows: dict[int, Row], numbers: Step) -> None:
        """Takes the numbers of a step, which may not be computed yet, and this process's rows of its batch."""
        self.look()
        self.waiting = step, rows, numbers

    def look(self) -> None:
        """Waits for the step that was added last, and says its numbers.

        Raises:
          FloatingPointError: its loss or its gradient's norm is no number.
        """
        if self.waiting is None:
            return
        (step, rows, numbers), self.waiting = self.waiting, None
        numbers = Step(*(np.asarray(x) for x in jax.device_get(numbers)))
        self.times.append(time.perf_counter())
        self.found.append(numbers)
        seconds = self.times[-1] - self.times[-2] if len(self.times) > 1 else None  # the first one was compiled, too
        line = {"step": step, **{name: in_json(x) for name, x in numbers._asdict().items()}, **self.speed(seconds)}
        if self.file:
            with self.file.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)
        if not all(map(np.isfinite, (numbers.loss, numbers.of_indexers, numbers.grad_norm))):
            raise FloatingPointError(f"step {step}: got {self.said(numbers)}, wanted numbers{self.kept(step, rows)}")
        if step % self.every == 0 or step == self.last:
            since = min(self.every, len(self.times) - 1)
            mean = (self.times[-1] - self.times[-1 - since]) / since if since else None
            speed = self.speed(mean)
            text = f"step {step:4}  {self.said(numbers)}"
            if mean:
                text += f"; {speed['tokens_per_second']:.0f} tokens/s"
                text += f", MFU {speed['mfu']:.1%}" if self.peak else ""
            self.say(text)
        if seconds and self.is_first:
            common.on_terminal(
                f"step {step} of {self.last + 1}, {(self.last - step) * seconds / 60:.1f} minutes to go "
            )

    def speed(self, seconds: float | None) -> dict[str, float | None]:
        """tokens/s and MFU of a step of so many seconds."""
        rate = self.tokens / seconds if seconds else None
        has_mfu = rate is not None and self.peak
        mfu = rate * flops(self.model, float(self.found[-1].length)) / self.peak if has_mfu else None
        return {"tokens_per_second": rate and round(rate, 1), "mfu": mfu and round(mfu, 4)}

    @staticmethod
    def said(numbers: Step) -> str:
        """A step's numbers in short: the most loaded layer's, and the worst indexer's."""
        text = f"loss {numbers.loss:.3f}, of indexers {numbers.of_indexers:.4f}, gradient {numbers.grad_norm:.3f}"
        text += f", load {numbers.load.max():.2f}"
        return text + (f", recall {numbers.recall.min():.3f}" if numbers.recall.size else "")

    def kept(self, step: int, rows: dict[int, Row]) -> str:
        """Keeps a step's batch, this process's part of it; and says where."""
        if not self.directory:
            return ""
        path = self.directory / f"batch-of-step-{step}-process-{jax.process_index()}.npz"
        columns = zip(*rows.values(), strict=True)
        parts = {name: np.stack(x) for name, x in zip(Row._fields, columns, strict=True) if x[0] is not None}
        np.savez(path, rows=list(rows), **parts)
        return f"; the batch is in {path}"


def in_json(x: np.ndarray) -> Any:
    """The numbers as JSON has them: float32 in as few digits as tell it, and None for NaN, which JSON does not know."""
    if x.ndim:
        return [in_json(y) for y in x]
    return float(str(x)) if np.isfinite(x) else None


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. One that was cut when a program died is left out.

    Raises:
      ValueError: the file has something else.
    """
    lines = path.read_text().splitlines()
    try:
        found = [json.loads(line) for line in lines[:-1]]
        found += [json.loads(line) for line in lines[-1:] if line.endswith("}")]
        assert all("step" in line for line in found)
    except (ValueError, TypeError, AssertionError):
        raise ValueError(f"{path}: got other lines, wanted those of a metrics.jsonl") from None
    return found


def main(files: Sequence[str], plot: str) -> None:
    """Draws the numbers of each file by step; of several layers the greatest and the least."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install '.[plot]'") from None
    figure = Figure(figsize=(9, 7), layout="constrained")
    runs = {file: read(Path(file)) for file in files}
    for axes, (key, title) in zip(figure.subplots(3, 2, sharex=True).flat, PANELS, strict=True):
        for n, (file, lines) in enumerate(runs.items()):
            there = [(line["step"], line[key]) for line in lines if line.get(key) not in (None, [])]
            if not there:
                continue
            steps, values = zip(*there, strict=True)
            values = [x if isinstance(x, list) else [x] for x in values]
            values = [[math.nan if y is None else y for y in x] for x in values]
            low, high = ([f(x) for x in values] for f in (min, max))
            axes.plot(steps, high, color=f"C{n}", linewidth=1, label=file)
            if low != high:
                axes.fill_between(steps, low, high, color=f"C{n}", alpha=0.2, linewidth=0)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step")
    if len(files) > 1:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "metrics"}):
        figure.savefig(plot, dpi=150, metadata={"Date": None} if plot.endswith(".svg") else {})


def arguments() -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", help="what programs wrote into their --keep directories")
    parser.add_argument("--plot", required=True, help="a .png, .svg or .pdf")
    return vars(parser.parse_args())


if __name__ == "__main__":
    common.run(main, **arguments())
