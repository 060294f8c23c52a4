"""Compile-time choices of the kernels of this gradient, and the tiles, counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARP, WARPGROUP, registers_at_launch
from kernels.lib.rows import PUBLISHED

CLEARERS = WARPGROUP - WARP  # threads of `mha_dq` beside the producer's warp
CONSUMERS = 2  # warpgroups of `mha_dkdv` and `mha_dqdkdv`, of 64 keys each


@dataclass(frozen=True)
class BackwardConfig:
    """The part of a kernel that does not depend on what its CTAs walk over; `smem_bytes` does."""

    d: int
    dtype: str

    @property
    def row_columns(self) -> int:
        """Columns of Q and dO that a copy takes."""
        return self.d

    @property
    def key_columns(self) -> int:
        """Columns of K and V that a copy takes."""
        return self.d

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}  # without it ptxas silently drops setmaxnreg

    def __post_init__(self):
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")


@dataclass(frozen=True)
class DqConfig(BackwardConfig):
    """`mha_dq`, whose CTAs walk over tiles of rows."""

    consumers: int = 2  # warpgroups, of 64 rows each
    stages: int = 2  # of K and of V

    @property
    def tile_m(self) -> int:
        return 64 * self.consumers

    @property
    def tile_n(self) -> int:
        return {64: 144, 128: 80, 256: 48}[self.d]

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread."""
        return 24, 240

    @property
    def parts_of_k(self) -> int:
        """Places in SMEM that a tile of K takes."""
        return 1

    @property
    def key_tile_bytes(self) -> int:
        return 2 * self.d * self.tile_n

    @property
    def stages_q(self) -> int:
        """Stages of Q and dO."""
        return 2 if self.smem_with(2) <= SMEM_LIMIT else 1

    @property
    def slots(self) -> int:
        """For the producer's findings about a tile of rows, which are read until its end, long after Q is gone."""
        return 2 * self.stages_q

    @property
    def smem_bytes(self) -> int:
        return self.smem_with(self.stages_q)

    def smem_with(self, stages_q: int) -> int:
        """Bytes of SMEM with this many stages of Q and dO."""
        tiles = stages_q * 2 * 2 * self.d * self.tile_m + 2 * self.stages * self.key_tile_bytes
        return 1024 + tiles + 4 * PUBLISHED * 2 * 2 * stages_q + 8 * (2 * stages_q + 5 * self.stages)


@dataclass(frozen=True)
class KeyTileConfig(BackwardConfig):
    """`mha_dkdv` and `mha_dqdkdv`, whose CTAs own tiles of keys."""

    adds_rows: bool = False  # whether dQ is made too

    @property
    def tile_m(self) -> int:
        """Rows of a step, at most."""
        return 128 if self.adds_rows and self.d == 64 else 64

    @property
    def cluster(self) -> int:
        """CTAs that have the same keys."""
        return 1

    @property
    def consumers_zero(self) -> bool:
        """True if consumers zero rows of Q and dO that see nothing, and no row warp does."""
        return False

    @property
    def row_warps(self) -> int:
        """Warps that publish the numbers of a step's rows, 64 each."""
        return -(-self.tile_m // 64)

    @property
    def rows_of_lane(self) -> int:
        return self.tile_m // self.row_warps // WARP

    @property
    def publishers(self) -> int:
        """Steps that warps publish at a time: the producer's warpgroup has three to spare. No more than stages: a warp
        that waits for a stage two rounds ahead would take the parity of the round before for its own."""
        return 1 if self.adds_rows else min(3, self.stages)

    @property
    def rows_at_once(self) -> tuple[tuple[int, ...], ...]:
        """Which of its two rows a lane loads at once. Beside additions to memory other ways were
        8 % slower (docs/lab/backward.md)."""
        return ((0,), (1,)) if self.adds_rows and self.d == 128 else ((0, 1),)

    @property
    def groups(self) -> int:
        """Groups of keys, each with its flags SEES and HIDES."""
        return 1 if self.adds_rows else self.tile_n // 64

    @property
    def by_role(self) -> bool:
        """True if one warpgroup has dV and the other dK of all keys, instead of both for half of the keys."""
        return self.d > 128

    @property
    def tile_n(self) -> int:
        return 64 if self.by_role else 64 * CONSUMERS

    @property
    def stages(self) -> int:
        """Stages of Q and dO."""
        return 2 if self.by_role else 3 if self.adds_rows else 4

    @property
    def stages_of_rows(self) -> tuple[int, int]:
        """Places in SMEM for Q, and for dO."""
        return self.stages, self.stages

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + CONSUMERS)

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread."""
        return (40, 232) if self.by_role else (24, 240)

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * 2 * self.d * (self.tile_n + self.stages * self.tile_m)
        tiles += 2 * 2 * self.tile_n * self.tile_m * self.adds_rows
        rows = 4 * self.stages * self.tile_m * (5 + self.adds_rows) + 4 * self.tile_n * self.tile_m * self.by_role
        rows += 4 * 4 * self.tile_m
        small = 4 * (self.stages * self.row_warps + 2 * self.threads // WARP)
        small += 4 * (self.tile_n // WARP * self.threads // WARP) * self.adds_rows
        small += 8 * (3 + 4 * self.adds_rows + 3 * self.stages)
        return 1024 + tiles + rows + small + 64

    def __post_init__(self):
        super().__post_init__()
        producer, consumer = self.registers
        if producer + CONSUMERS * consumer > (1 + CONSUMERS) * registers_at_launch(self.threads):
            raise ValueError(f"setmaxnreg would wait for ever for registers that a CTA does not have: {self}")
