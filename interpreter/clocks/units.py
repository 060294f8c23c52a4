"""The units of an SM beside its warps' quarters: the tensor pipe, shared and tensor memory, and ways out."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ..machine.parser import Instruction
from ..machine.state import AsyncOp, Warp

Rates = Mapping[str, float]

UNITS = ("", "fma", "alu", "mufu")  # of a quarter; "": none of these
DEPTH_BYTES = 32  # of a row of A or B in one product


@dataclass
class Way:
    """Something that moves bytes at a rate, in the order of the requests."""

    rate: float
    queues: bool = True  # a request waits for those before it
    free: float = 0.0
    bytes: float = 0.0

    def move(self, t: float, size: float) -> tuple[float, float]:
        """Returns when a request of now begins to move and has moved."""
        start = max(t, self.free) if self.queues else t
        self.free = start + size / self.rate
        self.bytes += size
        return start, self.free


@dataclass
class Quarter:
    """A fourth of an SM: it issues for every fourth warp."""

    issue: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(UNITS, 0.0))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class SharedMemory:
    """Shared memory, whose port is everybody's. Warps come first; operands of products wait for what others take."""

    def __init__(self, rate: float, queues: bool):
        self.rate, self.queues = rate, queues
        self.port = Way(1, queues)  # of warps' instructions, in wavefronts of 128 bytes
        self.taken = 0.0  # clocks, by all except products
        self.flows: deque[tuple[float, float, float]] = deque()  # of copies: start, end, clocks
        self.busy: dict[str, float] = defaultdict(float)  # clocks, by cause

    def access(self, t: float, wavefronts: float, cause: str) -> float:
        self.taken += wavefronts
        self.busy[cause] += wavefronts
        return self.port.move(t, wavefronts)[1]

    def shuffle(self, t: float, clocks: float) -> float:
        """It takes the warps' port, and an account has it apart: that products wait for it is not known."""
        self.busy["shuffles"] += clocks
        return self.port.move(t, clocks)[1]

    def flow(self, start: float, end: float, size: float, cause: str) -> None:
        clocks = size / self.rate
        self.flows.append((start, end, clocks))
        self.busy[cause] += clocks

    def taken_until(self, t: float) -> float:
        """Clocks that all except products have taken, and that products wait for."""
        if not self.queues:
            return 0.0
        while self.flows and self.flows[0][1] <= t:
            self.taken += self.flows.popleft()[2]
        partly = sum(clocks * (t - a) / (b - a) for a, b, clocks in self.flows if a < t < b)
        return self.taken + partly + sum(clocks for a, b, clocks in self.flows if b <= t)


@dataclass(frozen=True)
class Demand:
    """The clocks that a product takes of the tensor pipe and of shared memory's port, and its flop."""

    label: str
    tensor: float  # clocks
    smem: float  # clocks of the port, in every CTA
    flop: float = 0.0  # of a CTA


@lru_cache(maxsize=4096)
def shape_of(text: str) -> tuple[int, int, int]:
    found = re.search(r"(\d+)[xn](\d+)[xk](\d+)", text)
    assert found is not None, text
    m, n, k = map(int, found.groups())
    return m, n, k


def demand_of(op: AsyncOp, c: Rates) -> Demand:
    """A product of m x n x (32 bytes)."""
    opcode = op.instruction.opcode
    if op.kind == "tcgen05.cp":
        lanes, bits = (int(x) for x in (re.search(r"(\d+)x(\d+)b", opcode) or [0, 0, 0]).groups())  # type: ignore[union-attr]
        return Demand(op.what, lanes * bits / 8 / c["smem"], lanes * bits / 8 / c["smem"])
    m, n, _ = shape_of(op.what)
    flop = 2 * m * n * 16  # of 16 bits; of others there are as many clocks
    if op.kind == "wgmma":
        from_registers = isinstance(op.instruction.args[1], tuple)
        return Demand(
            f"{m}x{n}" + ", A in registers" * from_registers,
            flop / c["tensor"],
            (n + (0 if from_registers else m)) * DEPTH_BYTES / c["smem"],
            flop,
        )
    pair, ws = "cta_group::2" in opcode, ".ws" in opcode
    rows, in_tmem = m // (1 + pair), "A in TMEM" in op.what
    clocks = flop / (1 + pair) / c["tensor"]
    if ws and rows < 128:
        clocks = 12 + n / 4
    elif rows == 64 and not pair:
        clocks /= c["half rows"]
    kept = re.search(r"collector::(a|b)\d?::(?:last)?use", opcode)  # and not read again
    of_a = 0 if in_tmem or (kept and kept[1] == "a") else rows
    of_b = 0 if kept and kept[1] == "b" else n // (1 + pair)
    operand = (of_a + of_b) * DEPTH_BYTES / c["smem"]
    return Demand(op.what.removeprefix("product ").split(" into")[0], clocks, operand, flop / (1 + pair))


