"""Compile-time choices of `hyper_connection`, and the sizes that follow."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARP

STREAMS = 4
NUMBERS = (2 + STREAMS) * STREAMS  # of a token: how its streams go into a sublayer, out of it and past it
TOKENS = 16  # of a cluster: the rows of a warp's product
CLUSTER = 8  # CTAs, which share out the channels
VECTOR = 8  # channels of a lane: 16 bytes
GROUP = 4 * VECTOR  # channels of the quad that shares a row of a product
GROUPS = 2  # of a warp
PITCH = 28  # float32 numbers from one token's sums to the next: its numbers, its sum of squares, and a gap
SUMS = TOKENS * PITCH
PAD = 16  # bytes after each row of fn: then no two rows that a warp reads meet in a bank


@dataclass(frozen=True)
class Config:
    dtype: str  # of streams
    hidden: int  # channels of a stream

    tile_m = TOKENS
    tile_n = NUMBERS
    cluster = CLUSTER

    @property
    def channels(self) -> int:
        """Channels of a CTA."""
        return self.hidden // CLUSTER

    @property
    def warps(self) -> int:
        """Warps that have channels; one more loads fn, and makes mixes doubly stochastic."""
        return self.channels // (GROUPS * GROUP)

    @property
    def threads(self) -> int:
        return (self.warps + 1) * WARP

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of fn, of one stream and a CTA's channels."""
        return 4 * self.channels + PAD

    @property
    def stream_bytes(self) -> int:
        """Bytes of fn of one stream."""
        return NUMBERS * self.row_bytes

    @property
    def smem_bytes(self) -> int:
        """fn, which stays for all tokens; sums of each warp, of each CTA, twice of the cluster; squares; the rest."""
        sums = SUMS * (self.warps + CLUSTER + 2) + TOKENS * (self.warps + CLUSTER)
        return STREAMS * self.stream_bytes + 4 * sums + 256

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1, "preferred_smem_carveout": 100}  # without it the DSL asks a driver

    def __post_init__(self):
        unit = 2 * CLUSTER * GROUP * GROUPS  # warps add up sums of two at a time, and a thread of theirs has four sums
        if self.hidden % unit or self.warps * WARP < SUMS // 4 or self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"wanted channels in multiples of {unit}, from 2048 to what SMEM holds fn of: {self}")
