"""A way to learn which implementation runs, and why: `explain` says it, and a log line reports a fallback that nobody
asked for; an exported fallback is a warning.

Every op leaves a mark where its kernel and its reference part: `chosen`, an identity that lowers to nothing and holds
the `Call` and the shapes of its operands. `explain` traces a function and reads the marks from its jaxpr, so that it
sees what will be compiled.
"""

import functools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import _check
from .._host import library
from .op import Call, KernelUse
from .support import Support, built, explaining

_LOG = logging.getLogger("jax_dsv4_fmha")

chosen = Primitive("dsv4_fmha_chosen")
chosen.def_impl(lambda x, **_: x)
chosen.def_abstract_eval(lambda x, **_: x)


def _lower_chosen(ctx: Any, x: Any, *, call: Call, **_: Any) -> Any:
    module = ctx.module_context
    exports = module.lowering_parameters.for_export and "cuda" in module.platforms
    if exports and call.support is not None and not library.variants():
        what = f"{call.op.name}, {call.op.part}, is exported for cuda without a kernel: no kernels are built in"
        warnings.warn(f"{what} (`python -m jax_dsv4_fmha info`)", RuntimeWarning, stacklevel=2)
    return [x]


mlir.register_lowering(chosen, _lower_chosen)


class Decision(NamedTuple):
    """The implementation that runs one op of a program, as `explain` finds it, and the reason."""

    op: str
    """the function that was called, for example "fmha", by its name"""
    part: str
    """"forward" or "gradient", the pass"""
    implementation: str
    """"kernel" or "reference", the implementation"""
    variant: str
    """the kernel's key in `info --json`; "" for the reference, and where several kernels attend"""
    reason: str
    times: int
    """how often the program has it; a loop's body counts once"""

    def __str__(self) -> str:
        times = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.op}, {self.part}{times}: {self.implementation}: {self.reason}"


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Decision]:
    """Says, for every op in `f(*args, **kwargs)`, whether a kernel or the reference runs it here, and why.

        print(*explain(layer, q, kv), sep="\\n")
        print(*explain(jax.grad(loss), parameters, batch), sep="\\n")   # gradients too

    It traces f and neither compiles nor runs it, so arguments may be `jax.ShapeDtypeStruct`. "Here" is JAX's default
    backend and this process's devices. A mesh counts as traced: where it shards heads, devices may run the kernel for
    fewer heads. Calls with implementation="reference" leave no mark and are not listed. Where a call insists on a
    kernel of this version that is not built in, and so is an error, the reason says so.

    Args:
      f: any function that JAX can trace, jitted or not. A function that is not jitted must close over arguments that
        are not arrays, such as a string.
      *args, **kwargs: the arguments of f.

    Returns:
      A `Decision` for each op, part and reason, in the order of the program.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax_dsv4_fmha import explain, fmha
      >>> q = jax.ShapeDtypeStruct((1, 8, 4, 512), jnp.bfloat16)
      >>> [decision.op for decision in explain(lambda q: fmha(q, q[:, :, :1]), q)]
      ['fmha']
    """
    if not callable(f):
        raise _check.error(TypeError, "explain", "f", f, "a function that JAX can trace")
    with explaining(True):
        traced = (f if hasattr(f, "trace") else jax.jit(f)).trace(*args, **kwargs)
    counts = Counter(_decided(call, shapes) for call, shapes in _marks(traced.jaxpr))
    return [decision._replace(times=n) for decision, n in counts.items()]


def log_fallback(call: Call) -> None:
    """Logs once, for each reason, that a process with CUDA devices runs the reference without having asked for it."""
    if (
        call.support is not None
        and call.use in (KernelUse.NEVER, KernelUse.IN_EXPORTS)
        and library.local_architectures()
    ):
        _warn(f"{call.op.name}, {call.op.part}: runs on the reference, in jnp: {_why_reference(call)}")


@functools.cache
def _warn(text: str) -> None:
    _LOG.warning(text)


