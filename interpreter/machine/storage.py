"""Memories as bytes with their shadows: shared memory, and allocations in global memory (PTX ISA 5.1 State spaces)."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from .hazards import Actor, Event, Misuse, OutOfBounds, Shadow

Array = np.ndarray[Any, Any]  # of any dtype and rank: registers and memory are viewed as they are used
GLOBAL_BASE = 0x7000_0000_0000


class Memory:
    """Raw bytes with their shadow. Never-written bytes hold a pattern that is NaN in every format."""

    def __init__(self, name: str, size: int, readers: int, events: list[Event]):
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        self.words32, self.chunks = self.bytes.view(np.uint32), self.bytes.view(np.uint16).reshape(-1, 8)
        self.size = size
        self.shadow = Shadow(name, len(self.words32), readers, events)


class Buffer:
    """An allocation in global memory. What the host gave is defined and read-only; a result is neither."""

    def __init__(self, name: str, base: int, data: Array | None, size: int, events: list[Event]):
        self.name, self.base, self.size, self.result = name, base, size, data is None
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        self.shadow: Shadow | None = None
        self.extra: dict[str, Any] = {}
        if data is None:
            self.shadow = Shadow(name, len(self.bytes) // 4, 0, events)
        else:
            self.bytes[:size] = np.frombuffer(data.tobytes(), np.uint8)

    def read(self, actor: Actor, offsets: Array, size: int) -> Array:
        """[len(offsets), size] bytes; offsets are checked already."""
        if self.shadow is not None:
            self.shadow.read(actor, (offsets[:, None] // 4 + np.arange(-(-size // 4))).ravel())
        return self.bytes[offsets[:, None] + np.arange(size)]

    def write(self, actor: Actor, offsets: Array, data: Array) -> None:
        if self.shadow is None:
            raise Misuse(f"writes to {self.name}, which is an operand")
        self.shadow.write(actor, (offsets[:, None] // 4 + np.arange(-(-data.shape[1] // 4))).ravel())
        self.bytes[offsets[:, None] + np.arange(data.shape[1])] = data

    def change(self, actor: Actor, words: Array) -> None:
        """An atomic is about to change them."""
        if self.shadow is None:
            raise Misuse(f"adds to {self.name}, which is an operand")
        self.shadow.read(actor, words)
        self.shadow.write(actor, words)


class GlobalMemory:
    """Allocations with unmapped space between them."""

    def __init__(self, events: list[Event]):
        self.buffers: list[Buffer] = []
        self.bases: list[int] = []
        self.events = events

    def add(self, name: str, data: Array | None, size: int = 0) -> int:
        """The address of a new allocation: a copy of `data`, or `size` bytes that nobody has written."""
        size = size if data is None else data.nbytes
        end = self.buffers[-1].base + self.buffers[-1].size if self.buffers else GLOBAL_BASE
        base = (-(-end // 0x10_0000) + 1) * 0x10_0000
        self.buffers.append(Buffer(name, base, data, size, self.events))
        self.bases.append(base)
        return base

    def named(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)

    def find(self, address: int, size: int, what: str) -> tuple[Buffer, int]:
        """The allocation that holds all `size` bytes at `address`, and their offset in it."""
        n = bisect.bisect_right(self.bases, address) - 1
        if n >= 0 and address + size <= (b := self.buffers[n]).base + b.size:
            return b, address - b.base
        near = ""
        if n >= 0:
            b = self.buffers[n]
            near = f", {address - b.base} bytes after the start of {b.name} of {b.size}"
        raise OutOfBounds(f"{what} {size} bytes at 0x{address:x}, outside of every allocation{near}")

    def find_all(self, addresses: Array, size: int, what: str) -> list[tuple[Buffer, Array, Array]]:
        """Finds int64 addresses: (allocation, which of the addresses, their offsets)."""
        if len(addresses) == 0:
            return []
        if (addresses % min(size, 16)).any():
            raise OutOfBounds(f"{what} {size} bytes at 0x{int(addresses[addresses % size != 0][0]):x}, not aligned")
        low, high = int(addresses.min()), int(addresses.max())
        buffer, _ = self.find(low, size, what)
        if high + size <= buffer.base + buffer.size:
            return [(buffer, np.arange(len(addresses)), addresses - buffer.base)]
        found: dict[str, tuple[Buffer, list[int]]] = {}
        for n, address in enumerate(addresses.tolist()):
            b, _ = self.find(address, size, what)
            found.setdefault(b.name, (b, []))[1].append(n)
        return [(b, np.array(ns), addresses[ns] - b.base) for b, ns in found.values()]
