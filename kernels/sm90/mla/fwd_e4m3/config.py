"""Compile-time choices of `mla_fwd_e4m3_sm90`, and the sizes that follow from them."""

from dataclasses import dataclass
from functools import cached_property

from kernels.lib.launch import SMEM_LIMIT, WARPGROUP, registers_at_launch
from kernels.lib.rows import PUBLISHED


@dataclass(frozen=True)
class Config:
    d: int
    dtype: str  # of q and o
    sources: tuple[str, ...]  # "span" or "selection", in the order in which they are taken; keys of all are gathered
    tile_m: int = 64
    tile_n: int = 64
    stages_k: int = 5
    stages_p: int = 4
    shared_kv: bool = True
    gathers: bool = True
    cluster: int = 1

    threads = 4 * WARPGROUP  # a producer, the scores, and two halves of O's columns
    registers = (40, 104, 184)  # of a thread, in that order
    launch_options = {"min_blocks_per_mp": 1}  # noqa: RUF012

    @property
    def half(self) -> int:
        return self.d // 2

    @property
    def words(self) -> int:
        """Numbers of two bytes in a key, which `Selection` copies."""
        return self.d // 2

    @cached_property
    def smem_bytes(self) -> int:
        tiles = self.d * (self.tile_m + self.stages_k * self.tile_n) + self.stages_p * self.tile_m * self.tile_n
        numbers = 4 * (self.stages_p * (self.tile_m + WARPGROUP // 32) + 2 * self.tile_m)
        infos = 16 + 4 * 2 * PUBLISHED * (1 + len(self.sources))
        return tiles + numbers + infos + 8 * 2 * (self.stages_k + self.stages_p + 2 + 2)

    def __post_init__(self):
        if self.d != 512:  # half of it is four products of 64 columns, whose sums fill a thread's registers
            raise ValueError(f"d must be 512, got {self.d}")
        producer, scores, products = self.registers
        if producer + scores + 2 * products > 4 * registers_at_launch(self.threads):
            raise ValueError(f"a launch has too few registers for {self.registers}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
