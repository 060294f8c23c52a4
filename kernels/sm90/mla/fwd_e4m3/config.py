"""Compile-time choices of `mla_fwd_e4m3_sm90`, and the sizes that follow from them."""

from dataclasses import dataclass
from functools import cached_property

from kernels.abi import UNIT_BYTES
from kernels.lib.launch import SMEM_LIMIT, WARPGROUP, registers_at_launch
from kernels.lib.rows import PUBLISHED
from kernels.lib.wgmma import SLAB


@dataclass(frozen=True)
class Config:
    d: int
    dtype: str  # of q and o
    sources: tuple[str, ...]  # "span" or "selection", in the order in which they are taken; keys of all are gathered
    rope: int = 0  # the last dimensions, whose part of scores is of bfloat16
    tile_m: int = 64
    tile_n: int = 64
    stages_q: int = 2
    shared_kv: bool = True
    gathers: bool = True
    cluster: int = 1

    threads = 4 * WARPGROUP  # producers, the scores, and two halves of O's columns
    warps_of_q = 2  # of four producers; the others gather keys
    registers = (32, 112, 184)  # of a thread, in that order
    launch_options = {"min_blocks_per_mp": 1}  # noqa: RUF012

    @property
    def half(self) -> int:
        return self.d // 2

    @property
    def stages_k(self) -> int:
        """Places for tiles of keys, and for P: as many as SMEM holds."""
        return 3 if self.rope else 4

    @property
    def staged(self) -> int:
        """Rows of q that a warp has under way."""
        return 4 if self.rope else 8

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in SMEM, of keys and of q: codes, and RoPE's numbers."""
        return self.d + 2 * self.rope

    @property
    def key_bytes(self) -> int:
        """The bytes of a key, which its unit ends."""
        return self.row_bytes + UNIT_BYTES

    @property
    def words(self) -> int:
        """Numbers of two bytes in a key, which `Selection` counts."""
        return self.key_bytes // 2

    @property
    def unit(self) -> int:
        """The place of a key's unit among these."""
        return self.row_bytes // 2

    @cached_property
    def smem_bytes(self) -> int:
        rows = self.row_bytes * (self.stages_q * self.tile_m + self.stages_k * self.tile_n)
        tiles = rows + self.tile_m * self.stages_k * self.tile_n
        given = 2 * self.d * self.staged * self.warps_of_q
        numbers = 4 * (self.stages_k * (self.tile_m + WARPGROUP // 32) + 2 * 2 * self.tile_m)
        of_keys = -(-8 * self.stages_k // 16) * 16 + 2 * self.tile_n * self.stages_k
        infos = of_keys + 4 * 2 * (1 + PUBLISHED) + 16  # with what 16-byte alignment adds
        return tiles + given + numbers + infos + 8 * (2 * (self.stages_q + self.stages_k + 2 + 2) + self.stages_k)

    def __post_init__(self):
        if self.rope not in (0, SLAB):
            raise ValueError(f"RoPE's numbers are a slab, {SLAB}, or none, got {self.rope}")
        if self.d != 512:  # half of it is four products of 64 columns, whose sums fill a thread's registers
            raise ValueError(f"d must be 512, got {self.d}")
        producer, scores, products = self.registers
        if producer + scores + 2 * products > 4 * registers_at_launch(self.threads):
            raise ValueError(f"a launch has too few registers for {self.registers}")
        if self.smem_bytes > SMEM_LIMIT:
            raise ValueError(f"needs {self.smem_bytes} bytes of SMEM, {SMEM_LIMIT} fit: {self}")
