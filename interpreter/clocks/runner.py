"""A warp by clocks: what it waited for, and why it went on."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..machine.state import AsyncOp, Warp
from .blocks import Block
from .units import UNITS, Sm


@dataclass(eq=False)
class Runner:
    """A warp by clocks."""

    warp: Warp
    sm: Sm
    at: float = 0.0  # when it may issue next
    ready: dict[int, float] = field(default_factory=dict)  # slot -> when its value is there
    own: dict[str, float] = field(default_factory=lambda: dict.fromkeys(UNITS, 0.0))  # when a unit takes its next
    block: Block | None = None
    place: int = 0
    since: float = 0.0  # when it began to wait
    what: str = ""  # for what
    cause: Cause | None = None  # why it went on
    waits: list[Waited] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Cause:
    """The reason why a warp went on at a time: what another did, or an operation."""

    who: Runner
    op: AsyncOp | None
    at: float
    before: Cause | None  # why that one had gone on
    issued: float = 0.0


@dataclass(slots=True)
class Waited:
    start: float
    end: float
    what: str
    line: int
    cause: Cause  # what ended it

    def __str__(self) -> str:
        by = self.cause.op.kind if self.cause.op is not None else f"warp {self.cause.who.warp.number}"
        return f"line {self.line} ({self.what}), which {by} let go"
