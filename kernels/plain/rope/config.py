"""Compile-time choices of `rope`, `rope_hadamard`, `norm_rope` and `norm_rope_bwd`, and the counts that follow."""

from dataclasses import dataclass

from kernels.lib.rows import WARP

VECTOR = 8  # numbers of 16 bits in a load
INDEX_D = 128  # numbers of a row that the Hadamard transform takes


@dataclass(frozen=True)
class Config:
    dtype: str
    dims: int  # the last numbers of a row, which are rotated
    d: int = 0  # numbers of a normalised row; without a norm, known when the kernel runs
    gradient: bool = False
    hadamard: bool = False
    threads: int = 256
    smem_bytes: int = 0

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return WARP if self.d else (INDEX_D if self.hadamard else self.dims) // VECTOR

    @property
    def at_once(self) -> int:
        """Rows that a CTA has at a time."""
        return self.threads // self.lanes

    @property
    def tile_n(self) -> int:
        """Rows of a lane."""
        return 2 if self.gradient else 4

    @property
    def tile_m(self) -> int:
        """Rows of a CTA."""
        return self.at_once * self.tile_n

    @property
    def chunks(self) -> int:
        """Chunks of a normalised row that a lane has."""
        return self.d // (WARP * VECTOR)

    @property
    def launch_options(self) -> dict[str, int]:
        return {}

    def __post_init__(self):
        if self.dims % (2 * VECTOR) or self.dims > WARP * VECTOR or WARP % (self.dims // VECTOR):
            raise ValueError(f"dims must divide {WARP * VECTOR} and be a multiple of {2 * VECTOR}, got {self.dims}")
        if self.d % (WARP * VECTOR):
            raise ValueError(f"d must be a multiple of {WARP * VECTOR}, got {self.d}")
