"""Times of witnesses by the clocks, beside what others published of the same kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import clocks
from ..cute.launches import run
from ..machine.rules import CHIP
from .catalogue import Witness
from .recording import recording


@dataclass(frozen=True)
class Chip:
    name: str
    sms: int
    ghz: float  # under such loads


B200 = Chip("B200", 148, 1.83)  # at which cuDNN frontend's benchmarks and others' ran
GB200 = Chip("GB200", 152, 2.062)


@dataclass(frozen=True)
class Published:
    tflops: float
    chip: Chip
    source: str
    flop: float = 0  # of an SM in a run; 0: published runs are so long that the steady state counts


PUBLISHED = {
    "fa4 64 long": Published(1225, B200, "FlashAttention #2605, 16k keys"),
    "fa4 128 long": Published(1613, B200, "arXiv 2603.05451"),
    "fa4 128 pair long": Published(1749, B200, "FlashAttention #2605, 16k keys"),
    "fa4 mla 2 long": Published(1181, B200, "FlashAttention 4, decoding"),
    "fa4 mla 2 top-k long": Published(1180, B200, "FlashAttention 4, 4k queries, top-k 2048"),
    "mosaic gemm pair long": Published(1562, B200, "JAX's guide to products on Blackwell, 4096 x 8192 x 4096"),
    "mosaic ragged pair 2 long": Published(876, B200, "tokamax's autotuning, 256 groups of 1024, 7168 x 2048"),
    "dsa 64 long": Published(829, GB200, "cuDNN frontend's benchmarks, V4-Flash, 4k", 2 * 64 * 640 * 1024),
    "dsa 128 long": Published(1346, GB200, "cuDNN frontend's benchmarks, V4-Pro, 4k", 2 * 2 * 64 * 1152 * 1024),
}


def timed(x: Witness, alone: bool = False) -> list[clocks.Timing]:
    """Returns the timing of each of its launches, one CTA an SM; alone: as in `clocks.run`."""
    made, found = recording(x), list[clocks.Timing]()
    run(made.launches, made.arguments, rules=CHIP, by=lambda m: found.append(clocks.run(m, alone=alone)))
    return found


def accounted(x: Witness) -> list[clocks.Account]:
    """Returns the account of each of its launches, which run as in `timed`."""
    both = zip(timed(x), timed(x, alone=True), strict=True)
    return [clocks.account(lambda alone=False, of=of: of[alone]) for of in both]


def predicted(x: Witness, timings: Sequence[clocks.Timing]) -> dict[str, object]:
    """Returns what JSON has of a witness: its clocks, beside what others published."""
    public, (timing,) = PUBLISHED[x.name], timings
    steady = timing.steady()
    assert steady is not None
    of_clock = public.flop / timing.clocks if public.flop else steady.flop / steady.clocks
    return {
        "what": x.what,
        "maker": x.maker,
        "chip": f"{public.chip.name}, {public.chip.ghz} GHz",
        "source": public.source,
        "clocks": round(timing.clocks),
        "turn": round(steady.period),
        "tensor": round(steady.tensor / steady.clocks, 3),
        "whole": bool(public.flop),
        "predicted_tflops": round(of_clock * public.chip.sms * public.chip.ghz / 1000),
        "published_tflops": public.tflops,
    }
