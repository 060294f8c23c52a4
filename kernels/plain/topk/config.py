"""Compile-time choices of `indexer_topk`."""

from dataclasses import dataclass

from kernels.lib.launch import WARP

VECTOR = 4  # scores of a load
SAMPLED = 8  # the sample takes one vector of this many
LEAST = 1  # the rank of NaN

THREADS = 256
CTAS = 5  # CTAs of an SM, by what its SMEM holds
WARPS = THREADS // WARP
CAPACITY = 4096  # scores that SMEM holds
MAX_TOPK = CAPACITY // 2  # otherwise the collected scores, somewhat more than topk, would not fit
BINS = 2048  # bins of the guess; `narrow` has one for each thread
COARSE = 4  # a bin with more than this part of what is wanted is too coarse for a guess, and is split
VECTORS = 4  # vectors that a thread loads at a time
AT_A_TIME = WARP * VECTOR * VECTORS  # scores of a warp's load
SMEM_BYTES = 4 * (2 * CAPACITY + BINS + 2 * WARPS + 4)


CLUSTER = 8  # CTAs that share a row; every Hopper GPU runs clusters of so many
SHARED_THREADS = 512
SHARED_WARPS = SHARED_THREADS // WARP
MOST_VECTORS = 16  # of a thread that SMEM holds: longer rows take several rounds
AT_ONCE = 8  # of them that a thread loads at a time
STEPS, BUCKETS = 4, 256  # of a radix select by 8 bits
COPIES = 8  # of a histogram in SMEM, so that fewer lanes of a warp count at one address


@dataclass(frozen=True)
class Config:
    """Facts that a caller must know."""

    tile_m: int = 1  # rows of a CTA
    tile_n: int = CAPACITY
    threads: int = THREADS
    smem_bytes: int = SMEM_BYTES
    cluster: int = 1  # CTAs of a row
    ctas: int = CTAS

    @property
    def launch_options(self) -> dict[str, int]:
        return {"min_blocks_per_mp": self.ctas, "preferred_smem_carveout": 100}  # without it the DSL asks a driver


@dataclass(frozen=True)
class SharedConfig(Config):
    """The choices where the CTAs of a cluster share a row."""

    threads: int = SHARED_THREADS
    smem_bytes: int = 4 * (
        VECTOR * SHARED_THREADS * MOST_VECTORS + BUCKETS * (COPIES + STEPS) + 2 * 2 * SHARED_WARPS + 4
    )
    cluster: int = CLUSTER
    ctas: int = 1
