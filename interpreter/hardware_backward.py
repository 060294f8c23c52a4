"""What a GPU computes for every backward kernel, recorded once and compared with since; as hardware.py, of gradients.

    python -m interpreter.hardware_backward     on a machine with such a GPU; needs a built library

The record keeps every 97th number of dq and of every dkv, and a digest of what is the same on every run: of all of dq,
and of dkv too where a kernel is deterministic. 97 shares no factor with rows, keys, heads or columns.
"""

from __future__ import annotations

import argparse
import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kernels.abi import Backward
from kernels.variants import VARIANTS

from . import gradients, native
from .hardware import digest
from .state import Array

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "h200_backward.npz"
EVERY = 97  # numbers, one of which is kept
RUNS = {v.key: v for v in VARIANTS if isinstance(v, Backward)}
SHAPE: dict[str, int | None] = {"b": 1, "s_q": 3, "s_kv": 94, "h_q": 8, "s_kv1": 41, "topk": 70, "width": 1 << 30}


def operands(variant: Backward) -> gradients.Operands:
    """One tile of keys and a part of one; with the least number of heads that gets this kernel."""
    return gradients.operands(variant, **{**SHAPE, "h_q": native.heads_for(variant, 8)})


def on_gpu(variant: Backward, x: gradients.Operands) -> tuple[Array, ...]:
    """dq, and for every source dkv."""
    import jax

    how = {"scale": variant.d**-0.5, "deterministic": variant.deterministic}
    call = jax.jit(functools.partial(gradients.FUNCTIONS[variant.op], **how))
    return tuple(np.asarray(y) for y in call(*x.arguments()))


def kept(x: Array) -> Array:
    return x.reshape(-1)[::EVERY].astype(np.float32)


def digest_of(variant: Backward, got: tuple[Array, ...]) -> str:
    """A digest of those results that are the same on every run."""
    return digest(*(got if variant.deterministic else got[:1]))


def record(out: Path) -> None:
    import jax

    def answers(variant: Backward) -> dict[str, Any]:
        x = operands(variant)
        first, again = on_gpu(variant, x), on_gpu(variant, x)
        assert digest_of(variant, first) == digest_of(variant, again), variant.key
        gradients.assert_right(first, x, variant.d**-0.5)
        print(f"{variant.key}: recorded, and right", flush=True)
        return {
            f"{variant.key}.operands": digest(*x.arguments()),
            f"{variant.key}.digest": digest_of(variant, first),
            **{f"{variant.key}.{i}": kept(y) for i, y in enumerate(first)},
        }

    results: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(answers, RUNS.values()):
            results |= found
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **results)
    print(f"wrote {out}, {out.stat().st_size} bytes, from {results['device']}")


def recorded(variant: Backward, x: gradients.Operands) -> dict[str, Any]:
    """ValueError if there is no record, or one of other operands."""
    with np.load(RECORDED) as data:
        name = variant.key
        if f"{name}.operands" not in data or str(data[f"{name}.operands"]) != digest(*x.arguments()):
            raise ValueError(f"{RECORDED.name} has no record of {name} on these operands: make it anew, on a GPU")
        results = [data[f"{name}.{i}"] for i in range(1 + len(variant.sources))]
        return {"results": results, "digest": str(data[f"{name}.digest"]), "device": str(data["device"])}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m interpreter.hardware_backward",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=RECORDED, help="(default: %(default)s)")
    record(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
