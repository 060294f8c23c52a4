"""Bulk and tensor copies, TMA (PTX ISA 9.7.9.25.4-5 cp.async.bulk and cp.async.bulk.tensor; 5.5 Tensors).

A tensor map is what `cuTensorMapEncodeTiled` was told. A load reads a box of the tensor, with zeros where it hangs over
the edge, writes it densely to shared memory, its 16-byte chunks permuted by the swizzle, and counts *all* bytes of the
box on an mbarrier. A multicast does so in several CTAs of the cluster, at the same place in each, and counts on the
mbarriers at the same place in each.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from .barriers import complete_tx, lookup
from .clusters import ranks
from .decode import Decoder, Step, instruction
from .hazards import Misuse, OutOfBounds, Unsupported
from .memory import addresses, refuse_barriers
from .parser import Address, Arg, Instruction
from .reductions import additions
from .rules import Rule
from .scheduler import remark
from .state import (
    GENERIC_PARAM_BASE,
    RANK_SHIFT,
    READ_STREAMS,
    SMEM_BASE,
    Array,
    AsyncOp,
    Cta,
    MBarrier,
    Wait,
    Warp,
    lanes_of,
)
from .storage import GlobalMemory

SPANS = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes of a swizzled row -> how many bits of the address are permuted
ATOMS = (16, 32)  # bytes that a swizzle moves together

MAP_SIZE = 128  # bytes
# The flags of an encoded tensor map: rank less 1 from bit 4 on, type from 7, swizzle from 13, L2 promotion from 21.
MAP_CONSTANT = 1 << 1 | 1 << 18  # set in all that CuTe's host code makes
MAP_TF32, MAP_ATOM_32 = 1 << 16, 1 << 19
MAP_KNOWN = 7 << 4 | 15 << 7 | 3 << 13 | MAP_TF32 | MAP_ATOM_32 | 3 << 21
MAP_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2}  # of an element, by the number of its type


@dataclass(frozen=True)
class TensorMap:
    """Modes are listed fastest first; the fastest is contiguous."""

    address: int
    element: int  # bytes
    box: tuple[int, ...]  # elements
    extents: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of all modes except the first
    swizzle: int = 128  # bytes: 0, 32, 64 or 128
    atom: int = 16  # bytes that the swizzle moves together
    rounds_to_tf32: bool = False

    def __post_init__(self) -> None:
        if self.address % 16 or any(s % 16 for s in self.strides):
            raise Misuse(f"a tensor map with an address or stride that is no multiple of 16 bytes: {self}")
        if not all(0 < b <= 256 for b in self.box):
            raise Misuse(f"a tensor map with a box of {self.box}, wanted 1 to 256 in each mode")
        if self.row_bytes % 16 or (self.swizzle and self.row_bytes > self.swizzle):
            raise Misuse(f"a box whose rows have {self.row_bytes} bytes, with a swizzle of {self.swizzle}")
        if self.atom not in ATOMS or (self.atom == 32 and self.swizzle != 128):
            raise Misuse(f"a swizzle of {self.swizzle} bytes in atoms of {self.atom}")

    @staticmethod
    def decode(blob: bytes) -> TensorMap:
        """Decodes the bytes that a kernel gets, of which the chip reads 64. A bit that has no meaning here is refused.

        Strides are in units of 16 bytes, extents and boxes less 1.
        """
        address, flags, *numbers = struct.unpack("<QI10I", blob[:52])
        strides, high, extents = numbers[:4], numbers[4], numbers[5:]
        rank = (flags >> 4 & 7) + 1
        if flags & MAP_CONSTANT != MAP_CONSTANT:
            raise Misuse(f"what lies where a tensor map should is none: its flags are {flags:#010x}")
        if unknown := flags & ~(MAP_CONSTANT | MAP_KNOWN):
            raise Misuse(f"a tensor map whose flags have bits that have no meaning here: {unknown:#010x}")
        if any(blob[52:55]) or any(blob[55 + rank : 64]) or rank > 5:
            raise Misuse(f"a tensor map of rank {rank} with numbers that have no meaning here: {blob[52:64].hex()}")
        if (kind := flags >> 7 & 15) not in MAP_BYTES:
            raise Misuse(f"a tensor map of elements of type {kind}")
        return TensorMap(
            address,
            element=MAP_BYTES[kind],
            box=tuple(x + 1 for x in blob[55 : 55 + rank]),
            extents=tuple(x + 1 for x in extents[:rank]),
            strides=tuple(16 * (x | (high >> 4 * n & 15) << 32) for n, x in enumerate(strides[: rank - 1])),
            swizzle=(0, 32, 64, 128)[flags >> 13 & 3],
            atom=32 if flags & MAP_ATOM_32 else 16,
            rounds_to_tf32=bool(flags & MAP_TF32),
        )

    @property
    def row_bytes(self) -> int:
        return self.box[0] * self.element

    @cached_property
    def bytes(self) -> int:
        return math.prod(self.box) * self.element

    def rows(self, at: tuple[int, ...]) -> tuple[Array, Array]:
        """Returns, for the box at these coordinates, where each row begins in memory, and whether it is inside."""
        address, inside = np.zeros((), np.int64), np.ones((), bool)
        for mode in range(len(self.box) - 1, 0, -1):
            x = at[mode] + np.arange(self.box[mode])
            address = address[..., None] + x * self.strides[mode - 1]
            inside = inside[..., None] & (x >= 0) & (x < self.extents[mode])
        return address.ravel() + self.address, inside.ravel()

    def columns(self, at: int) -> tuple[int, int, int]:
        """(first byte within a row of the box, bytes, byte of the tensor's row) of what is inside."""
        first, last = max(at, 0), min(at + self.box[0], self.extents[0])
        return (first - at) * self.element, max(last - first, 0) * self.element, first * self.element

    def load(self, memory: GlobalMemory, actor: AsyncOp, at: tuple[int, ...]) -> Array:
        """uint8 [rows of the box, bytes]."""
        rows, inside = self.rows(at)
        skip, size, column = self.columns(at[0])
        data = np.zeros((len(rows), self.row_bytes), np.uint8)
        if size and inside.any():
            wanted = rows[inside] + column
            buffer, _ = memory.find(int(wanted.min()), size, "a tensor map reads")
            if int(wanted.max()) + size > buffer.base + buffer.size:
                raise OutOfBounds(f"a tensor map reads past the end of {buffer.name}: {self}")
            found = buffer.read(actor, wanted - buffer.base, size)
            if self.rounds_to_tf32 and (found.view(np.uint32) & 0x1FFF).any():
                raise Unsupported("a tensor map that rounds fp32 to tf32")
            data[np.flatnonzero(inside)[:, None], skip + np.arange(size)] = found
        return data


def swizzled(offsets: Array, span: int, atom: int = 16) -> Array:
    """Byte addresses in shared memory after the swizzle of `span` bytes: bits 4.. are xored with bits 7.. . Where atoms
    have 32 bytes, bits 5 and 6 are xored with bits 7 and 8."""
    more = ATOMS.index(atom)
    bits = SPANS[span] - more
    return offsets ^ ((offsets >> 3 - more) & (((1 << bits) - 1) << 4 + more))


@lru_cache(maxsize=1024)
def place(size: int, swizzle: int, atom: int, offset: int) -> tuple[Array, Array]:
    """(chunk numbers, words) in shared memory of a box of so many bytes that begins at `offset`, row by row."""
    chunks = swizzled(offset + 16 * np.arange(size // 16), swizzle, atom) // 16
    return chunks, (chunks[:, None] * 4 + np.arange(4)).ravel()


def coordinates(d: Decoder, arg: Arg) -> tuple[int, list[int]]:
    """The slots of [map, {x, y, ...}]."""
    if not isinstance(arg, Address) or not arg.coordinates or arg.offset:
        raise d.fail(f"operand {arg}, wanted a tensor map with coordinates")
    return d.slot(arg.base, "b64"), [d.slot(x, "s32") for x in arg.coordinates]


def tensor_map(w: Warp, slot: int) -> TensorMap:
    address = w.uniform(slot, np.uint64, "the address of a tensor map")
    maps, params = w.machine.tensor_maps, w.machine.params
    if address not in maps:
        place = address - GENERIC_PARAM_BASE
        if place < 0 or place + MAP_SIZE > len(params):
            which = "a .param address, wanted a generic one: cvta.param" if address >> 56 == 1 else f"0x{address:x}"
            raise Misuse(f"there is no tensor map at {which}")
        maps[address] = TensorMap.decode(params[place : place + MAP_SIZE].tobytes())
    return maps[address]


def at_coordinates(w: Warp, slots: list[int]) -> tuple[int, ...]:
    return tuple(w.uniform(s, np.int32, "a coordinate") for s in slots)


def destination(w: Warp, slot: int, offset: int, size: int) -> tuple[Cta, int]:
    cta, at = w.cta.at(w.place(slot, "a destination") + offset)
    cta.smem_span(at, size, 128, "a tensor copy of")
    return cta, at


@dataclass
class CopyDestination:
    """A place where a copy ends: in shared memory of one CTA, with the mbarrier that hears of it."""

    cta: Cta
    offset: int
    bar: MBarrier


def destinations_of(
    i: Instruction, d: Decoder, bar_arg: Arg, mask_arg: Arg | None
) -> Callable[[Warp, Cta, int], list[CopyDestination]]:
    """Decodes where one thread's copy ends: in a CTA's shared memory, or in that of all CTAs in a mask; the mbarrier is
    in the same CTA.

    With .cta_group::2 it may be its pair's other CTA's: of every pair the one of the rank, even or odd, that the
    mbarrier's address is of.
    """
    bar_slot, bar_offset = d.address(bar_arg)
    mask_slot = d.slot(mask_arg or "", "b16") if i.has("multicast::cluster") else None
    pair, own = i.has("cta_group::2"), not i.has("shared::cluster")

    def of(w: Warp, cta: Cta, offset: int) -> list[CopyDestination]:
        if int(w.lanes.sum()) != 1:
            raise Misuse(f"{int(w.lanes.sum())} lanes issue the same copy")
        if own and cta is not w.cta:
            raise Misuse(f"a copy to CTA {cta.number}, which takes .shared::cluster")
        where = w.place(bar_slot, "the address of an mbarrier") + bar_offset
        home, place = w.cta.at(where)
        ctas = [cta] if mask_slot is None else ranks(w, w.uniform(mask_slot, np.uint16, "a mask of CTAs"))
        found = []
        for one in ctas:
            rank = home.rank if mask_slot is None else one.rank & ~1 | home.rank & 1 if pair else one.rank
            bar = lookup(w, rank << RANK_SHIFT | place)
            if rank != one.rank and not (pair and rank == one.rank ^ 1):
                raise Misuse(f"a copy to CTA {one.number} that completes on CTA {bar.cta.number}")
            if not bar.init_fenced and w.clock.seen[1, bar.init[0].index] < bar.init[1]:
                text = f"no fence.mbarrier_init or fence.proxy.async between the initialisation of {bar} and this copy"
                remark(w.machine, Rule.INIT_FENCE, Misuse(text))
            found.append(CopyDestination(one, offset, bar))
        return found

    return of


def deliver(op: AsyncOp, to: list[CopyDestination], words: Array, chunks: Array, data: Array) -> None:
    for x in to:
        for cta in (x.cta, x.bar.cta):
            cta.visit(op, "copies to")
        refuse_barriers(x.cta, words)
        x.cta.smem.shadow.write(op, words)
        x.cta.smem.chunks[chunks] = data.view(np.uint16).reshape(-1, 8)
        complete_tx(x.bar, data.size, op.completed())


def arrival_of(to: list[CopyDestination], size: int) -> str:
    """Says where a copy arrives and on which mbarrier it completes, for a timeline."""
    ctas = f" of CTAs {', '.join(str(x.cta.number) for x in to)}" if len(to) > 1 else ""
    return f"to +{to[0].offset - SMEM_BASE}{ctas} ({size} bytes), completes on +{to[0].bar.offset - SMEM_BASE}"


LOAD_SPACES = ("shared::cta", "shared::cluster", "global", "tile", "mbarrier::complete_tx::bytes", "L2::cache_hint")
HINTS = ("bulk_group", "L2::cache_hint")


@instruction("cp.async.bulk.tensor")
def tensor_copy(i: Instruction, d: Decoder) -> Step:
    rank = int(i.mods[0].rstrip("d"))
    spaces = [m for m in i.mods[1:] if m in ("shared::cta", "shared::cluster", "global")]
    if spaces[0] == "global":
        return tensor_store(i, d)
    i.only(i.mods[0], *LOAD_SPACES, "multicast::cluster", "cta_group::1", "cta_group::2", "tile::gather4")
    gathers = i.has("tile::gather4")
    to, to_offset = d.address(i.args[0])
    source, where = coordinates(d, i.args[1])
    ends = destinations_of(i, d, i.args[2], i.args[3] if len(i.args) > 3 else None)
    if len(where) != (5 if gathers else rank) or (gathers and rank != 2):
        raise d.fail(f"{len(where)} coordinates of {rank}")

    def step(w: Warp) -> None:
        tensor, at = tensor_map(w, source), at_coordinates(w, where)
        if len(tensor.box) != rank:
            raise Misuse(f"a copy of rank {rank} by a tensor map of rank {len(tensor.box)}")
        if gathers and tensor.box[1] != 1:
            raise Misuse(f"four rows by a tensor map with a box of {tensor.box}, wanted one of one row")
        boxes = [(at[0], row) for row in at[1:]] if gathers else [at]
        size = tensor.bytes * len(boxes)
        cta, offset = destination(w, to, to_offset, size)
        target = ends(w, cta, offset)
        chunks, words = place(size, tensor.swizzle, tensor.atom, offset)

        def run(op: AsyncOp) -> None:
            data = np.concatenate([tensor.load(w.machine.memory, op, box) for box in boxes])
            deliver(op, target, words, chunks, data)

        what = f"load {list(at)} {arrival_of(target, size)}"
        w.issue("tma", what, run, ctas=[x.cta for x in target])

    return step


@instruction("cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta")
def bulk_copy(i: Instruction, d: Decoder) -> Step:
    """Bytes to shared memory, from global memory or from the CTA's own shared memory."""
    i.only("global", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint")
    i = replace(i, mods=(*i.mods, "shared::cluster")) if "bulk.shared::cluster" in i.opcode else i
    from_global = i.has("global")
    if i.has("multicast::cluster") and not from_global:
        raise d.fail("a multicast out of shared memory")
    to, to_offset = d.address(i.args[0])
    source, source_offset = d.address(i.args[1])
    count = d.slot(i.args[2], "u32")
    ends = destinations_of(i, d, i.args[3], i.args[4] if len(i.args) > 4 else None)

    def step(w: Warp) -> None:
        active = w.active
        for lane in np.flatnonzero(lanes_of(active)):  # each thread makes a copy of its own
            w.set_active(1 << int(lane))
            copy(w)
        w.set_active(active)

    def copy(w: Warp) -> None:
        size = w.uniform(count, np.uint32, "a number of bytes")
        if size == 0 or size % 16:
            raise Misuse(f"a bulk copy of {size} bytes, wanted a multiple of 16")
        cta, offset = w.cta.at(w.uniform(to, np.uint32, "a destination") + to_offset)
        cta.smem_span(offset, size, 16, "a bulk copy of")
        target = ends(w, cta, offset)
        chunks = offset // 16 + np.arange(size // 16)
        words = offset // 4 + np.arange(size // 4)
        start = w.uniform(source, np.uint64 if from_global else np.uint32, "a source") + source_offset

        def run(op: AsyncOp) -> None:
            if from_global:
                pieces = start + 16 * np.arange(size // 16)
                data = np.empty((len(pieces), 16), np.uint8)
                for buffer, which, offsets in w.machine.memory.find_all(pieces, 16, "a bulk copy reads"):
                    data[which] = buffer.read(op, offsets, 16)
            else:
                home, at = w.cta.at(start)
                if home is not w.cta:
                    raise Misuse(f"a bulk copy out of shared memory of CTA {home.number}, wanted this CTA's own")
                read = home.smem_span(at, size, 16, "a bulk copy of")
                if not home.smem.shadow.read(op, read).all():
                    raise Misuse("copies what is not defined to another CTA")
                data = home.smem.words32[read].view(np.uint8)
            deliver(op, target, words, chunks, np.ascontiguousarray(data))

        ctas = [x.cta for x in target] + ([] if from_global else [w.cta])
        reader = w.cta.first_stream + READ_STREAMS + w.number
        w.issue("tma", f"copy {arrival_of(target, size)}", run, ctas=ctas, reader=reader)

    return step


def tensor_store(i: Instruction, d: Decoder) -> Step:
    """Every active lane stores the same box: ptxas makes one UTMASTG of them, and so is it one here."""
    i.only(i.mods[0], "global", "shared::cta", "tile", *HINTS)
    target, where = coordinates(d, i.args[0])
    source, offset_ = d.address(i.args[1])

    def step(w: Warp) -> None:
        tensor, at = tensor_map(w, target), at_coordinates(w, where)
        cta, offset = destination(w, source, offset_, tensor.bytes)
        chunks, words = place(tensor.bytes, tensor.swizzle, tensor.atom, offset)
        rows, inside = tensor.rows(at)
        skip, size, column = tensor.columns(at[0])

        def run(op: AsyncOp) -> None:
            defined = cta.smem.shadow.read(op, words, partial=True).reshape(len(rows), -1)[inside]
            if not defined[:, skip // 4 : (skip + size) // 4].all():
                raise Misuse("stores what is not defined to global memory")
            data = cta.smem.chunks[chunks].view(np.uint8).reshape(len(rows), -1)[inside, skip : skip + size]
            if size and inside.any():
                wanted = rows[inside] + column
                for buffer, which, offsets in w.machine.memory.find_all(wanted, 16, "a tensor map writes"):
                    if int(offsets.max()) + size > buffer.size:
                        raise OutOfBounds(f"a tensor map writes past the end of {buffer.name}: {tensor}")
                    buffer.write(op, offsets, data[which])

        op = w.issue(
            "tma",
            f"store {list(at)} from +{offset - 1024} ({tensor.bytes} bytes)",
            run,
            reader=w.cta.first_stream + READ_STREAMS + w.number,
        )
        w.extra.setdefault("bulk open", []).append(op)

    return step


@instruction("cp.async.bulk.global.shared::cta", "cp.reduce.async.bulk.global.shared::cta")
def bulk_store(i: Instruction, d: Decoder) -> Step:
    """Bytes of the CTA's shared memory to global memory; cp.reduce adds fp32 to what is there, in any order."""
    adds = i.opcode.startswith("cp.reduce")
    i.only(*HINTS, *(("add", "f32") if adds else ()))
    if adds and not (i.has("add") and i.has("f32")):
        raise d.fail(i.opcode)
    (to, to_offset), (source, source_offset) = d.address(i.args[0]), d.address(i.args[1])
    count = d.slot(i.args[2], "u32")

    def step(w: Warp) -> None:
        if (lanes := w.active.bit_count()) != 1:
            raise Misuse(f"{lanes} lanes issue the same copy")
        size = w.uniform(count, np.uint32, "a number of bytes")
        if size == 0 or size % 16:
            raise Misuse(f"a bulk copy of {size} bytes, wanted a multiple of 16")
        address = w.uniform(to, np.uint64, "a destination") + to_offset
        cta, at = w.cta.at(w.place(source, "a source") + source_offset)
        if cta is not w.cta:
            raise Misuse(f"a bulk copy out of shared memory of CTA {cta.number}, wanted this CTA's own")
        words = cta.smem_span(at, size, 16, "a bulk copy of")

        def run(op: AsyncOp) -> None:
            op.atomic = adds
            if not cta.smem.shadow.read(op, words).all():
                raise Misuse("stores what is not defined to global memory")
            data = cta.smem.words32[words]
            buffer, start = w.machine.memory.find(address, size, "a bulk copy writes")
            if start % 16:
                raise OutOfBounds(f"a bulk copy writes at 0x{address:x}, wanted a multiple of 16")
            if not adds:
                buffer.write(op, np.array([start]), data.view(np.uint8)[None])
                return
            numbers = np.arange(start // 4, (start + size) // 4)
            buffer.change(op, numbers)
            buffer.bytes.view(np.float32)[numbers] += data.view(np.float32)
            additions(buffer)[numbers] += 1

        what = f"{'add' if adds else 'store'} {size} bytes from +{at - SMEM_BASE}"
        op = w.issue("tma", what, run, reader=w.cta.first_stream + READ_STREAMS + w.number)
        w.extra.setdefault("bulk open", []).append(op)

    return step


@instruction("cp.async.bulk.prefetch.tensor")
def tensor_prefetch(i: Instruction, d: Decoder) -> Step:
    """Changes nothing; the tensor map must be there, and of this rank."""
    i.only(i.mods[0], "L2", "global", "tile", "L2::cache_hint")
    source, where = coordinates(d, i.args[0])

    def step(w: Warp) -> None:
        tensor, at = tensor_map(w, source), at_coordinates(w, where)
        if len(tensor.box) != len(at):
            raise Misuse(f"a prefetch of rank {len(at)} by a tensor map of rank {len(tensor.box)}")

    return step


@instruction("cp.async.bulk.prefetch.L2.global")
def bulk_prefetch(i: Instruction, d: Decoder) -> Step:
    """Changes nothing; what it names must be there all the same."""
    i.only()
    base, offset = d.address(i.args[0])
    count = d.slot(i.args[1], "u32")

    def step(w: Warp) -> None:
        size = w.uniform(count, np.uint32, "a number of bytes")
        if size == 0 or size % 16:
            raise Misuse(f"a prefetch of {size} bytes, wanted a multiple of 16")
        w.machine.memory.find_all(addresses(w, base, offset, "an address"), size, "prefetches")

    return step


@instruction("cp.async.bulk.commit_group")
def commit(i: Instruction, d: Decoder) -> Step:
    i.only()

    def step(w: Warp) -> None:
        w.extra.setdefault("bulk groups", []).append(w.extra.pop("bulk open", []))

    return step


@instruction("cp.async.bulk.wait_group")
def wait(i: Instruction, d: Decoder) -> Step:
    """.read, when the sources have been read, is taken to be the same as completion."""
    i.only("read")
    keep = d.immediate(i.args[0])

    def step(w: Warp) -> Wait | None:
        groups = w.extra.setdefault("bulk groups", [])
        wanted = [op for group in groups[: len(groups) - keep] for op in group]
        if all(op.done for op in wanted):
            for op in wanted:
                w.learn(op)
            del groups[: len(groups) - keep]
            return None
        return Wait(lambda: all(op.done for op in wanted), lambda: "its bulk copies")

    return step


@instruction("prefetch.tensormap", "prefetch")
def prefetch(i: Instruction, d: Decoder) -> Step:
    return lambda w: None
