"""Compile-time choices of `kv_insert`, and the counts that follow from them."""

from dataclasses import dataclass

from kernels.lib.rows import WARP
from kernels.packings import CACHED, ROPE, Packing

COLUMNS = 4  # that a thread pools
AT_ONCE = 4  # tokens that a thread loads at once
PARTS = 3  # numbers of a column: the greatest score, the sum of weights, and the sum of weights times kv


@dataclass(frozen=True)
class Config:
    dtype: str  # of an entry's numbers, which are rounded to it after each step
    d: int  # numbers of an entry that the norm covers
    packing: str = ""  # of `CACHED`; "" where the cache holds numbers of dtype
    pooled: bool = False  # whether an entry pools a block of tokens; else each token is one
    hadamard: bool = False
    running: bool = False  # whether tokens leave sums behind; a thread then has one column of kv and of scores
    rope: bool = False  # whether RoPE's numbers follow those, without a norm; else they are the last of them
    tile_n: int = 1

    @property
    def threads(self) -> int:
        """A CTA pools the blocks of a sequence, with as many threads as columns; or it has a token a warp."""
        return self.d if self.pooled else 4 * WARP

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def tile_m(self) -> int:
        """Sequences of a CTA, or tokens."""
        return 1 if self.pooled else self.warps

    @property
    def lanes(self) -> int:
        """Threads that together have all columns of a token."""
        return self.d // COLUMNS

    @property
    def groups(self) -> int:
        """Tokens that the CTA pools at a time."""
        return self.threads // self.lanes

    @property
    def smem_bytes(self) -> int:
        """The groups' parts of every column, if there are groups, and the entry."""
        parts = 0 if self.running else PARTS * self.groups
        return 4 * self.d * (parts + 1) if self.pooled else 0

    @property
    def numbers(self) -> int:
        """Numbers of an entry under its norm that a lane has; they are neighbours."""
        return self.d // WARP

    @property
    def after(self) -> int:
        """Numbers that a lane has of those after them."""
        return ROPE // WARP if self.rope else 0

    @property
    def entry(self) -> int:
        """Numbers of an entry."""
        return self.d + self.after * WARP

    @property
    def layout(self) -> Packing | None:
        return CACHED[self.packing] if self.packing else None

    @property
    def launch_options(self) -> dict[str, int]:
        return {}

    def __post_init__(self):
        if self.d % (COLUMNS * WARP) or ROPE % self.numbers:
            raise ValueError(f"d must be a multiple of {COLUMNS * WARP} up to {ROPE * WARP}, got {self.d}")
        if self.rope and (self.pooled or self.hadamard):
            raise ValueError("RoPE's numbers follow those of a token alone, and are not transformed")
