"""The sum over devices on the interpreter: a launch for each device, on what the others have sent it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kernels.abi import AllReduce

from ..machine import scheduler
from ..machine.reductions import add_changed
from ..machine.state import Array, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

BF16 = ml_dtypes.bfloat16
MESSAGES = 64  # bytes from where a device's memory begins: ffi/all_reduce_plan.h
LINE = np.dtype([("first", np.uint32), ("message1", np.uint32), ("second", np.uint32), ("message2", np.uint32)])


def lines_of(x: Array, message: int) -> Array:
    """The lines that a device sends of x, bfloat16 `[n]`."""
    made = np.zeros(x.size // 4, LINE)
    made["first"], made["second"] = np.ascontiguousarray(x).view(np.uint32).reshape(-1, 2).T
    made["message1"] = made["message2"] = message
    return made


def result(
    variant: AllReduce,
    xs: Array,
    device: int,
    *,
    sent: int = 0,
    seed: int = 0,
    edit: Callable[[str], str] = str,
    come: Callable[[Array], Array] = lambda inbox: inbox,
    **edits: Edit,
) -> Array:
    """y of one of the devices that have xs, bfloat16 `[devices, n]`, after so many messages.

    Its inbox has those of the others, as `come` changes them, lines `[2, devices, lines]`. Raises Wrong unless it
    sends the others its lines, each in its place, and counts the message.
    """
    kernel, memory, (devices, n) = Kernel.of(variant), new_memory(), xs.shape
    message, halves = (sent + 1) % 2**32, np.zeros((2, devices, n // 4), LINE)
    for other in range(devices):
        halves[sent % 2, other] = lines_of(np.full(n, 7, BF16), sent)  # of the message before
        if other != device:
            halves[message % 2, other] = lines_of(xs[other], message)
    shape = {"bytes": 2 * n, "device": device, "devices": devices, "tile_n": kernel.facts["tile_n"]}
    inbox = MESSAGES + 4 * shape["tile_n"] * native.plan_all_reduce(shape).grid
    size = inbox + halves.nbytes
    bytes_of = {other: np.zeros(size, np.uint8) for other in range(devices)}
    at = {other: add_changed(memory, f"memory of {other}", bytes_of[other]) for other in range(devices)}
    own = memory.named(f"memory of {device}").bytes
    own[MESSAGES:inbox].view(np.uint32)[:] = sent
    own[inbox:size] = come(halves).view(np.uint8).ravel()
    ways = [at[other] + inbox + device * (n // 4) * LINE.itemsize for other in range(devices)]
    own[: 8 * devices].view(np.int64)[:] = ways
    addresses = {"x": memory.add("x", xs[device]), "y": memory.add("y", None, 2 * n)}
    plan = native.plan_all_reduce(shape, at[device], addresses=addresses)
    scheduler.run(machine(Kernel(variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed))
    for other in range(devices):
        if other == device:
            continue
        got = memory.named(f"memory of {other}").bytes[inbox:size].view(LINE).reshape(halves.shape)
        want = np.zeros_like(got)
        want[message % 2, device] = lines_of(xs[device], message)
        if (got != want).any():
            raise Wrong(f"device {other} is sent other lines")
    counted = own[MESSAGES:inbox].view(np.uint32)
    if (counted != message).any():
        raise Wrong("messages are counted wrongly")
    return memory.named("y").bytes[: 2 * n].view(BF16)


def judge(xs: Array, got: dict[int, Array]) -> None:
    """Raises Wrong unless every device has the same sum, that of float32 numbers in the order of devices."""
    total: Any = np.zeros(xs.shape[1], np.float32)
    for x in xs.astype(np.float32):
        total = total + x
    for device, y in got.items():
        if (y.view(np.uint16) != total.astype(BF16).view(np.uint16)).any():
            raise Wrong(f"device {device} has another sum")
