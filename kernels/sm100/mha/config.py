"""Compile-time choices of `mha_fwd_sm100`, and the tiles, counts, columns and sizes that follow from them."""

from dataclasses import dataclass
from typing import ClassVar

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP, registers_at_launch
from kernels.lib.rows import PUBLISHED
from kernels.lib.tcgen05 import COLUMNS, LANES
from kernels.lib.wgmma import SLAB

WARPS = 4  # of a group: as many as share all lanes of TMEM
P_BUFFERS = 2  # one for each tile of rows, or for every other tile of keys
RESCALED_ABOVE = 8.0  # in powers of two: how far a maximum may rise before O is rescaled


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count, column and size follows from them."""

    d: int
    dtype: str

    sources: ClassVar[tuple[str, ...]] = ("span",)
    shared_kv: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    @property
    def cluster(self) -> int:
        """CTAs that share keys: a pair, each of which loads half of every tile, or one."""
        return 2 if self.d > 128 else 1

    @property
    def row_tiles(self) -> int:
        """Tiles of 128 rows that take turns in a CTA: the softmax of one runs beside the products of the other."""
        return 2 if self.d <= 128 else 1

    @property
    def tile_m(self) -> int:
        """Rows of a CTA."""
        return self.row_tiles * LANES

    @property
    def keys(self) -> int:
        """The keys of a tile: as many as its product of scores has columns."""
        return 128

    @property
    def tile_n(self) -> int:
        """Keys, or values, that TMA brings at a time. Of a tile of keys each CTA has so many."""
        return self.keys // self.cluster

    @property
    def columns_v(self) -> int:
        """Columns of values that a CTA loads."""
        return self.d // self.cluster

    @property
    def score_buffers(self) -> int:
        """Tiles of rows have their own buffers of scores, or share one."""
        return 2 if self.d == 64 else 1

    @property
    def parts(self) -> tuple[int, ...]:
        """Keys of a tile whose P is given to the products at a time, so that they begin before the rest is there."""
        return (self.keys,) if self.d == 64 else (3 * self.keys // 4, self.keys // 4)

    @property
    def emulated(self) -> int:
        """The number of pairs of exponentials, out of eight, that polynomials give."""
        return 2 if self.row_tiles == 2 else 0  # exp2 is scarce there

    @property
    def groups(self) -> int:
        """Groups of four warps: the softmax of each row tile, the correction of O, loading and multiplying."""
        return self.row_tiles + 2

    @property
    def threads(self) -> int:
        return WARPGROUP * self.groups

    @property
    def registers(self) -> tuple[int, int, int]:
        """The registers of a thread of the softmax, of the correction, and of the others."""
        return (200, 64, 48) if self.row_tiles == 2 else (256, 152, 96)

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}

    @property
    def columns_q(self) -> int:
        return self.d

    # First columns in TMEM, after O.

    @property
    def scores_column(self) -> int:
        return self.row_tiles * self.d

    @property
    def p_column(self) -> int:
        return self.scores_column + self.score_buffers * self.keys

    @property
    def columns(self) -> int:
        return self.p_column + P_BUFFERS * self.keys // 2

    # Bytes of shared memory.

    @property
    def stage_bytes(self) -> int:
        """A CTA's part of a tile of keys, or of values."""
        return self.tile_n * self.d * 2

    @property
    def box_bytes(self) -> int:
        """Values that TMA brings at a time."""
        return self.tile_n * self.columns_v * 2

    @property
    def fixed_bytes(self) -> int:
        small = 4 * (2 * PUBLISHED * (1 + len(self.sources)) + self.tile_m + 2)
        return 1024 + self.tile_m * self.d * 2 + small

    @property
    def stages(self) -> int:
        """The number of stages in the ring of keys and values: as many as fit, with the barriers."""
        return (SMEM_LIMIT - 512 - self.fixed_bytes) // self.stage_bytes

    @property
    def smem_bytes(self) -> int:
        return self.fixed_bytes + self.stages * self.stage_bytes + 8 * sum(count for count, _ in self.barriers)

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """(how many, arrivals in a phase), in the order in which they lie in memory.

        Warps arrive once each. Where the MMA warp of a pair waits, the warps of both CTAs arrive.
        """
        warps = WARPS * self.cluster
        return (
            (2, 1),  # info_full
            (2, WARPS * (self.row_tiles + 1) + 1),  # info_empty
            (1, 1),  # q_full
            (1, 1),  # q_empty
            (self.stages, 1),  # keys_full
            (self.stages, 1),  # keys_empty
            (self.row_tiles, 1),  # s_full
            (self.row_tiles, warps),  # s_empty
            (P_BUFFERS, 2 * warps),  # p_full
            (P_BUFFERS * (len(self.parts) - 1), warps),  # p_more
            (P_BUFFERS, 1),  # p_empty
            (self.row_tiles, WARPS),  # factor_full
            (self.row_tiles, WARPS),  # factor_empty
            (1, 1),  # v_full
        )

    def __post_init__(self):
        if self.d % SLAB or self.d > 256:
            raise ValueError(f"d must be whole slabs of {SLAB}, of at most 256 (one MMA's N): {self}")
        if self.columns > COLUMNS:
            raise ValueError(f"needs {self.columns} columns of TMEM, there are {COLUMNS}: {self}")
        if self.stages < 2:
            raise ValueError(f"has SMEM for {self.stages} stages of keys and values, wanted 2 or more: {self}")
        a, b, c = self.registers
        if (given := self.row_tiles * a + b + c) > self.groups * registers_at_launch(self.threads):
            raise ValueError(f"gives {given} registers to a thread of each group, more than there are: {self}")
