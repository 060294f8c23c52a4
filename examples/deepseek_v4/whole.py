"""Times a whole DeepSeek-V4 over the GPUs that are here: `python -m examples.deepseek_v4.whole [CHECKPOINT]`.

Parameters are random numbers in a checkpoint's form, with routed experts in MXFP4 and attention's projections in FP8,
made where they lie. A checkpoint is read for its config.json alone. A row is a step as `serve` has it, where --rounds
steps are a call, or a chunk of a prompt by `Reader` (reader.py). Its time is the host's, of many calls that each wait
for the one before. With --parts a second table says where the devices' time goes, by the profiler: each part's share of
a call of one step, in ms of one device, and the time in which no kernel runs. Its programs have no CUDA graphs, through
which the profiler does not see.
"""

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha.layers import STEP_OPTIONS

from . import common, speed, stand_in
from .caches import Caches
from .model import Model
from .parts import NO_GRAPHS, of_calls
from .reader import Reader
from .serve import ROUNDS, progress
from .speed import CHUNK, CONTEXTS, FLASH, Work

SEQUENCES = (1, 8, 64, 256)


def main(
    checkpoint: str | None = None,
    config: dict[str, Any] = FLASH,
    contexts: Sequence[int] = CONTEXTS,
    sequences: Sequence[int] = SEQUENCES,
    chunk: int = CHUNK,
    calls: int = 20,
    kept: str | None = None,
    parts: bool = False,
    expert: int = 1,
    rounds: int = ROUNDS,
    xla: Sequence[str] = (),
    file: str | None = None,
) -> list[dict[str, Any]]:
    """Prints each time once it is there, then the tables, and returns their rows.

    Args:
      config: where there is no checkpoint.
      kept: the dtype of packed caches, by its name; None keeps what the model computes with.
      rounds: steps of a call; the time of one is shown.
      xla: options of XLA for every program, as NAME=VALUE.
    """
    common.writable(file)
    model = Model.from_config(Path(checkpoint) / "config.json" if checkpoint else config)
    if parts and jax.default_backend() != "gpu":
        raise ValueError(f"--parts: got {jax.default_backend()}, wanted GPUs, whose kernels the profiler sees")
    options = dict(option_of(text) for text in xla)
    works = [Work(context, b, 1) for context in contexts for b in sequences if b == 1 or context == contexts[0]]
    works += [Work(context, 1, chunk) for context in contexts if context >= chunk]
    rows: list[dict[str, Any]] = []
    with common.mesh_of(1, expert, data=1) as mesh:
        if not stand_in.fits(model, mesh):
            got = f"a model of {model.hidden} channels, and {model.inner} in an expert"
            raise NotImplementedError(f"got {got}, wanted V4's, with experts that fused_moe takes")
        progress("making random parameters")
        params = model.joined(stand_in.parameters(model, mesh, common.compute_dtype()))
        progress(f"{common.gib(params) / mesh.size:.2f} GiB of parameters on each of {mesh.size} devices")
        for work in works:
            what = model, params, mesh, work, jnp.dtype(kept or common.compute_dtype())
            row = {"work": str(work), **of_work(*what, calls, rounds, **options)}
            said = f"{row['ms']:.3f} ms, compiled in {row['compiled in s']:.1f} s, {row['XLA s']:.1f} of them XLA's"
            if parts:
                row["parts"] = parts_of(*what, **options)
                said += "; " + ", ".join(f"{part} {ms:.3f}" for part, ms in row["parts"].items())
            progress(f"{work}: {said}")
            rows.append(row)
            if file:
                about = {"device": mesh.devices.flat[0].device_kind, "devices": mesh.size, "jax": jax.__version__}
                Path(file).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    heads = ("ms", "tokens/s", "compiled in s")
    print(" " * 32, *(f"{head:>14}" for head in heads))
    for row in rows:
        print(f"{row['work']:32}", *(f"{row[head]:14.3f}" for head in heads))
    if parts:
        names = sorted({name for row in rows for name in row["parts"]})
        print("\n" + " " * 32, *(f"{name:>12}" for name in names))
        for row in rows:
            print(f"{row['work']:32}", *(f"{row['parts'].get(name, 0):12.3f}" for name in names))
    return rows


