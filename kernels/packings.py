"""The packing of entries in a page, by the name of the layout: data for the kernels, the C++ launcher and the tests."""

from dataclasses import dataclass

ROPE = 64  # numbers of a head or an entry that RoPE rotates, the last ones


@dataclass(frozen=True)
class Packing:
    """The layout of the bytes of packed entries in a page of n entries."""

    values: int  # bytes of an entry's numbers
    scales: int  # bytes of their scales
    group: int  # numbers that share a scale
    separate_scales: bool  # a page has all numbers before all scales; else an entry's scales follow its numbers
    multiple: int = 1  # the size of a page is rounded up to a multiple of this many bytes
    after: int = 0  # bytes of numbers that follow an entry's scales

    @property
    def entry(self) -> int:
        """Bytes of an entry."""
        return self.values + self.scales + self.after


PACKED = {  # entries of 512 numbers, or of 512 and RoPE's after them, which attention reads
    # e4m3 with scales of ue8m0, RoPE's in bf16
    "v4_fp8": Packing(512 + ROPE, 8, group=64, separate_scales=True, multiple=512 + ROPE),
    # e2m1 with scales of ue8m0, then RoPE's in bf16
    "v4_fp4": Packing((512 - ROPE) // 2, 16, group=32, separate_scales=False, after=2 * ROPE),
    "v41_fp8": Packing(512, 16, group=32, separate_scales=False),  # e4m3 with scales of ue8m0
    "v41_fp4": Packing(256, 32, group=16, separate_scales=False),  # e2m1 with scales of e4m3
    # e4m3 with scales of float32, then RoPE's in bf16: 576 numbers
    "v32_fp8": Packing(512, 16, group=128, separate_scales=False, after=2 * ROPE),
}

CACHED = PACKED | {  # and those of 128, which the indexer reads
    "index_fp8": Packing(128, 4, group=128, separate_scales=True),  # e4m3 with a float32 scale
    "index_fp4": Packing(64, 4, group=32, separate_scales=True),  # e2m1 with scales of ue8m0
}
