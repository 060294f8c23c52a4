"""Compile-time choices of `moe_router`, and the sizes that follow."""

from dataclasses import dataclass

from kernels.abi import ROUTED_AT_ONCE
from kernels.lib.launch import SMEM_LIMIT, WARP

PARTS = 8  # of k, each of a CTA: a cluster
WARPS = 8
BLOCK = 16  # experts of a product, two to a lane
UNIT = 64  # of k at a time
STEPS = UNIT // 16  # products that cover a unit
TOGETHER = 2  # of these products that add up by themselves
CHUNK = 4  # experts next to one another that a lane finishes
AT_ONCE = 2 * CHUNK  # experts whose sums it asks for before it waits
MOST_EXPERTS = 512
MOST_CHOSEN = WARP  # a lane has one


@dataclass(frozen=True)
class Config:
    dtype: str  # of x
    max_rows: int

    @property
    def tile_m(self) -> int:
        """Tokens of a cluster: many of a prompt, whose clusters read the gate again and again from L2."""
        return 16 if self.max_rows <= ROUTED_AT_ONCE else 64

    @property
    def tile_n(self) -> int:
        return BLOCK

    @property
    def depth(self) -> int:
        """Units of the gate that a lane has in registers, asked for or there."""
        return 4 if self.tile_m == 16 else 2

    @property
    def rows_of_cta(self) -> int:
        """Tokens that a CTA of a cluster finishes."""
        return self.tile_m // PARTS

    @property
    def of_lane(self) -> int:
        """Experts of a lane that finishes a token."""
        return MOST_EXPERTS // WARP

    @property
    def threads(self) -> int:
        return WARPS * WARP

    @property
    def smem_bytes(self) -> int:
        """x and sums: how much of it there is follows from k and the number of experts."""
        return SMEM_LIMIT

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": 1, "preferred_smem_carveout": 100}  # without it the DSL asks a driver
