"""Clocks: the same programs on the same machine, in the order of a chip with these units, rates and latencies.

    timing = clocks.run(machine)     # in place of scheduler.run(machine), of machine/
    print(timing)                    # clocks, the share of every unit, what the tensor pipe waited for
    print(account(lambda **how: clocks.run(made(), **how)))       # what bounds the machine that `made()` makes

`--time` and `--account` of the interpreter's commands do so. docs/clocks.md shows what this is worth.

    architecture.py   every number about a chip, each with its source
    costs.py          what one instruction of PTX takes, and which registers it touches
    blocks.py         straight-line code in the order in which an assembler would put it
    units.py          the tensor pipe, shared memory, tensor memory, and the ways to L2 and to other CTAs
    runner.py         a warp: what it waited for, and why it went on
    scheduler.py      warps and units by time
    timing.py         what a run took, and the longest chain
    account.py        what a turn of the steady state asks of each unit, and so what bounds it
"""

from .account import Account, account
from .scheduler import run
from .timing import Timing

__all__ = ["Account", "Timing", "account", "run"]
