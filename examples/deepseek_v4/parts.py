"""Times the parts of a model in calls of a compiled program, as JAX's profiler tells them."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

SCOPES = ("indexer", "compressor", "attention", "connections", "moe", "norm", "append", "head", "optimizer")
"""named scopes of the model and its training; an operation is a part of the innermost one"""
SCOPE = re.compile(rf"\b({'|'.join(SCOPES)})\b")
KERNELS = {
    "experts": re.compile(r"group_rows|grouped_product|expert_(outer_)?product"),
    "collectives": re.compile(r"nccl|all[-_]reduce|all-gather|reduce-scatter|all-to-all|collective"),
}
"""parts whose kernels tell what they are, whatever their scope"""
PRODUCT = re.compile(r"few_rows_product|unpack_matrix|dot_general|gemm|nvjet|cutlass")
"""a product, or what unpacks its matrix, by its path or its kernel; one in no scope is of attention's projections"""
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": "10000"}
"""an option of XLA for a program that is profiled: the profiler does not see through CUDA graphs"""


def by_operation(text: str) -> dict[tuple[str, str], str]:
    """The part of each operation of compiled programs' text, by its program's name and its own: by its op_name."""
    found, program = {}, ""
    line = r'^(?:HloModule ([\w.-]+)|\s*(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)")'
    for begun, name, path in re.findall(line, text, re.M):
        program = begun or program
        if name:
            scopes = SCOPE.findall(path)
            found[program, name] = scopes[-1] if scopes else "products" if PRODUCT.search(path) else "rest"
    return found


def of_calls(call: Callable[[], Any], text: str, calls: int, devices: int) -> dict[str, float]:
    """ms of one device in a call, by part, the mean over calls and devices; "idle": none of its kernels runs.

    Args:
      call: starts the program once; it is called twice as often as is measured.
      text: the compiled program, or several, one after another.
    """
    part_of = by_operation(text)
    tracing = jax.profiler.ProfileOptions()
    tracing.host_tracer_level = tracing.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        for trace in (False, True):
            if trace:
                jax.profiler.start_trace(folder, profiler_options=tracing)
            for _ in range(calls):
                result = call()
            jax.block_until_ready(result)
        jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    found: dict[str, float] = defaultdict(float)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        events = sorted(
            (event.start_ns, event.duration_ns, event.name, *(str(stats.get(x, "")) for x in ("hlo_module", "hlo_op")))
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
            for stats in [dict(event.stats)]
        )
        end = events[0][0] if events else 0
        for start, ns, name, program, operation in events:
            part = part_of.get((program, operation), "rest")
            part = "products" if part == "rest" and PRODUCT.search(name) else part
            part = next((p for p, kernel in KERNELS.items() if kernel.search(f"{name} {operation}")), part)
            found["idle"] += max(0, start - end)
            found[part] += max(0, start + ns - max(start, end))
            end = max(end, start + ns)
    return {part: ns / 1e6 / calls / devices for part, ns in found.items()}
