"""Reads the facts in a cubin, without CUDA tools.

A cubin is an ELF64 file whose `.nv.info` sections hold records of (format, attribute, value), as `cuobjdump -elf`
prints them.  Only the attributes named below are read.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_KPARAM_INFO, _REQNTID, _FRAME_SIZE, _REGCOUNT = 0x17, 0x10, 0x11, 0x2F
_SIZED_VALUE = 4  # the only record format whose value does not fit into the record's own two bytes
_INSTRUCTION = 16  # bytes
_COPY_BY_TWO = 0xDAE  # LDGSTS [R + UR], desc[UR + 1][R]; all others are 0xFAE


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of a cubin.  Sizes are in bytes."""

    name: str
    registers: int  # per thread, at launch
    threads: int  # required block size, 0 when any is allowed
    local_bytes: int  # stack frame per thread: spills and indexed local arrays
    params: tuple[int, ...]  # sizes, in order
    wild_copies: int = 0  # `wild_copies` of its code


def read_kernel(cubin: bytes) -> KernelInfo:
    """The facts of the one kernel in `cubin`; ValueError when it is no cubin or does not hold exactly one."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError(f"not an ELF file: starts with {cubin[:4]!r}")
    sections = dict(_sections(cubin))
    name = _kernel_name(sections)
    registers = threads = local_bytes = 0
    params = {}
    for attribute, value in [*_records(sections[".nv.info"]), *_records(sections[f".nv.info.{name}"])]:
        if attribute == _REGCOUNT:
            registers = struct.unpack("<II", value)[1]
        elif attribute == _FRAME_SIZE:
            local_bytes = struct.unpack("<II", value)[1]
        elif attribute == _REQNTID:
            x, y, z = struct.unpack("<III", value)
            threads = x * y * z
        elif attribute == _KPARAM_INFO:
            _, ordinal, _, flags = struct.unpack("<IHHI", value)
            params[ordinal] = (flags >> 18) & 0x3FFF
    sizes = tuple(size for _, size in sorted(params.items()))
    return KernelInfo(name, registers, threads, local_bytes, sizes, wild_copies(sections[f".text.{name}"]))


def wild_copies(code: bytes) -> int:
    """The number of cp.async that take a part of their address in shared memory from a uniform register, and a policy
    of L2 from the next one. ptxas (12.9, 13.0) fills two such registers and names UR0 and UR1 instead: the copy goes
    anywhere, or is an illegal instruction.
    """
    words = (int.from_bytes(code[at : at + 2], "little") for at in range(0, len(code), _INSTRUCTION))
    return sum(word & 0xFFF == _COPY_BY_TWO for word in words)


def read_code(cubin: bytes) -> bytes:
    """The instructions of the one kernel in `cubin`."""
    sections = dict(_sections(cubin))
    return sections[f".text.{_kernel_name(sections)}"]


def _kernel_name(sections: Mapping[str, bytes]) -> str:
    names = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(names) != 1:
        raise ValueError(f"wanted one kernel in the cubin, got {names}")
    return names[0]


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        yield elf[start : elf.index(b"\0", start)].decode(), elf[offset : offset + size]


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED_VALUE:
            yield attribute, info[at : at + size]
            at += size
