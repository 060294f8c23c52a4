"""The raw call that sums an array over the devices of a process."""

import functools

import jax
import numpy as np

from . import library
from .call import call

LINE = 8
"""bytes that devices send at a time"""
MOST_DEVICES = 8
MOST_BYTES = 1 << 20
"""of an array; larger ones are left to XLA's collective, which does not send a number with each word"""


@functools.cache
def exchanging_devices() -> int:
    """The number of CUDA devices here if each of them reaches the memory of all others, else 1; 0 without a driver."""
    found = library.native()
    return found.dsv4_fmha_exchanging_devices() if found is not None else 0


def all_reduce(x: jax.Array, *, devices: int) -> jax.Array:
    """The sum of x `[n]` over devices 2 to 8 of this process, all that the program runs on; bfloat16, summed in float32
    in the order of the devices.
    """
    (y,) = call("all_reduce", (jax.ShapeDtypeStruct(x.shape, x.dtype),), x, devices=np.int64(devices))
    return y
