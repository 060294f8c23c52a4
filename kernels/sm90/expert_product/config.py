"""Compile-time choices of `expert_product`, and the sizes that follow."""

from dataclasses import dataclass

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP, element_type
from kernels.lib.rows import ROWS_OF_WARPGROUP
from kernels.lib.wgmma import SLAB

CONSUMERS = 2  # warpgroups that multiply, 64 rows of a tile of results each


@dataclass(frozen=True)
class Config:
    dtype: str  # of all arrays
    form: str  # of `kernels.abi.ExpertProduct`

    tile_m: int = CONSUMERS * ROWS_OF_WARPGROUP  # rows of a tile of results
    tile_n: int = 256  # its columns

    @property
    def is_outer(self) -> bool:
        return self.form == "outer"

    @property
    def is_turned(self) -> bool:
        """True if matrices are read along their rows."""
        return self.form in ("turned", "gated_back")

    @property
    def box_a(self) -> tuple[int, int]:
        """Rows and columns of a stage's part of a, as they lie in memory."""
        return (SLAB, self.tile_m) if self.is_outer else (self.tile_m, SLAB)

    @property
    def box_b(self) -> tuple[int, int]:
        """The same of b."""
        return (SLAB, self.tile_n) if self.is_outer or self.is_turned else (self.tile_n, SLAB)

    @property
    def boxes_b(self) -> int:
        """The boxes of b's rows that TMA loads: of gates, and of up projections."""
        return 2 if self.form == "gated" else 1

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * SLAB * element_type(self.dtype).width // 8

    @property
    def stages(self) -> int:
        """As many as there is room for."""
        return (SMEM_LIMIT - 1024) // (self.stage_bytes + 16)

    @property
    def threads(self) -> int:
        """Consumers, and a warpgroup of which one warp loads."""
        return (CONSUMERS + 1) * WARPGROUP

    @property
    def smem_bytes(self) -> int:
        return 1024 + self.stages * (self.stage_bytes + 16)

    @property
    def registers(self) -> tuple[int, int]:
        """The registers of a loader's thread and of a consumer's."""
        return 40, 232

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1}
