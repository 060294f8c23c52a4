"""Helpers of several tests: operands, the comparison with the table's tolerances, what a program has and runs."""

import dataclasses
import functools
import math
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._testing.attention import run_into, run_reference
from jax_dsv4_fmha._testing.compare import KERNEL, compare

QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
"""Flags of XLA: most programs here are small and run once, and compiling them takes far longer than what is saved."""


ONE_BUILT = library.BuiltVariant(
    "mha_fwd_sm_90a_d64",
    "mha_fwd",
    "forward",
    "sm_90a",
    {"d": 64, "dtype": "bfloat16", "max_heads": 16},
    splits=True,
    evidence="run",
    tile_m=192,
    tile_n=128,
    unit=1,
    ctas=1,
    cluster=1,
    threads=384,
    registers=168,
    smem_bytes=83016,
    spill_bytes=0,
    cubin_bytes=42488,
)
"""The facts that the library tells of a kernel"""


@functools.cache
def every_kernel() -> tuple[library.BuiltVariant, ...]:
    """The kernels of this version; those that the library does not hold with tiles of 256 rows, and ones for what else
    the compiler would have made of them.
    """
    names, held = [field.name for field in dataclasses.fields(library.BuiltVariant)], {v.key: v for v in library.held()}

    def made(v: library.Variant) -> library.BuiltVariant:
        return library.BuiltVariant(**{name: getattr(v, name, 256 if name == "tile_m" else 1) for name in names})

    return tuple(held.get(v.key) or made(v) for v in library.SHIPPED)


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def normal_in_numpy(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def assert_right(got: Any, want: Any, tolerances: Any = KERNEL) -> None:
    """Results equal `want`, within the tolerances of `compare`."""
    for verdict in compare(got, want, tolerances):
        assert verdict.passed, verdict


def assert_close(got: Any, want: Any, **tolerance: float) -> None:
    """Results equal `want` within the rounding of float32."""
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


def assert_maps(step: Any, q: jax.Array, caches: Any, mapped: str, assert_alike: Any = assert_right) -> None:
    """A step of generation under jax.vmap is one after the other; mapped: "all", or "q alone"."""
    f, qs, axes = jax.jit(step), jnp.stack([q, -q]), 0 if mapped == "all" else None
    if mapped == "all":
        caches = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), caches)
    got = jax.jit(jax.vmap(f, in_axes=(0, axes)))(qs, caches)
    for i in range(2):
        one = f(qs[i], caches if axes is None else jax.tree.map(lambda x, i=i: x[i], caches))
        assert_alike([x[i] for x in got], one)


def assert_gradient_on_the_reference_alone(step: Any, op: str, q: jax.Array, caches: Any) -> None:
    """Elsewhere there is none, and the error says so; step(q, caches, implementation)."""

    def loss(q: jax.Array, caches: Any, implementation: str | None) -> jax.Array:
        return step(q, caches, implementation)[0].sum()

    with pytest.raises(NotImplementedError, match=f"{op}: gradient: got a call to differentiate, wanted stop_gr"):
        jax.grad(loss)(q, caches, None)
    dq, dcaches = jax.grad(loss, (0, 1), allow_int=True)(q, caches, "reference")
    of_floats = [x for x in jax.tree.leaves(dcaches) if x.dtype != jax.dtypes.float0]
    assert jnp.isfinite(dq).all() and of_floats and all(jnp.abs(x).max() > 0 for x in of_floats)


def assert_right_twice(case):
    """A kernel is right, has the same bits in the second run, and writes every element."""
    got, again = run_into(case, (0.0, np.nan), implementation="cubin")
    assert_right(got, run_reference(case))
    for x, y in zip(got, again, strict=True):
        np.testing.assert_array_equal(*(np.asarray(z).view(f"u{z.dtype.itemsize}") for z in (x, y)))


def kernels_in_graphs(run: Any, *x: Any) -> dict[str, bool]:
    """The kernels of one call by the profiler: whether each was a node of a CUDA graph."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(*x))
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    lines = [line for plane in profile.planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    events = [event for line in lines if line.name.startswith("Stream") for event in line.events]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the type of event.stats warns, and aborts where warnings are errors
        return {event.name: "cuda_graph_id" in dict(event.stats) for event in events}


def assert_in_place(traced: Any) -> None:
    """Asserts that a traced program, lowered for GPUs, updates what it is given in place: every donated array becomes a
    result, and no result is returned twice, of which XLA would copy one.
    """
    lowered = traced.lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    donated = [x for x in jax.tree.leaves(lowered.args_info) if x.donated]
    (signature,) = re.findall(r"func\.func public @main\((.*)\) -> ", text)
    if "jax.buffer_donor" in signature:  # over several devices XLA finds the results
        (aliases,) = re.findall(r"input_output_alias=\{(.*?)\}, entry", traced.lower().compile().as_text())
        assert aliases.count("-alias") == len(donated), aliases
    else:
        assert donated and signature.count("tf.aliasing_output") == len(donated), signature
    (results,) = re.findall(r"^    return (.*) : ", text.split("func.func private")[0], re.MULTILINE)
    assert len(set(results.split(", "))) == len(results.split(", ")), results


def collectives(compiled: Any) -> dict[str, int]:
    """The kinds of collectives of a compiled program, and how many elements each moves."""
    kinds = "all-gather|(?:ragged-)?all-to-all|collective-permute|all-reduce|reduce-scatter|collective-broadcast"
    found: dict[str, int] = {}
    for types, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text()):
        elements = sum(math.prod(map(int, n.split(","))) if n else 1 for n in re.findall(r"\[([\d,]*)\]", types))
        both = types.startswith("((")  # (operands, results), which are printed where several start at once
        found[kind] = found.get(kind, 0) + elements // (1 + both)
    return found


def computed(f: Callable[..., Any], *args: Any) -> Any:
    """f(*args); of a second call, if that had a NaN, as in `trained`."""
    result = f(*args)
    if any(jnp.isnan(x).any() for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating)):
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # said in pytest's summary, and no error
            warnings.warn("computing again, after a NaN", RuntimeWarning, stacklevel=2)
        result = f(*args)
    return result


def trained(main: Callable[..., Any], keep: Any = None, **how: Any) -> Any:
    """The losses of `train.main`; of a second run from where the first began, if that had a NaN.

    XLA's programs for a CPU have other numbers at times, and rarely a NaN, where a process has two threads
    (github.com/jax-ml/jax/issues/39741). A NaN that is ours comes again.
    """
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        if keep is not None and Path(keep).exists():
            shutil.copytree(keep, before)
        how |= {} if keep is None else {"keep": keep}
        try:
            return main(**how)
        except FloatingPointError as e:
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # said in pytest's summary, and no error
                warnings.warn(f"training again, after a NaN: {e}", RuntimeWarning, stacklevel=2)
            if keep is not None:
                shutil.rmtree(keep)
                if before.exists():
                    shutil.copytree(before, keep)
            return main(**how)
