"""Rates and latencies of a chip, in clocks of an SM. Every number stands here once, with its source.

GUIDE is the CUDA programming guide's table of arithmetic throughput. SASS is what ptxas writes into our own cubins: the
clocks that an instruction makes its warp wait. H200 is a measurement of our kernels (docs/h200_kernels.json, docs/lab).
MICRO is github.com/SemiAnalysisAI/microbench-blackwell, FA4 is arXiv 2603.05451. FITTED was chosen by reason, and
then with the kernels in sight that docs/clocks.md names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    value: float
    unit: str
    source: str


WARP = "clocks a warp's instruction, of a quarter of an SM"
LATENCY = "clocks until the result can be used"

HOPPER: Mapping[str, Constant] = {
    # a quarter of an SM issues one instruction a clock
    "fma": Constant(1, WARP, "GUIDE: 128 fp32 a clock and SM"),
    "alu": Constant(2, WARP, "GUIDE: 64 integer operations, comparisons, maxima, conversions"),
    "mufu": Constant(8, WARP, "GUIDE: 16 a clock and SM"),
    "fma latency": Constant(4, LATENCY, "SASS: stalls of dependent FFMA"),
    "alu latency": Constant(5, LATENCY, "SASS: stalls of dependent FMNMX, SEL, IADD3"),
    "mufu latency": Constant(20, LATENCY, "FITTED"),
    "pace": Constant(
        1.1, "times as long as `blocks.py` would have it", "SASS: stalls in our kernels' loops, 1.06 to 1.18"
    ),
    "beside products": Constant(
        1.5, "times as long as without, while the tensor pipe reads and writes registers", "FITTED"
    ),
    "branch": Constant(5, "clocks after a branch", "SASS: stalls of BRA"),
    # shared memory
    "smem": Constant(128, "bytes a clock and SM, for all that reads or writes it", "H200: products of 64 x 64"),
    "smem latency": Constant(30, LATENCY, "FITTED"),
    "shuffle latency": Constant(25, LATENCY, "FITTED"),
    "shuffle": Constant(1, "clocks a warp's shuffle, of an SM", "GUIDE: 32 lanes a clock and SM"),
    # the tensor pipe
    "tensor": Constant(4096, "FLOP of 16 bits a clock and SM", "989 TFLOP/s of 132 SMs at 1.83 GHz"),
    "half rows": Constant(1, "share of the rate for 64 rows", "all products have 64 rows"),
    "tensor start": Constant(30, "clocks from the issue of a product to its start", "FITTED"),
    "tensor end": Constant(20, "clocks from the last product to a wait", "FITTED"),
    # waits
    "wake": Constant(25, "clocks from an arrival to the waiting warp's next instruction", "FITTED"),
    "barrier": Constant(20, "the same for a named barrier", "FITTED"),
    "fence": Constant(20, "clocks of a proxy fence", "FITTED"),
    # memory
    "l2": Constant(
        64, "bytes a clock and SM from L2", "port of an SM; 38 are reached by d 128 (H200: 13 GB in 1.63 ms)"
    ),
    "out": Constant(
        31, "bytes a clock and SM to L2; a reduction takes twice as long", "H200: O of 64 KiB, 2100 clocks"
    ),
    "hbm": Constant(18, "bytes a clock and SM from HBM, while all SMs load", "H200: 4.25 TB/s, 132 SMs, 1.8 GHz"),
    "hbm latency": Constant(450, "clocks more than from L2", "assumed"),
    "l2 latency": Constant(280, LATENCY, "FITTED"),
    "tma latency": Constant(650, "clocks from a bulk copy's issue to its first byte", "FITTED"),
    "atomic latency": Constant(100, LATENCY, "FITTED"),
    "gather latency": Constant(550, "clocks of a cp.async beside its bytes", "FITTED"),
    "peer": Constant(20, "bytes a clock and SM to another CTA", "H200: 36 bytes a ns"),
    "peer latency": Constant(200, LATENCY, "FITTED"),
    # tensor memory: none
    "commit": Constant(0, "clocks of a commit", "-"),
    "tmem": Constant(128, "bytes a clock and quarter", "-"),
    "tmem latency": Constant(0, LATENCY, "-"),
}

BLACKWELL: Mapping[str, Constant] = {
    **HOPPER,
    "beside products": Constant(1, "times as long as without", "accumulators are in tensor memory"),
    "tensor": Constant(8192, "FLOP of 16 bits a clock and SM", "MICRO: a product of 128 x N x 16 every N / 2 clocks"),
    "half rows": Constant(0.5, "share of the rate for 64 rows of one CTA", "MICRO: N / 2 clocks, too"),
    "tensor start": Constant(
        60, "clocks from the issue of a product to its start", "MICRO: 104 beside N / 2 until a wait"
    ),
    "tensor end": Constant(0, "clocks from the last product to a wait", "see commit"),
    "commit": Constant(20, "clocks of a commit", "MICRO: 104 beside N / 2 until a wait"),
    "tmem": Constant(128, "bytes a clock and quarter", "one column of 32 lanes a clock: assumed"),
    "tmem latency": Constant(30, LATENCY, "assumed"),
    "l2": Constant(49, "bytes a clock and SM from L2, while all SMs load", "MICRO: 13 to 14 TB/s"),
    "hbm": Constant(25, "bytes a clock and SM from HBM, while all SMs load", "MICRO: 7.2 TB/s"),
    "tma latency": Constant(700, "clocks from a bulk copy's issue to its first byte", "MICRO: 1600 loaded, from DRAM"),
}

ARCHITECTURES = {"sm_90": HOPPER, "sm_10": BLACKWELL}


def constants_of(target: str) -> Mapping[str, Constant]:
    """Returns the constants of the chip that a program's .target names; raises LookupError for another."""
    for prefix, found in ARCHITECTURES.items():
        if target.startswith(prefix):
            return found
    raise LookupError(f"no clocks are known of {target}, wanted {' or '.join(ARCHITECTURES)}")
