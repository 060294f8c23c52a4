"""Compile-time choices of `mla_bwd_sm100`, and the tiles, counts, columns and sizes that follow from them."""

from dataclasses import dataclass

from kernels.abi import gathers
from kernels.lib.cluster import CLUSTER
from kernels.lib.launch import SMEM_LIMIT
from kernels.lib.rows import PUBLISHED, WARP
from kernels.lib.tcgen05 import COLUMNS, LANES
from kernels.lib.wgmma import SLAB

SCORE_WARPS = 8  # of which half finish P and dS of the CTA's own rows, and half give away what the peer's rows need
ADDING_WARPS = 4  # that add dKV to memory
LOADER_WARPS = 2
HALVES = 2  # of a CTA's columns: in which K comes and goes, and in which dKV is made
LISTS = 3  # of the keys of a tile


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count, column and size follows from them."""

    dtype: str
    sources: tuple[str, ...]  # kinds of the sources, in the order in which the kernel takes them: "span" or "selection"
    d: int = 512
    tile_m: int = 64  # rows that a CTA of a pair finishes; its products have those of both
    tile_n: int = 64

    @property
    def gathers(self) -> bool:
        """True if the keys differ from query to query: then a tile holds heads of one query only."""
        return gathers(self.sources)

    @property
    def cluster(self) -> int:
        """CTAs that take the same rows and keys, each with its part of all columns."""
        return CLUSTER

    @property
    def rows(self) -> int:
        return self.cluster * self.tile_m

    @property
    def columns(self) -> int:
        return self.d // self.cluster

    @property
    def half(self) -> int:
        """Columns of a half of the CTA's."""
        return self.columns // HALVES

    @property
    def threads(self) -> int:
        return WARP * (SCORE_WARPS + ADDING_WARPS + LOADER_WARPS + 1)

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}

    @property
    def keys_per_thread(self) -> int:
        """Keys of a tile of which a thread has the scores of a row."""
        return self.tile_n * self.rows // (SCORE_WARPS * WARP)

    # Columns of TMEM.

    @property
    def s_column(self) -> int:
        return self.columns  # after dQ

    @property
    def dp_column(self) -> int:
        return self.s_column + self.tile_n

    @property
    def dkv_column(self) -> int:
        """dKV' of half of the columns: a lane has one, for all keys."""
        return self.dp_column + self.tile_n

    @property
    def q_column(self) -> int:
        """The first half of Q's columns, two in 32 bits."""
        return self.dkv_column + self.tile_n

    @property
    def tmem_columns(self) -> int:
        return self.q_column + self.half // 2

    # Bytes of shared memory.

    @property
    def row_slab_bytes(self) -> int:
        """A slab of Q, dO, P or dS."""
        return self.rows * SLAB * 2

    @property
    def key_slab_bytes(self) -> int:
        return self.tile_n * SLAB * 2

    @property
    def partial_bytes(self) -> int:
        """The bytes of S, or dP, that a CTA needs from its peer."""
        return 4 * self.tile_m * self.tile_n

    @property
    def finished_bytes(self) -> int:
        """P, or dS, of a CTA's rows."""
        return 2 * self.tile_m * self.tile_n

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * (2 * self.rows * self.columns + self.tile_n * self.columns + 2 * self.rows * self.tile_n)
        small = 4 * (LISTS * self.tile_n + 2 * PUBLISHED * (1 + len(self.sources)) + 4)
        barriers = 8 * sum(count for count, _ in self.barriers)
        return 1024 + tiles + 2 * self.partial_bytes + small + barriers

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """(how many, arrivals in a phase), in the order in which they lie in memory. Warps arrive once each, loading
        threads each for themselves."""
        return (
            (2, 1),  # info_full
            (2, SCORE_WARPS + ADDING_WARPS + 1),  # info_empty
            (2, WARP * LOADER_WARPS),  # rows_full
            (1, 1),  # rows_empty
            (HALVES, WARP * LOADER_WARPS),  # key_full
            (1, 1),  # key_empty
            (LISTS, WARP * LOADER_WARPS),  # listed
            (2, 1),  # s_full, dp_full
            (1, SCORE_WARPS),  # s_empty
            (2, 1),  # given_full
            (1, SCORE_WARPS // 2),  # given_empty
            (2, SCORE_WARPS // 2),  # p_full, of P and of dS
            (2, self.cluster),  # p_empty
            (1, SCORE_WARPS),  # q_full
            (1, 1),  # dkv_full
            (1, ADDING_WARPS),  # dkv_empty
            (1, 1),  # dq_full
        )

    def __post_init__(self):
        if self.rows != LANES or self.half != LANES:
            raise ValueError(f"products have {LANES} rows, got {self.rows}, and {self.half} columns of dKV: {self}")
        if self.tmem_columns > COLUMNS:
            raise ValueError(f"needs {self.tmem_columns} columns of TMEM, there are {COLUMNS}: {self}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
