"""Lines, which devices send each other: 8 bytes, and after each 4 of them the number of the message that they are of.

A line is written by one store of two 64-bit words, and each word arrives whole, so whoever reads the number of a
message has its bytes (as NCCL's protocol LL does it). No fence is needed, and no flag besides.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from .ptx import ptx

LINE, BYTES = 16, 8  # bytes of a line, and those that it carries
TRIES = 1 << 27  # about a minute and a half


def send(address: Int64, words: tuple[Int32, Int32], message: Int32) -> None:
    """Writes a line into any device's memory."""
    ptx(
        "{ .reg .b64 x, y; mov.b64 x, {$1, $3}; mov.b64 y, {$2, $3}; st.relaxed.sys.global.v2.b64 [$0], {x, y}; }",
        Int64(address),
        *words,
        Int32(message),
    )


def read(address: Int64) -> tuple[Int32, ...]:
    """The line as it is now: two words, and the number of the message behind each."""
    return ptx(
        "{ .reg .b64 x, y; ld.relaxed.sys.global.v2.b64 {x, y}, [$4]; mov.b64 {$0, $2}, x; mov.b64 {$1, $3}, y; }",
        Int64(address),
        gives=(Int32,) * 4,
    )


@cute.jit
def received(address: Int64, message: Int32):
    """The words of a line of this device's memory, once they are of this message; an error on the device if no other
    one sends it."""
    first, second, message1, message2 = read(address)
    tries = Int32(0)
    while (message1 != message) | (message2 != message):
        first, second, message1, message2 = read(address)
        tries += 1
        if tries == TRIES:
            ptx("trap;")
    return first, second
