"""Compile-time choices of `hyper_connection`, and the sizes that follow."""

from dataclasses import dataclass

from kernels.lib.launch import WARP

STREAMS = 4
NUMBERS = (2 + STREAMS) * STREAMS  # of a token: how its streams go into a sublayer, out of it and past it
TOKENS = 16  # of a cluster: the rows of a warp's product
CLUSTER = 8  # CTAs, which share out the channels
VECTOR = 8  # channels of a lane: 16 bytes
GROUP = 4 * VECTOR  # channels of the quad that shares a row of a product
MOST_WARPS = 16  # that have channels
PITCH = 28  # float32 numbers from one token's sums to the next: its numbers, its sum of squares, and a gap


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
    def groups(self) -> int:
        """Groups of channels of a warp."""
        return 1 if self.channels <= MOST_WARPS * GROUP else 2

    @property
    def at_once(self) -> int:
        """Pairs of channels that a lane mixes at a time, of all streams: fewer where x' takes more registers."""
        return VECTOR // 2 // self.groups

    @property
    def warps(self) -> int:
        """Warps that have channels; one more makes mixes doubly stochastic meanwhile."""
        return self.channels // (self.groups * GROUP)

    @property
    def threads(self) -> int:
        return (self.warps + 1) * WARP

    @property
    def smem_bytes(self) -> int:
        """The sums of each warp, of each CTA and of the cluster; squares of the same; barriers."""
        return 4 * TOKENS * (PITCH + 1) * (self.warps + CLUSTER + 1) + 64

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1, "preferred_smem_carveout": 100}  # without it the DSL asks a driver

    def __post_init__(self):
        unit = CLUSTER * GROUP * self.groups
        if self.hidden % unit or self.warps > MOST_WARPS:
            raise ValueError(f"wanted channels in multiples of {unit}, for at most {MOST_WARPS} warps: {self}")
