"""Compile-time choices of `mla_few_heads_fwd_sm90`, and the counts and sizes that follow from them."""

from dataclasses import dataclass

from kernels.lib.column_softmax import WARPS
from kernels.lib.launch import SMEM_LIMIT, WARPGROUP
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import SLAB

CTAS_PER_SM = 2


@dataclass(frozen=True)
class Config:
    """Compile-time choices; every tile, count and size follows from them."""

    d: int  # of q and keys
    dtype: str
    sources: tuple[str, ...]  # kinds of the sources, in the order in which the kernel takes them: "span" or "selection"
    tile_m: int  # heads
    d_v: int  # numbers of a value, the first ones of a key
    tile_n: int = 64  # keys: the rows of one WGMMA
    gathers: bool = True
    shared_kv: bool = True
    cluster: int = 1

    @property
    def threads(self) -> int:
        return 2 * WARPGROUP

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers a thread; a launch of two CTAs an SM gives both the same number at first."""
        return 56, 200

    @property
    def smem_limit(self) -> int:
        """A CTA's share of an SM's 228 KiB, 1 KiB of which the system takes."""
        return (SMEM_LIMIT + 1024) // CTAS_PER_SM - 1024

    @property
    def columns_q(self) -> int:
        return self.piece

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": CTAS_PER_SM, "preferred_smem_carveout": 100}  # otherwise the DSL asks the device

    @property
    def piece(self) -> int:
        """Columns of a key tile that are filled and freed together."""
        return 2 * SLAB if self.d % (2 * SLAB) == 0 else SLAB

    @property
    def pieces_of_values(self) -> int:
        return self.d_v // self.piece

    @property
    def pieces(self) -> int:
        return self.d // self.piece

    @property
    def piece_bytes(self) -> int:
        return self.tile_n * self.piece * 2

    @property
    def row_bytes(self) -> int:
        return self.d * 2

    @property
    def bytes_beside_keys(self) -> int:
        infos = -(-PUBLISHED * (1 + len(self.sources)) // 4) * 4  # a multiple of 16 bytes
        small = 4 * (self.tile_m * WARPS + infos + WARPS * self.key_tiles)
        return self.tile_m * self.row_bytes + self.slab_bytes + small + 8 * 2

    @property
    def key_tiles(self) -> int:
        """The greatest number of key tiles with pieces in SMEM."""
        return self.smem_limit // (self.tile_n * self.row_bytes) + 2

    @property
    def stages(self) -> int:
        return (self.smem_limit - self.bytes_beside_keys) // (self.piece_bytes + 2 * 8)

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab of O, and of a tile's P."""
        return self.tile_m * SLAB * 2

    @property
    def slabs_at_a_time(self) -> int:
        """Slabs of O in SMEM at a time: P's place, and what fits beside the keys; the same number each
        time.
        """
        slabs = self.d_v // SLAB
        fit = 1 + (self.smem_limit - self.bytes_with_keys) // self.slab_bytes
        return max(n for n in range(1, slabs + 1) if n <= fit and slabs % n == 0)

    @property
    def bytes_with_keys(self) -> int:
        return self.bytes_beside_keys + self.stages * (self.piece_bytes + 2 * 8)

    @property
    def smem_bytes(self) -> int:
        return self.bytes_with_keys + (self.slabs_at_a_time - 1) * self.slab_bytes

    def __post_init__(self):
        if self.d % self.piece or self.d_v % self.piece or self.tile_n != SLAB:
            raise ValueError(f"wanted d and d_v in pieces of {self.piece} and tiles of {SLAB} keys, got {self}")
        if self.tile_m % 8 or self.d_v * self.tile_m > 512 * 32:
            raise ValueError(f"wanted a multiple of 8 heads, of which O fits into a warpgroup's registers, got {self}")
        if self.stages < self.pieces:
            raise ValueError(f"{self.stages} pieces fit into SMEM, a tile of keys has {self.pieces}: {self}")
