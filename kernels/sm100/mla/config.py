"""Compile-time choices of `mla_fwd_sm100`, and the tiles, counts, columns and sizes that follow from them."""

from dataclasses import dataclass

from kernels.abi import gathers
from kernels.lib.launch import SMEM_LIMIT, WARPGROUP, registers_at_launch
from kernels.lib.rows import PUBLISHED, WARP
from kernels.lib.tcgen05 import COLUMNS
from kernels.lib.wgmma import SLAB
from kernels.packings import PACKED

SOFTMAX_WARPS = 4
ROW_WARPS = 4  # that bring Q into TMEM, and O out of it
RAILS = 2  # halves of Q's columns, one above the other in TMEM's lanes
BUFFERS = 2  # of scores, and of P
UNPACKING_WARPS = 4
RESCALED_ABOVE = 6.0  # in powers of two: how far a maximum may rise before O is rescaled


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count, column and size follows from them."""

    dtype: str
    sources: tuple[
        str, ...
    ]  # kinds of the sources, in the order in which the kernel walks them: "span", "selection" or one of PACKED
    cluster: int  # CTAs that share the keys of their rows: a pair, or one
    d: int = 512

    @property
    def gathers(self) -> bool:
        """True if the keys differ from query to query: then a tile holds heads of one query only."""
        return gathers(self.sources)

    @property
    def unpacks(self) -> bool:
        """True if warps unpack what they gather; then all keys are packed."""
        return self.sources[0] in PACKED

    @property
    def shared_kv(self) -> bool:
        return True

    @property
    def tile_m(self) -> int:
        """Rows of a CTA."""
        return 64

    @property
    def tile_n(self) -> int:
        return 64

    @property
    def stages(self) -> int:
        """The number of tiles of keys in the ring: as many as fit."""
        return 6 if self.cluster == 2 else 3

    @property
    def tiles_ahead(self) -> int:
        """The number of tiles of keys that scores run ahead of P V: so many have to be there beside the tile of P V."""
        return min(BUFFERS, self.stages - 2)

    @property
    def columns_k(self) -> int:
        """Columns of a key that a CTA loads."""
        return self.d // self.cluster

    @property
    def loader_warps(self) -> int:
        """One issues TMA; where keys are gathered, each lane of as many as needed has a key; others unpack."""
        if self.unpacks:
            return UNPACKING_WARPS
        return self.tile_n // WARP if self.gathers else 1

    @property
    def teams(self) -> int:
        """The number of teams of warps that load; they take tiles by turns."""
        return self.cluster if self.unpacks else 1

    @property
    def team(self) -> int:
        """Threads that load a tile."""
        return WARP * self.loader_warps // self.teams

    def before_turn(self, fill, thread):
        """Counts the fills that come, after so many, before the one that this thread's team makes."""
        return (thread // self.team + fill) % self.teams

    @property
    def lanes_a_key(self) -> int:
        """Lanes that unpack a key."""
        return 4

    def slabs_of(self, rank: int) -> tuple[range, ...]:
        """Those of a key that a CTA unpacks, by halves of a key: as many as one load brings the scales of."""
        half = self.columns_per_lane // SLAB
        halves = tuple(range(first, first + half) for first in (0, half))
        return halves if self.cluster == 1 else halves[rank : rank + 1]

    @property
    def threads(self) -> int:
        """The threads of a CTA; where registers are shared out among warpgroups, the last one has idle warps."""
        warps = self.mma_warp + 1
        return WARP * (-(-warps // 4) * 4 if self.unpacks else warps)

    @property
    def mma_warp(self) -> int:
        return SOFTMAX_WARPS + ROW_WARPS + self.loader_warps

    @property
    def registers_at_launch(self) -> int:
        return registers_at_launch(self.threads)

    @property
    def registers(self) -> tuple[int, int, int, int]:
        """Registers of a thread of the softmax, of rows, loading and products; 0 where they keep what they begin with.

        Where threads hold packed keys, all get what four warpgroups have at launch, shared out anew.
        """
        return (152, 152, 144, 64) if self.unpacks else (0, 0, 0, 0)

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}

    @property
    def keys_per_thread(self) -> int:
        """Keys of a tile whose probabilities a thread of the softmax computes: those of one of a row's two threads."""
        return self.tile_n // RAILS

    @property
    def columns_per_lane(self) -> int:
        """Columns of Q, and of O, that are in a lane of TMEM."""
        return self.d // RAILS

    # Columns of TMEM.

    @property
    def q_column(self) -> int:
        return self.columns_per_lane  # after O

    @property
    def scores_column(self) -> int:
        return self.q_column + self.columns_per_lane // 2

    @property
    def columns(self) -> int:
        return self.scores_column + BUFFERS * self.tile_n

    # Bytes of shared memory.

    @property
    def slab_bytes(self) -> int:
        """A slab of a tile of keys."""
        return self.tile_n * SLAB * 2

    @property
    def stage_bytes(self) -> int:
        return self.columns_k // SLAB * self.slab_bytes

    @property
    def slabs_together(self) -> int:
        """Slabs from one slab of a rail of keys to the next: where a CTA has whole keys, the rails take turns."""
        return RAILS // self.cluster

    def slab_of(self, slab: int) -> int:
        """Returns the place in a tile of keys, counted in slabs, of a slab of a CTA's columns."""
        rail, column = divmod(slab, self.columns_per_lane // SLAB)
        return slab if self.cluster == 2 else column * RAILS + rail

    @property
    def half_bytes(self) -> int:
        """The bytes from the columns of V for O's first columns in TMEM to those for the rest."""
        return self.slab_bytes if self.cluster == 1 else self.stage_bytes // 2

    def column_of(self, part, column):
        """The column of O that is in this column of TMEM, for the lanes of a part; all are multiples of 64."""
        if self.cluster == 2:
            return part * self.columns_per_lane + column
        quarter = self.d // 4
        return column // quarter * self.columns_per_lane + part * quarter + column % quarter

    @property
    def p_bytes(self) -> int:
        """P of a tile of keys, which is a slab."""
        return self.tile_m * self.tile_n * 2

    @property
    def exchange_words(self) -> int:
        """Partial scores that the two threads of each row give to each other."""
        return WARPGROUP * self.keys_per_thread

    @property
    def smem_bytes(self) -> int:
        small = 4 * (2 * PUBLISHED * (1 + len(self.sources)) + 2 * WARPGROUP + self.tile_m + 4)
        barriers = 8 * sum(count for count, _ in self.barriers)
        tiles = self.stages * self.stage_bytes + BUFFERS * self.p_bytes + 4 * self.exchange_words
        return 1024 + tiles + small + barriers

    @property
    def barriers(self) -> tuple[tuple[int, int], ...]:
        """(how many, arrivals in a phase), in the order in which they lie in memory.

        Warps arrive once each. Where the MMA warp of a pair waits, the warps of both CTAs arrive; for keys that warps
        have unpacked, those of its own CTA, and the MMA warp of the other.
        """
        return (
            (2, 1),  # info_full
            (2, SOFTMAX_WARPS + 1),  # info_empty
            (self.stages, self.team // WARP if self.unpacks else 1),  # key_full
            (self.stages, 1),  # key_empty
            (1, ROW_WARPS * self.cluster),  # q_full
            (1, 1),  # q_empty
            (BUFFERS, 1),  # s_full
            (BUFFERS, SOFTMAX_WARPS * self.cluster),  # p_full
            (BUFFERS, 1),  # p_empty
            (1, ROW_WARPS * self.cluster),  # o_empty
            (1, SOFTMAX_WARPS),  # factor_full
            (1, ROW_WARPS),  # factor_empty
            (self.stages if self.unpacks and self.cluster == 2 else 0, 1),  # peer_full
        )

    def __post_init__(self):
        if sum(self.registers) > self.threads // WARPGROUP * self.registers_at_launch:
            raise ValueError(
                f"a launch gives {self.registers_at_launch} registers a thread, too few for {self.registers}"
            )
        if self.cluster == 1 and not self.gathers:
            raise ValueError(f"spans are for pairs of CTAs: {self}")
        if self.stages % self.teams:
            raise ValueError(f"a stage is always filled by the same team: {self}")
        if self.columns > COLUMNS:
            raise ValueError(f"needs {self.columns} columns of TMEM, there are {COLUMNS}: {self}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
