"""Times a step of training, and says where the devices' time goes: `python -m examples.deepseek_v4.mfu [CHECKPOINT]`.

A checkpoint is read for its config.json alone; without one the sizes are V4-Flash's. Parameters and tokens are random.
The step is `train`'s, with its mesh and its choices. Its time is from the end of one to that of the next, which begins
before, as in `train`: the median of several. MFU counts the model's own FLOPs (metrics.py). A second table has ms of
one device by part (parts.py), forward and backward together.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import common, layout, metrics
from .checkpoint import read_json
from .config import Entries, text_of
from .model import Model
from .parts import NO_GRAPHS, of_calls
from .serve import progress
from .speed import FLASH
from .train import POLICIES, Trainer

LAYERS, EXPERTS = 8, 16
"""of a model that one H200 trains"""


def main(
    checkpoint: str | None = None,
    config: dict[str, Any] = FLASH,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    b: int = 2,
    s: int = 4096,
    remat: str = "but-attention",
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    data: int | None = None,
    calls: int = 5,
    file: str | None = None,
) -> dict[str, Any]:
    """Prints and returns a step's time, rate and memory, and, on GPUs, its parts.

    Args:
      config: where there is no checkpoint.
      layers: the first so many of the model.
      experts: of a layer.
      data: devices that share out sequences; None: all that are left.
    """
    common.writable(file)
    given = read_json(Path(checkpoint) / "config.json") if checkpoint else config
    model = Model.from_config(first_layers(given, layers, experts))
    with common.mesh_of(tensor, expert, data, context) as mesh:
        trainer = Trainer(model, mesh, steps=1000, rate=1e-4, remat=remat)
        progress("making random parameters")
        state = jax.jit(lambda key: trainer.state(model.init(key, jnp.float32)), out_shardings=trainer.shardings())(
            jax.random.key(0)
        )
        tokens = jax.random.randint(jax.random.key(1), (b, s), 0, model.vocabulary, jnp.int32)
        batch = (jax.device_put(tokens, layout.sequences(mesh, b)),)
        began = time.perf_counter()
        options = NO_GRAPHS if jax.default_backend() == "gpu" else None
        step = trainer.step.lower(state, batch).compile(options)
        seconds, memory = time.perf_counter() - began, step.memory_analysis()
        progress(f"compiled in {seconds:.1f} s")

        def call() -> Any:
            nonlocal state
            state, numbers = step(state, batch)
            return numbers

        numbers, times = in_a_row(call, calls)
        ms = statistics.median(times) * 1e3
        rate = b * s / ms * 1e3
        kind = mesh.devices.flat[0].device_kind
        peak = next((x for name, x in metrics.PEAK.items() if name in kind), None)
        flop = metrics.flops(model, float(numbers.length)) * rate
        row = {
            "device": kind,
            "devices": mesh.size,
            "mesh": dict(mesh.shape),
            "jax": jax.__version__,
            "layers": layers,
            "experts": experts,
            "b": b,
            "s": s,
            "remat": remat,
            "ms": ms,
            "tokens/s": rate,
            "mfu": flop / peak / mesh.size if peak else None,
            "GiB of state": memory.argument_size_in_bytes / 2**30,
            "compiled in s": seconds,
            "GiB beside it": memory.temp_size_in_bytes / 2**30,
            "parameters": sum(x.size for x in jax.tree.leaves(state.learned)),
            "TFLOP": {part: 3e-12 * b * s * n for part, n in metrics.flops_of_parts(model, s).items()},
        }
        if jax.default_backend() == "gpu":
            row["parts"] = of_calls(call, step.as_text() or "", 2, mesh.size)
    for name, x in row.items():
        if name not in ("parts", "TFLOP"):
            print(f"{name:16}{x:.3f}" if isinstance(x, float) else f"{name:16}{x}")
    for part, ms in sorted(row.get("parts", {}).items(), key=lambda item: -item[1]):
        print(f"    {part:14}{ms:10.2f} ms{row['TFLOP'].get(part, 0):10.2f} TFLOP of the model")
    if file:
        Path(file).write_text(json.dumps(row, indent=1) + "\n")
    return row


def in_a_row(call: Callable[[], Any], count: int) -> tuple[Any, list[float]]:
    """Returns the last call's result, and seconds from the end of one to that of the next, of so many of them. Each
    begins before the host waits for the one before it.
    """
    last, ends = call(), []
    for _ in range(count + 1):
        waited_for, last = last, call()
        jax.block_until_ready(waited_for)
        ends.append(time.perf_counter())
    return jax.block_until_ready(last), [after - before for before, after in itertools.pairwise(ends)]


def first_layers(config: dict[str, Any], layers: int, experts: int) -> dict[str, Any]:
    """The config of a model's first layers, with so many experts in each, which no token's number chooses."""
    config = dict(text_of(config))
    if layers > (n := Entries(config).integer("num_hidden_layers", "n_layers")):
        raise ValueError(f"--layers: got {layers}, wanted at most the {n} of the model")
    lists = {name: config[name][:layers] for name in ("compress_ratios", "layer_types") if config.get(name)}
    others = dict.fromkeys(("n_layers", "num_local_experts", "n_hash_layers", "mlp_layer_types"))
    sizes = {"num_hidden_layers": layers, "n_routed_experts": experts, "num_hash_layers": 0}
    return config | others | lists | sizes


def arguments() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", nargs="?", help="a directory with config.json; by default V4-Flash's sizes")
    common.option_compiled(parser)
    for name, default, what in (
        ("layers", LAYERS, "the first ones of the model"),
        ("experts", EXPERTS, "of a layer"),
        ("b", 2, "sequences of a batch"),
        ("s", 4096, "tokens of a sequence"),
        ("calls", 5, "steps that are timed"),
        ("tensor", 1, "devices that share out every expert"),
        ("expert", 1, "devices that share out the experts"),
        ("context", 1, "devices that share out each sequence"),
    ):
        parser.add_argument(f"--{name}", type=common.at_least(1), default=default, help=f"{what} (default: {default})")
    parser.add_argument("--data", type=common.at_least(1), help="devices that share out sequences (default: the rest)")
    parser.add_argument(
        "--remat", choices=POLICIES, default="but-attention", help="what the backward pass computes anew"
    )
    parser.add_argument("--json", dest="file", help="a file for the numbers")
    return vars(parser.parse_args())


if __name__ == "__main__":
    common.run(main, **arguments())
