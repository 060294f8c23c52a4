"""Accounts of a turn of a kernel's steady state: clocks asked of each unit, and so the tensor pipe's greatest share.

    SMEM      clocks of its 128 bytes, by cause: operands of products, copies, warps' loads and stores, peers
    shuffles  clocks of warps' shuffles, should they not share shared memory's bytes
    TMEM      columns that the busiest quarter loads and stores
    L2, to L2 bytes at the rate that an SM has while all of them load or store; to peers likewise
    mufu ...  clocks of that unit in the busiest quarter; issue: its instructions
    chain     clocks of a turn where every warpgroup has an SM of its own and nothing waits for a unit

No turn can be shorter than what the busiest of these takes. The counts are read off a run of the program by clocks,
between two products that are whole turns apart. It is an account, no measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from .timing import Timing, most, period_of
from .units import Product

K = TypeVar("K")

WAYS = {"L2": "l2", "to L2": "out", "to peers": "peer", "TMEM": "tmem"}


@dataclass(frozen=True)
class Account:
    """The clocks that one turn asks of each unit, with shared memory's by cause."""

    products: Mapping[str, int]
    full_rate: float  # clocks of its products, were they all at the tensor pipe's full rate
    units: Mapping[str, float]  # clocks
    smem: Mapping[str, float]  # clocks by cause
    l2: float  # bytes
    slots: Mapping[int, float]  # of each warp's instructions
    clocks: float  # of the run

    @property
    def bound(self) -> str:
        """The unit that takes longest, or the chain."""
        return max(self.units, key=self.units.__getitem__)

    def share(self, unit: str | None = None) -> float:
        """Returns the share of the tensor pipe's full rate that the bound allows; or one unit, were there no other."""
        return self.full_rate / self.units[unit or self.bound]

    def __str__(self) -> str:
        products = ", ".join(f"{n} x {name}" for name, n in self.products.items())
        lines = [f"a turn ({products}) asks for clocks of"]
        notes = {
            "SMEM": ", ".join(f"{n:.0f} {cause}" for cause, n in most(self.smem, 8)),
            "L2": f"{self.l2:.0f} bytes",
            "issue": ", ".join(f"{n} of {who}" for who, n in grouped(self.slots)),
        }
        for unit, clocks in most(self.units, len(self.units)):
            if clocks >= 1:
                lines.append(f"  {unit:10} {clocks:6.0f}  {notes.get(unit, '')}".rstrip())
        bound = f"at most {self.share():.0%} of the tensor pipe's full rate, for {self.bound}"
        lines.append(f"{bound}; {self.full_rate / self.clocks:.0%} by the clocks, {self.clocks:.0f} a turn")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        return {
            "products": dict(self.products),
            "full_rate": round(self.full_rate),
            "units": {name: round(n) for name, n in self.units.items()},
            "smem": {name: round(n) for name, n in self.smem.items() if n >= 0.5},
            "l2_bytes": round(self.l2),
            "turn": round(self.clocks),
            "bound": self.bound,
            "at_most": round(self.share(), 3),
            "by_the_clocks": round(self.full_rate / self.clocks, 3),
        }


def grouped(slots: Mapping[int, float]) -> list[tuple[str, int]]:
    """Warps one after the other with about as many instructions, together."""
    found = list[tuple[list[int], float]]()
    for warp, n in sorted(slots.items()):
        if found and abs(n - found[-1][1]) <= 0.1 * max(n, found[-1][1]):
            found[-1][0].append(warp)
        elif n >= 1:
            found.append(([warp], n))
    return [(f"warp{'s' * (len(w) > 1)} {w[0]}{f'-{w[-1]}' * (len(w) > 1)}", round(n)) for w, n in found]


def account(run: Callable[..., Timing]) -> Account:
    """Returns the account of the launch that `run()` and `run(alone=True)` run by clocks.

    Raises LookupError if its products do not repeat.
    """
    found, alone = of_run(run()), turns(run(alone=True))
    return replace(found, units={**found.units, "chain": (alone.last.start - alone.first.start) / alone.count})


@dataclass(frozen=True)
class Turns:
    """The steady state in whole turns of the loop of one that issues products."""

    first: Product
    last: Product  # the first one after them
    count: int
    products: Sequence[Product]  # all of the SM from the one to the other


def turns(timing: Timing) -> Turns:
    """Returns the turns of the warpgroup with the first product of the middle half, or of an earlier quarter, if those
    do not repeat. Raises LookupError if these do not, either.
    """
    done = timing.sm.pipe.done
    n = len(done)
    for part in (done[n // 4 : 3 * n // 4], done[n // 8 : 3 * n // 8]):
        mine = [x for x in part if x.op.warp.index // 4 == part[0].op.warp.index // 4]
        turn = period_of([x.op.instruction.line for x in mine])
        if turn:
            count = (len(mine) - 1) // turn
            last = mine[count * turn]
            return Turns(mine[0], last, count, part[: part.index(last)])
    raise LookupError("no products that repeat, so no turn to give an account of")


def of_run(timing: Timing) -> Account:
    """Returns the account of one run, without the chain."""
    found, c = turns(timing), timing.rates
    then, before = found.last.asked, found.first.asked
    assert before is not None and then is not None

    def each(now: Mapping[K, float], was: Mapping[K, float]) -> dict[K, float]:
        return {name: (now[name] - was.get(name, 0.0)) / found.count for name in now}

    smem, quarters = each(then.smem, before.smem), [each(*x) for x in zip(then.quarters, before.quarters, strict=True)]
    shuffles = smem.pop("shuffles", 0.0)
    ways = {name: n / c[name] for name, n in each(then.bytes, before.bytes).items()}
    names = Counter(x.demand.label for x in found.products)
    tensor, flop = (sum(getattr(x.demand, what) for x in found.products) for what in ("tensor", "flop"))
    return Account(
        {name: round(n / found.count) for name, n in names.items()},
        flop / found.count / c["tensor"],
        {"tensor": tensor / found.count, "SMEM": sum(smem.values()), "shuffles": shuffles}
        | {name: ways[key] for name, key in WAYS.items()}
        | {unit: max(quarter[unit] for quarter in quarters) for unit in quarters[0]},
        smem,
        ways["l2"] * c["l2"],
        each(then.slots, before.slots),
        (found.last.start - found.first.start) / found.count,
    )