def _decided(call: Call, shapes: Sequence[Any]) -> Decision:
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    is_kernel = call.use == KernelUse.INSISTED_ON_CUDA or (call.use == KernelUse.ON_CUDA and platform == "cuda")
    option, value = call.insisted_by
    if not is_kernel:
        reason = _why_reference(call)
    elif call.support is not None and not call.support.built:
        reason = f"{option}={value} insists on it, so the call is an error: {_missing(call.support)}"
    elif call.use == KernelUse.INSISTED_ON_CUDA and platform != "cuda":
        reason = (
            f"{option}={value} insists on it; compiling it for {platform} is an error, exporting it for cuda is not"
        )
    else:
        assert call.support is not None
        reason = f"{_listed(_launched(call, shapes))}, built for {_listed(call.support.built)}: {call.support.got}"
    variant = _variant(call, shapes) if is_kernel else ""
    return Decision(call.op.name, call.op.part, "kernel" if is_kernel else "reference", variant, reason, 1)


def _launched(call: Call, shapes: Sequence[Any]) -> Sequence[str]:
    """The kernels of a call, in the order in which they run."""
    assert call.support is not None
    launches = call.op.launches
    if launches is None:
        return call.support.kernels
    found: list[str] = []
    jax.eval_shape(lambda *operands: found.extend(launches(*operands, **dict(call.params))), *shapes)
    return found


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _variant(call: Call, shapes: Sequence[Any]) -> str:
    """The key of the one variant that takes q `[b, s_q, h_q, d]` here; the library looks it up in the same way."""
    arch = next(iter(library.local_architectures()), None)
    q, support = shapes[0], call.support
    wanted, names = {"d": q.shape[-1], "dtype": q.dtype.name}, _launched(call, shapes) if support else ()
    fits = [v for v in library.variants() if v.op in names and v.arch == arch]
    fits = [v for v in fits if v.choices.get("packing", "") == (support.packing if support else "")]
    fits = [v for v in fits if wanted.items() <= v.choices.items() and v.choices.get("max_heads", 0) >= q.shape[-2]]
    least = min((v.choices["max_heads"] for v in fits), default=0)
    keys = [v.key for v in fits if v.choices["max_heads"] == least]
    return keys[0] if len(keys) == 1 else ""


def _why_reference(call: Call) -> str:
    support, is_gradient = call.support, call.op.part == "gradient"
    if support is None:
        return "this has no kernel" if not is_gradient else "this gradient has no kernel"
    if not support.shipped:
        what = "no kernel of a gradient takes" if is_gradient else "no kernel takes"
        return f"{what} {support.got}" + ("" if is_gradient else f"; built {built(support.kernels)}")
    here, kernels, archs = library.local_architectures(), " and ".join(support.kernels), " and ".join(support.built)
    if not archs:
        return _missing(support)
    if here and not set(here) & set(support.built):
        return f"{kernels}: built for {archs}, and this process has {' and '.join(here)}"
    if here and not set(here) <= set(support.built):
        return f"{kernels}: built for {archs}, and not for all of {' and '.join(here)}"
    if call.use == KernelUse.NEVER:
        return f"the forward pass has no kernel here, so neither has the gradient ({support.got})"
    return f"JAX compiles for {jax.default_backend()} here; on {archs} it would be {kernels}: {support.got}"


def _missing(support: Support) -> str:
    """The reason that names the kernels that are not built in."""
    archs = " and ".join(support.shipped)
    missing = f"for {archs} " if library.variants() else ""
    would_be = f"on {archs} it would be {' and '.join(support.kernels)}: {support.got}"
    return f"no kernels {missing}are built in (`python -m jax_dsv4_fmha info`); {would_be}"


def _marks(jaxpr: Any) -> Iterator[tuple[Call, Sequence[Any]]]:
    """The calls in a jaxpr and its inner jaxprs, in order, each with the shapes of its operands."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive is chosen:
            yield equation.params["call"], equation.params["shapes"]
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _marks(value)
