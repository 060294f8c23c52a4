"""Compile-time choices of `combine`."""

from dataclasses import dataclass

AT_ONCE = 5  # splits whose parts a thread loads at once
FOR_MAXIMUM = 8  # splits whose lse it loads at once, where there are many
CTAS = 9  # of an SM: the registers that this leaves are enough


@dataclass(frozen=True)
class Config:
    dtype: str  # dtype of o
    threads: int = 128
    smem_bytes: int = 0
    tile_m: int = 1  # rows and
    tile_n: int = 4  # columns of a thread

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": CTAS, "preferred_smem_carveout": 100}  # without it the DSL asks a driver
