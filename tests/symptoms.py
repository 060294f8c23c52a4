"""Patterns of what the interpreter says of a planted fault, in whatever order two unordered events happen.

A region is the name of a place in shared memory.
"""

from interpreter.machine.hazards import Race, Undefined


def early(reader: str, region: str, writer: str) -> str:
    """The data that is read is not there yet, or nothing orders its write."""
    return (
        rf"{reader}[^\n]*\n\s+reads SMEM of {region}\b[^\n]*"
        rf"(which nobody wrote|nothing orders this and the write by [^\n]*{writer})"
    )


EARLY = (Race, Undefined)  # what `early` may be raised as


def late(writer: str, region: str, reader: str) -> str:
    """Data is written over that is still read, or may be."""
    return (
        rf"{writer}[^\n]*\n\s+overwrites SMEM of {region}\b[^\n]*nothing orders this and the read by [^\n]*{reader}"
        rf"|{reader}[^\n]*\n\s+reads SMEM of {region}\b[^\n]*nothing orders this and the write by [^\n]*{writer}"
    )


def unordered(reader: str, region: str, writer: str) -> str:
    """A place that is written again and again."""
    return early(reader, region, writer) + "|" + late(writer, region, reader)


def unfenced(region: str, writer: str) -> str:
    """Products read data that was written through the generic proxy."""
    after = rf"no fence\.proxy\.async after the generic write by [^\n]*{writer}"
    return rf"wgmma[^\n]*\n\s+reads SMEM of {region}\b[^\n]*{after}"
