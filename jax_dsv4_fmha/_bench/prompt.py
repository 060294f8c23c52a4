"""The suite prompt: a layer of DeepSeek-V4-Flash over a whole long prompt, one chunk after the other."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._cli.report import table as as_table
from ..layers import LayerCache
from .layer import FLASH, LayerRow
from .measure import Contestant, Operands, Times
from .row import Row, Suite
from .tables import spread

CHUNK = 4096
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class PromptRow(Row):
    """A prompt of one sequence into an empty cache with room for it.

    A chunk is one compiled program, which gets the cache donated. The time is the host's, from the first chunk to the
    end of the last, since it is many calls; each waits on the device for the one before it. The memory is what XLA
    says of a chunk's program.
    """

    op = "DSV4Attention"

    tokens: int
    ratio: int
    cache: str = "bfloat16"
    chunk: int = CHUNK

    @property
    def of_chunk(self) -> LayerRow:
        """The last chunk, as a step of the suite layer."""
        return LayerRow(b=1, s_q=self.chunk, s_kv=self.tokens, ratio=self.ratio, cache=self.cache)

    @property
    def name(self) -> str:
        kind = f"of ratio {self.ratio}" if self.ratio else "with a window alone"
        chunks = f"prompt of {self.tokens} by chunks of {self.chunk}"
        return f"layer {kind}, {chunks}" + ", FP8" * (self.cache != "bfloat16")

    @property
    def flops(self) -> float:
        """Products with all matrices and with the visible keys."""
        return LayerRow(b=1, s_q=self.tokens, s_kv=self.tokens, ratio=self.ratio).flops

    @property
    def bytes(self) -> float:
        """The bytes of x and y, and those of the matrices once for each chunk."""
        return self.tokens / self.chunk * LayerRow(b=1, s_q=self.chunk, s_kv=self.chunk, ratio=self.ratio).bytes

    @property
    def sets(self) -> int:
        return 1

    def inputs(self, sets: int) -> list[Operands]:
        """The operands of a chunk: all chunks have the same x."""
        return [{name: x for name, x in self.of_chunk.inputs(1)[0].items() if name not in ("dy", "lengths")}]

    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        """There are none for the profiler: a prompt has too many calls."""
        return {}

    def times(self, measured: dict[str, Times], contestants: Mapping[str, Contestant]) -> dict[str, Times]:
        return {"ours": self.clocked(*self.inputs(1))}

    def clocked(self, operands: Operands) -> Times:
        """Whole prompts, and the bytes that a chunk's program and the cache take."""
        layer = self.of_chunk.layer

        def ours(cache: LayerCache, params: Any, x: jax.Array, start: jax.Array) -> tuple[LayerCache | None, jax.Array]:
            out = layer(params, x, cache, start=start)
            return out.cache, out.y

        cache = layer.cache(1, self.tokens, jnp.dtype(self.cache))
        starts = [jnp.full((1,), at, jnp.int32) for at in range(0, self.tokens, self.chunk)]
        program = jax.jit(ours, donate_argnums=0).lower(cache, **operands, start=starts[0]).compile()
        memory: Any = program.memory_analysis()
        facts = {
            "program_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "cache_bytes": sum(x.nbytes for x in jax.tree.leaves(cache)),
        }
        rounds = []
        for _ in range(1 + _ROUNDS):
            began = time.monotonic()
            for start in starts:
                cache, y = program(cache, **operands, start=start)
            jax.block_until_ready(y)
            rounds.append(time.monotonic() - began)
        return {"seconds": statistics.median(rounds[1:]), "rounds": rounds[1:], "kernels": {}, **facts}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        line = [row["name"], *["-"] * 6]
        if ours := row["times"].get("ours"):
            seconds, rate = ours["seconds"], row["flops"] / ours["seconds"]
            bytes_of = (ours.get(name) for name in ("program_bytes", "cache_bytes"))
            megabytes = ("-" if n is None else f"{n / 1e6:.0f}" for n in bytes_of)
            shares = (f"{rate / 1e12:.0f}", f"{rate / row['matmul_flops_per_s']:.2f}")
            line[1:] = [f"{seconds * 1e3:.1f}", f"{spread(ours['rounds']):.1%}", *shares, *megabytes]
        lines.append(line)
    header = ["row", "ms", "spread", "TFLOP/s", "of M", "MB of a chunk", "MB of the cache"]
    notes = "the host's clock; a chunk's MB: what its program allocates beside operands and the cache"
    return "\n".join([as_table(header, lines), notes])


_KINDS = (*((ratio, "bfloat16") for ratio in FLASH["compress_ratios"]), (4, "float8_e4m3fn"))  # type: ignore[attr-defined]
SUITE = Suite(
    "prompt",
    "#7f6f2f",
    tuple(PromptRow(tokens=n, ratio=ratio, cache=cache) for n in (2**17, 2**19, 2**20) for ratio, cache in _KINDS),
    table,
)
