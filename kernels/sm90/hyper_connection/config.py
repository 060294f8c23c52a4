"""Compile-time choices of `hyper_connection` and of its gradient, and the sizes that follow."""

from dataclasses import dataclass
from typing import ClassVar

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


MOST_ITERATIONS = 32  # that the gradient walks back: it keeps the sums of each
ROW = NUMBERS + 8  # float32 numbers of a token that its kernels hand on
KEPT = 2 * MOST_ITERATIONS * STREAMS * STREAMS  # float32 numbers of a warp: sums of each entry, and a place for others
SHARES = STREAMS + STREAMS * STREAMS  # of a token: of the gradients of post and of mix
ROWS = 2 + 2 * STREAMS  # of a token's channels that a lane fetches: y, dz, and of each stream x and dx'
PARTS = 16  # CTAs that share out the channels


@dataclass(frozen=True)
class NumbersConfig:
    """The choices of the gradient's kernel that has a warp for each token."""

    dtype: str
    hidden: int

    warps = tile_m = 8  # tokens
    tile_n = MOST_ITERATIONS
    threads = warps * WARP
    step = WARP * VECTOR  # channels of a warp at a time
    smem_bytes = 4 * warps * KEPT
    launch_options: ClassVar[dict[str, int]] = {"min_blocks_per_mp": 4, "preferred_smem_carveout": 75}

    def __post_init__(self):
        if self.hidden % self.step:
            raise ValueError(f"wanted channels in multiples of {self.step}: {self}")


@dataclass(frozen=True)
class StreamsConfig:
    """The choices of the gradient's kernel that makes those of the streams: a CTA has a part of the channels, and a
    warp GROUP of them."""

    dtype: str
    hidden: int

    tile_m = TOKENS
    tile_n = NUMBERS
    launch_options: ClassVar[dict[str, int]] = {"min_blocks_per_mp": 1, "preferred_smem_carveout": 100}

    @property
    def channels(self) -> int:
        """Channels of a CTA."""
        return self.hidden // PARTS

    @property
    def warps(self) -> int:
        return self.channels // GROUP

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of fn, of one stream: then no two of eight lanes that read 16 bytes meet in a bank."""
        return 4 * self.channels + 2 * PAD

    @property
    def stream_bytes(self) -> int:
        return NUMBERS * self.row_bytes

    @property
    def share_bytes(self) -> int:
        """Bytes of all warps' parts of the shares of a tile's tokens."""
        return 4 * self.warps * TOKENS * SHARES

    @property
    def fetched_bytes(self) -> int:
        """Bytes of a warp's channels of a tile."""
        return TOKENS * ROWS * 2 * GROUP

    @property
    def smem_bytes(self) -> int:
        """fn, which stays for all tokens; shares, of two tiles; what is fetched."""
        return STREAMS * self.stream_bytes + 2 * self.share_bytes + self.warps * self.fetched_bytes + 64

    def __post_init__(self):
        fits = self.threads >= TOKENS * SHARES // 4 and self.smem_bytes <= SMEM_LIMIT
        if self.hidden % (PARTS * GROUP) or not fits:
            raise ValueError(f"wanted channels in multiples of {PARTS * GROUP}, from 1536 to what SMEM holds: {self}")
