"""Edits of PTX that plant a fault, and how the places are found: by what an instruction is, never by its registers.

Each refuses to do nothing, so that a kernel that has changed its shape breaks the test that needs the place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

WAIT = re.compile(
    r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait[^;]*\[(%r\d+)(?:\+(\d+))?\].*?DONE:\s*\}", re.S
)

LOST_BITS = r"mov\.b32 both, [^;]*;", lambda m: f"{m[0]} and.b32 both, both, {0xFF80FF80 - 2**32};"
"""a place where numbers are multiplied by a bfloat16, and what makes a power of two of it"""


def replace(text: str, pattern: str, to: str | Callable[[re.Match[str]], str], which: slice = slice(None)) -> str:
    """Replaces some of the matches."""
    found = list(re.finditer(pattern, text, re.M | re.S))
    chosen = found[which]
    if not chosen:
        raise LookupError(f"{len(found)} places match {pattern!r}, wanted {which}")
    for m in reversed(chosen):
        text = text[: m.start()] + (to if isinstance(to, str) else to(m)) + text[m.end() :]
    return text


def replacing(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """Each text, everywhere, becomes the other of its pair."""

    def edit(text: str) -> str:
        for old, new in pairs:
            if old not in text:
                raise LookupError(f"nothing is {old!r}")
            text = text.replace(old, new)
        return text

    return edit


def drop(text: str, pattern: str, which: slice = slice(None)) -> str:
    return replace(text, r"^\s*" + pattern + r"[^;]*;", "", which)


def parameter(text: str, params: Sequence[str], name: str) -> str:
    """A pattern of the place of the parameter with this name; params are the kernel's, in order."""
    (entry,) = re.findall(r"\.entry (\w+)\(", text)
    return rf"\[{entry}_param_{params.index(name)}\]"


def barriers(text: str) -> list[int]:
    """The offsets from the start of shared memory of the mbarriers that are made, in order."""
    named = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", text))
    made = []
    for base, offset in re.findall(r"mbarrier\.init\.shared\.b64\s+\[(%r\d+)(?:\+(\d+))?\], %r\d+;", text):
        made.append(int(offset or 0) or int(named[base]))
    return sorted(made)


def waits(text: str, offsets: set[int]) -> list[re.Match[str]]:
    """The waits for the mbarriers at these offsets."""
    found = []
    for m in WAIT.finditer(text):
        offset = int(m[2] or 0) or defining_offset(text, m[1], m.start())
        if offset in offsets:
            found.append(m)
    return found


def defining_offset(text: str, register: str, before: int) -> int | None:
    found = re.findall(rf"add\.s32\s+{register}, %r\d+, (\d+);", text[:before])
    return int(found[-1]) if found else None


def drop_waits(text: str, offsets: set[int], which: slice = slice(None)) -> str:
    chosen = waits(text, offsets)[which]
    if not chosen:
        raise LookupError(f"nothing waits for the mbarriers at {offsets}")
    for m in reversed(chosen):
        text = text[: m.start()] + text[m.end() :]
    return text


def move_waits(text: str, offset: int, to: int) -> str:
    """Lets whoever waits for the mbarrier at `offset` wait for the one at `to` instead."""
    chosen = waits(text, {offset})
    if not chosen:
        raise LookupError(f"nothing waits for the mbarrier at {offset}")
    for m in reversed(chosen):
        text = f"{text[: m.start(1)]}{m[1]}+{int(m[2] or 0) + to - offset}{text[m.end(2 if m[2] else 1) :]}"
    return text
