"""The choice of the implementation that runs an op: the kernel or the reference."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import _check
from .._host import library
from . import explain
from .manual_axes import vary, varying
from .op import Arrays, Call, KernelUse
from .support import Support, not_built


def choose(op: str, implementation: _check.Implementation | None, support: Support) -> KernelUse:
    """Chooses where a call uses the kernels that take its operands; raises if it insists and none is built."""
    if implementation == "cubin":
        if not support.is_there:
            raise not_built(op, "implementation", f"'cubin' for {support.got}", support.wanted, support.kernels)
        here = library.local_architectures()
        has_one = not here or not support.built or set(here) & set(support.built)
        return KernelUse.INSISTED_ON_CUDA if has_one else KernelUse.INSISTED_IN_EXPORTS
    if not support.built:
        return KernelUse.NEVER
    return KernelUse.ON_CUDA if _serves(support.built) else KernelUse.IN_EXPORTS


def choose_backward(forward: KernelUse, built: Sequence[str]) -> KernelUse:
    """`choose` for a gradient, whose kernels are `built` for these architectures: as its forward pass does, if there is
    a kernel.
    """
    return forward if _serves(built) else KernelUse.NEVER


def _serves(built: Sequence[str]) -> bool:
    """True if there is a kernel for every device that this process has."""
    return bool(built) and all(a in built for a in library.local_architectures())


def lowered(call: Call, *operands: jax.Array) -> Arrays:
    op, params = call.op, dict(call.params)
    explain.log_fallback(call)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    operands = (explain.chosen.bind(operands[0], call=call, shapes=shapes), *operands[1:])
    reference = functools.partial(op.reference, **params)
    is_missing = call.use.is_insisted and call.support is not None and not call.support.built  # for `explain`
    if op.kernel is None or call.use == KernelUse.NEVER or is_missing:
        return reference(*operands)
    axes = varying(operands)
    run = functools.partial(op.kernel, **params)

    def on_cuda(*operands: jax.Array) -> Arrays:  # a custom call says nothing about manual axes
        return vary(run(*operands), axes)

    def refuse(*operands: jax.Array) -> Arrays:
        results = tuple((x.shape, x.dtype) for x in jax.eval_shape(run, *operands))
        return vary(_not_cuda.bind(*operands, call=call, results=results), axes)

    def if_exported(*operands: jax.Array) -> Arrays:
        return tuple(_exported.bind(*operands, call=call, then=on_cuda, otherwise=otherwise))

    elsewhere = refuse if call.use.is_insisted else reference
    otherwise = None if call.use.is_insisted else reference
    on_cuda_here = if_exported if call.use.is_in_exports_alone else on_cuda
    results: Arrays = lax.platform_dependent(*operands, cuda=on_cuda_here, default=elsewhere)
    return results


# Only lowering knows the platform of a call: jax.export lowers for CUDA on a machine without it. So on other platforms
# a primitive stands for the kernel, and raises when it is lowered.
_not_cuda = Primitive("dsv4_fmha_not_cuda")
_not_cuda.multiple_results = True
_not_cuda.def_abstract_eval(
    lambda x, *_, results, **__: [x.update(shape=s, dtype=t, weak_type=False) for s, t in results]
)


def _lower_refusal(ctx: Any, *_: Any, call: Call, **__: Any) -> Any:
    platforms, (option, value) = " or ".join(ctx.module_context.platforms), call.insisted_by
    raise _check.error(ValueError, call.op.name, option, f"{value} on platform {platforms}", "platform cuda")


mlir.register_lowering(_not_cuda, _lower_refusal)


# Only lowering knows, too, whether a call is lowered for the devices that are here or exported for others.
_exported = Primitive("dsv4_fmha_exported")
_exported.multiple_results = True


@_exported.def_abstract_eval
def _(*operands: Any, then: Callable[..., Arrays], **_: Any) -> Any:
    return [operands[0].update(shape=x.shape, dtype=x.dtype, weak_type=False) for x in jax.eval_shape(then, *operands)]


def _lower_exported(
    ctx: Any, *operands: Any, call: Call, then: Callable[..., Arrays], otherwise: Callable[..., Arrays] | None
) -> Any:
    run = then if ctx.module_context.lowering_parameters.for_export else otherwise
    if run is None:
        assert call.support is not None
        option, value = call.insisted_by
        got, wanted = f"{value} on {', '.join(library.local_architectures())}", "a kernel that is built for it"
        raise not_built(call.op.name, option, got, wanted, call.support.kernels)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


mlir.register_lowering(_exported, _lower_exported)