@dataclass
class Product:
    op: AsyncOp
    demand: Demand
    issued: float
    start: float = 0.0
    end: float = 0.0
    before: Product | None = None  # that was in the pipe until it began
    busy: dict[str, float] = field(default_factory=dict)  # clocks of the SM's other units until then
    asked: Asked | None = None  # of the SM's units until then


@dataclass(frozen=True)
class Asked:
    """All clocks, bytes and slots that programs have asked of an SM until a time."""

    smem: Mapping[str, float]  # clocks by cause
    bytes: Mapping[str, float]  # of the ways out; of TMEM, of the busiest quarter
    quarters: Sequence[Mapping[str, float]]  # clocks of their units
    slots: Mapping[int, float]  # warp -> of its instructions


class Sm:
    """`queues`: what it is asked for waits for what others asked before."""

    def __init__(self, c: Rates, queues: bool = True):
        self.quarters = [Quarter() for _ in range(4)]
        self.smem = SharedMemory(c["smem"], queues)
        self.l2, self.out, self.peer = (Way(c[name], queues) for name in ("l2", "out", "peer"))
        self.tmem = [Way(c["tmem"], queues) for _ in range(4)]
        self.pipe = TensorPipe()
        self.slots: dict[int, float] = defaultdict(float)

    def asked(self) -> Asked:
        ways = {"l2": self.l2.bytes, "out": self.out.bytes, "peer": self.peer.bytes}
        return Asked(
            dict(self.smem.busy),
            ways | {"tmem": max(x.bytes for x in self.tmem)},
            [{unit: x.busy[unit] for unit in ("issue", *UNITS[1:])} for x in self.quarters],
            dict(self.slots),
        )

    def busy(self, now: float) -> dict[str, float]:
        """Clocks of its units until now, of quarters' the most; and bytes out of L2."""
        found = {"SMEM": self.smem.taken_until(now) + self.smem.busy["products"]}
        for unit in ("issue", *UNITS[1:]):
            found[unit] = max(quarter.busy[unit] for quarter in self.quarters)
        return found | {"l2": self.l2.bytes}


class TensorPipe:
    """Products of a thread, or of a warpgroup, in order; of several, that comes first which was issued first."""

    def __init__(self) -> None:
        self.queues: dict[object, deque[Product]] = {}
        self.current: Product | None = None
        self.taken: list[float] = []  # of the port in each of its SMs, when it began
        self.done: list[Product] = []

    def put(self, who: object, x: Product) -> None:
        self.queues.setdefault(who, deque()).append(x)

    def next(self, now: float) -> Product | float | None:
        """The product that begins now; or when one may; or nothing."""
        heads = [queue for queue in self.queues.values() if queue]
        if not heads:
            return None
        first = min(heads, key=lambda queue: queue[0].start)
        return first.popleft() if first[0].start <= now else first[0].start


# ---- warps' accesses to shared memory


def bytes_of(i: Instruction) -> int:
    """Returns the bytes that one lane loads, stores or copies by an instruction."""
    kind = i.opcode.rsplit(".", 1)[-1]
    size = 2 if kind in ("bf16", "f16") else int(re.sub(r"\D", "", kind) or 32) // 8
    count = next((int(x[1:]) for x in i.opcode.split(".") if x in ("v2", "v4", "v8")), 1)
    return size * count


@lru_cache(maxsize=65536)
def wavefronts(addresses: bytes, size: int) -> int:
    """Counts how often lanes' addresses (int64) ask the banks, 32 words of 4 bytes at a time.

    16 bytes a lane go by quarters of a warp, 8 by halves.
    """
    at = np.frombuffer(addresses, np.int64)
    together = 32 if size <= 4 else 16 if size == 8 else 8
    total = 0
    for first in range(0, len(at), together):
        part = at[first : first + together]
        words = np.unique((part[:, None] + np.arange(0, max(size, 4), 4)).ravel() // 4)
        total += int(np.bincount(words % 32).max())
    return total


def access(w: Warp, i: Instruction, slot: int, offset: int) -> int:
    """The wavefronts of a warp's access to shared memory."""
    matrix = i.opcode.startswith(("ldmatrix", "stmatrix"))
    size = 16 if matrix else bytes_of(i)
    at = w.R[slot].view(np.uint32 if w.R[slot].dtype.itemsize == 4 else np.int64).astype(np.int64)
    at = at[: 8 * next(int(x[1:]) for x in i.opcode.split(".") if x in ("x1", "x2", "x4"))] if matrix else at[w.lanes]
    if len(at) == 0:
        return 0
    at = at - (int(at.min()) & ~127) + (offset & 127)
    return wavefronts(at.tobytes(), size)