def option_of(text: str) -> tuple[str, str]:
    """An option of XLA and its value, of NAME=VALUE.

    Raises:
      ValueError: it is not of that form.
    """
    name, equals, value = text.partition("=")
    if not name.startswith("xla_") or not equals:
        raise ValueError(f"--xla: got {text}, wanted NAME=VALUE, such as xla_gpu_graph_min_graph_size=5")
    return name, value


def program(
    model: Model, params: Any, mesh: Mesh, work: Work, dtype: jnp.dtype, rounds: int = 1, **options: str
) -> tuple[Any, Caches, tuple[Any, ...], tuple[float, float]]:
    """A compiled call of `Model.several` or `Model.read`, full caches, what it takes besides parameters and these, and
    the seconds of tracing and lowering, and of XLA after it. A call of steps ends with the last token of the context.
    """
    everywhere = NamedSharding(mesh, P())
    make = lambda: speed.random(model.cache(work.b, work.context, dtype))  # noqa: E731
    caches = jax.jit(make, out_shardings=everywhere)()
    tokens = jax.random.randint(jax.random.key(0), (work.b, work.tokens), 0, model.vocabulary, jnp.int32)
    lengths = jnp.full(work.b, work.context, jnp.int32)
    is_step = work.tokens == 1
    given = (tokens[:, 0], lengths - (rounds - 1)) if is_step else (tokens, lengths - work.tokens, lengths)
    first, *others = jax.device_put(given, everywhere)
    operands = params, first, caches, *others
    began = time.perf_counter()
    compiled: Any
    if is_step:
        options = {**(STEP_OPTIONS if jax.default_backend() == "gpu" else {}), **options}
        f = functools.partial(model.several, count=rounds)
        how: dict[str, Any] = {"out_shardings": (None, everywhere), "compiler_options": options or None}
        lowered = jax.jit(f, donate_argnums=2, **how).lower(*operands)
        lowering = time.perf_counter() - began
        compiled = lowered.compile()
    else:
        compiled = Reader(model, *operands, **options)
        lowering = compiled.seconds
    return compiled, caches, (first, *others), (lowering, time.perf_counter() - began - lowering)


def of_work(
    model: Model, params: Any, mesh: Mesh, work: Work, dtype: jnp.dtype, calls: int, rounds: int, **options: str
) -> dict[str, Any]:
    """The time of a step or a chunk, the median of three times so many, and what compiling took."""
    rounds = rounds if work.tokens == 1 else 1
    f, caches, operands, seconds = program(model, params, mesh, work, dtype, rounds, **options)

    def call(caches: Caches) -> tuple[Caches, jax.Array]:
        made, caches = f(params, operands[0], caches, *operands[1:])
        return caches, made

    ms = speed.median(call, max(1, calls // (rounds if work.tokens == 1 else 5)), caches) / rounds
    rate, compiled = work.b * work.tokens / ms * 1e3, {"compiled in s": sum(seconds), "XLA s": seconds[1]}
    return {"ms": ms, "rounds": rounds, "tokens/s": rate, **compiled}


def parts_of(
    model: Model, params: Any, mesh: Mesh, work: Work, dtype: jnp.dtype, calls: int = 5, **options: str
) -> dict[str, float]:
    """ms of one device by part of the model (parts.py)."""
    f, caches, operands, _ = program(model, params, mesh, work, dtype, **options, **NO_GRAPHS)

    def call() -> jax.Array:
        nonlocal caches
        made, caches = f(params, operands[0], caches, *operands[1:])
        return made

    return of_calls(call, f.as_text() or "", calls, mesh.size)


def arguments() -> dict[str, Any]:
    made = speed.parser(__doc__.split("\n\n")[0], SEQUENCES, "of a step at the first context; at others there is one")
    made.add_argument("--fp8", dest="kept", action="store_const", const="float8_e4m3fn", help="caches in FP8")
    made.add_argument("--parts", action="store_true", help="also where the devices' time goes; compiles twice")
    number = common.at_least(1)
    made.add_argument("--expert", type=number, default=1, help="devices that share out experts and heads (default: 1)")
    rounds = f"steps of a call (default: {ROUNDS})"
    made.add_argument("--rounds", type=number, default=ROUNDS, help=rounds)
    made.add_argument("--xla", nargs="+", default=(), metavar="NAME=VALUE", help="options of XLA for every program")
    return speed.parsed(made)


if __name__ == "__main__":
    common.run(main, **arguments())
