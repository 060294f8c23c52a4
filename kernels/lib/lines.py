"""Lines, which devices send each other: 8 bytes, and after each 4 of them the number of the message that they are of.

A line is written by one store of two 64-bit words, and each word arrives whole, so whoever reads the number of a
message has its bytes (as NCCL's protocol LL does it). No fence is needed, and no flag besides.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from .ptx import read_line, stop_with_error

LINE, BYTES = 16, 8  # bytes of a line, and those that it carries
TRIES = 1 << 27  # a minute or two, if a look takes about a microsecond


@cute.jit
def received(address: Int64, message: Int32):
    """The words of a line of this device's memory, once they are of this message; an error on the device if no other
    one sends it."""
    first, second, message1, message2 = read_line(address)
    tries = Int32(0)
    while (message1 != message) | (message2 != message):
        first, second, message1, message2 = read_line(address)
        tries += 1
        if tries == TRIES:
            stop_with_error()
    return first, second
