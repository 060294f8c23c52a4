"""o as codes of e4m3 where no kernel of attention makes them: a pass over o."""

import jax

from .. import _check, reference
from .._definitions.e4m3 import E4M3, SCALED, scaled_codes
from .autodiff import without_gradient
from .op import IN_CODES, RESULTS, Call, KernelUse, Op
from .support import Support
from .tables import TO_E4M3

O_DTYPE = "o_dtype=None, which has one"


def in_codes(op: str, results: reference.Attention) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """(codes, scales) of o, and lse."""
    o, lse = results
    got = f"{o.dtype.name}, d={o.shape[-1]}, o in {E4M3} of attention that does not make it so"
    support = Support(got, tuple(kernel.op for kernel in TO_E4M3.values()), ())
    to_codes = Op(op, RESULTS[:1], IN_CODES[:2], scaled_codes, differentiated=O_DTYPE)
    codes, scales = without_gradient(Call(to_codes, KernelUse.NEVER, (("blocks", o.shape[-1] // SCALED),), support), o)
    return (codes, scales), lse


def check_o_dtype(op: str, o_dtype: str | None, d: int) -> None:
    _check.one_of(op, "o_dtype", o_dtype, (None, E4M3))
    if o_dtype is not None and d % SCALED:
        raise _check.error(ValueError, op, "o_dtype", o_dtype, f"None with d={d}: d is to be a multiple of {SCALED}")
