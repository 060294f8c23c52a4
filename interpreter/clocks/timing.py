"""Figures of a run by clocks: its length, shares of units, the tensor pipe's waits, and the longest chain."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..machine.state import Machine
from .runner import Cause, Runner
from .units import Product, Sm


@dataclass
class Steady:
    """The middle half of an SM's products; or an earlier quarter of them, where those repeat and these do not."""

    clocks: float
    tensor: float  # clocks
    flop: float
    period: float  # clocks of a turn of the loop; 0 if there is none
    products: Sequence[str]  # of a turn
    waits: Mapping[str, float]  # what the pipe waited for: clocks
    shares: Mapping[str, float]  # of the other units
    l2: float  # bytes a clock


class Timing:
    def __init__(self, m: Machine, sms: Sequence[Sm], rates: Mapping[str, float]):
        self.machine, self.sms, self.rates = m, sms, rates
        self.clocks = 0.0
        self.issuer: dict[int, tuple[Runner, Cause | None]] = {}
        self.runners: Sequence[Runner] = ()

    def end(self, now: float, runners: Sequence[Runner]) -> None:
        self.clocks, self.runners = now, runners

    @property
    def sm(self) -> Sm:
        """The one with the most products."""
        return max(self.sms, key=lambda sm: len(sm.pipe.done))

    @property
    def tensor(self) -> float:
        """Clocks of its products."""
        return sum(x.demand.tensor for x in self.sm.pipe.done)

    def steady(self) -> Steady | None:
        products = self.sm.pipe.done
        if len(products) < 8:
            return None
        part, turn = self.middle()
        a, b = part[0].start, part[-1].start
        period = (b - a) * turn / (len(part) - 1) if turn else 0.0
        names = [x.demand.label for x in part[:turn]]
        waits: dict[str, float] = defaultdict(float)
        for x in part[1:]:
            if x.before is not None and x.start > x.before.end:
                for why, clocks in self.idle(x.before.end, x):
                    waits[why] += clocks
        tensor, flop = (sum(getattr(x.demand, name) for x in part[:-1]) for name in ("tensor", "flop"))
        then, now = part[0].busy, part[-1].busy
        shares = {name: (now[name] - then[name]) / (b - a) for name in now}
        l2 = shares.pop("l2")
        return Steady(b - a, tensor, flop, period, names, waits, shares, l2)

    def middle(self) -> tuple[list[Product], int]:
        """Products of the steady state, and after how many they repeat (0: they do not)."""
        products = self.sm.pipe.done
        n = len(products)
        halves = [products[n // 4 : 3 * n // 4], products[n // 8 : 3 * n // 8]]
        found = [period_of([(x.op.instruction.line, x.op.warp.index // 4) for x in part]) for part in halves]
        part, turn = next((x for x in zip(halves, found, strict=True) if x[1]), (halves[0], 0))
        return part[: (len(part) - 1) // turn * turn + 1] if turn else part, turn  # whole turns

    def chain(self) -> dict[str, float]:
        """Back from the last product of the steady state: whose clocks decided when it began."""
        part = self.middle()[0]
        (r, cause), t, found = self.issuer[part[-1].op.number], part[-1].start, defaultdict[str, float](float)
        first = part[0].start
        while t > first and cause is not None:
            found[f"warp {r.warp.number}"] += t - max(cause.at, first)
            t, r = cause.at, cause.who
            if cause.op is not None and t > first:
                found[cause.op.kind] += t - max(cause.issued, first)
                t = cause.issued
            cause = cause.before
        return found

    def idle(self, since: float, x: Product) -> list[tuple[str, float]]:
        """Returns what a product that began after a pause of the pipe had waited for, with the clocks of each wait."""
        r, _ = self.issuer[x.op.number]
        found, left = list[tuple[str, float]](), x.start - since
        for wait in reversed(r.waits):
            if wait.end <= since:
                break
            overlap = min(wait.end, x.issued) - max(wait.start, since)
            if overlap > 0:
                found.append((f"warp {r.warp.number} at {wait}", overlap))
                left -= overlap
        if left > 0:
            late = min(left, max(0.0, x.start - x.issued))
            found.append(("the start of a product", late))
            if left > late:
                found.append((f"instructions of warp {r.warp.number}", left - late))
        return found

    def __str__(self) -> str:
        sm, total = self.sm, self.clocks
        lines = [f"{total:.0f} clocks"]
        busy = sm.busy(total)
        shares = {"tensor": self.tensor} | {name: busy[name] for name in busy if name != "l2"}
        lines.append("launch: " + ", ".join(f"{name} {clocks / total:.0%}" for name, clocks in shares.items()))
        if sm.smem.busy:
            causes = ", ".join(f"{clocks / total:.0%} {cause}" for cause, clocks in most(sm.smem.busy, 6))
            lines.append(f"  SMEM by cause: {causes}; {sm.l2.bytes / total:.1f} bytes a clock from L2")
        if (steady := self.steady()) is not None:
            others = ", ".join(f"{name} {share:.0%}" for name, share in steady.shares.items())
            rate = steady.flop / steady.clocks / self.rates["tensor"]
            busy_share = f"tensor pipe {steady.tensor / steady.clocks:.0%} busy ({rate:.0%} of its full rate)"
            lines.append(f"steady state: {busy_share}, {others}")
            if steady.period:
                names = ", ".join(f"{n} x {name}" for name, n in Counter(steady.products).items())
                lines.append(f"  a turn: {steady.period:.0f} clocks ({names})")
            for why, clocks in most(steady.waits, 6):
                lines.append(f"  waits {clocks / steady.clocks:.1%} for {why}")
            chain = ", ".join(f"{clocks / steady.clocks:.0%} {what}" for what, clocks in most(self.chain(), 6))
            lines.append(f"  its longest chain: {chain}")
        return "\n".join(lines)


def period_of(labels: Sequence[object]) -> int:
    """The least number of products after which they repeat; 0 if they do not."""
    for turn in range(1, len(labels) // 2 + 1):
        if all(a == b for a, b in zip(labels, labels[turn:], strict=False)):
            return turn
    return 0


def most(counted: Mapping[str, float], n: int) -> list[tuple[str, float]]:
    return sorted(counted.items(), key=lambda x: -x[1])[:n]
