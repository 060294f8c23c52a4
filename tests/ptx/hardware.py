"""What a GPU computes for the case "tiles" of every Hopper kernel, recorded once and compared with since.

    python -m tests.ptx.hardware --out tests/data/h200.npz        on a machine with such a GPU; needs a built library

A kernel that splits keys is recorded with these whole, and split, where `combine` merges what it leaves. The operands
are made from a seed and are not recorded, but a digest of them is: a comparison with results of other operands would
be none.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jax_dsv4_fmha import _ffi
from kernels.variants import VARIANTS, Variant
from tests import native

from . import cases

RECORDED = Path(__file__).parent.parent / "data" / "h200.npz"
ARCH, CASE = "sm_90a", "tiles"

RUNS = {
    f"{v.key}{'.split' * (splits > 1)}": (v, splits)
    for v in VARIANTS
    if v.arch == ARCH and v.sources
    for splits in ((1, 3) if v.splits else (1,))
}
"""What is recorded, by its name: (variant, splits)."""


def missing() -> list[str]:
    """The runs of which there is no record."""
    with np.load(RECORDED) as data:
        return [name for name in RUNS if f"{name}.operands" not in data]


def digest(x: native.Operands) -> str:
    content = hashlib.sha256()
    for array in x.arguments():
        if array is not None:
            content.update(f"{array.shape} {array.dtype}\n".encode() + array.tobytes())
    return content.hexdigest()


def on_gpu(variant: Variant, splits: int, x: native.Operands) -> tuple[np.ndarray[Any, Any], ...]:
    """(o, lse), with keys split into so many parts whatever the shapes say."""
    import jax

    if (called := native.called(variant.key, x.shape.h_q)) != variant.key:
        raise ValueError(f"{variant.key}: a call with {x.shape.h_q} heads gets {called}, so there is no recording it")
    with mock.patch.object(_ffi, "split_count", lambda *_: splits):
        call = jax.jit(functools.partial(native.function(variant.op), scale=variant.d**-0.5))
        return tuple(np.asarray(y) for y in call(*x.arguments()))


def record(out: Path) -> None:
    import jax

    results: dict[str, Any] = {}
    tiles = {row.key: row.tile_n for row in _ffi.variants()}
    for name, (variant, splits) in RUNS.items():
        x = cases.operands(variant, tiles[variant.key], CASE)
        assert x is not None
        o, lse = (first := on_gpu(variant, splits, x))
        assert [y.tobytes() for y in first] == [y.tobytes() for y in on_gpu(variant, splits, x)], name
        native.assert_right((o, lse), x, variant.d**-0.5)
        results |= {f"{name}.o": o.view(np.uint16), f"{name}.lse": lse, f"{name}.operands": digest(x)}
        print(f"{name}: recorded, and right", flush=True)
    device = jax.devices()[0]
    results["device"] = device.device_kind
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **results)
    print(f"wrote {out}, {out.stat().st_size} bytes, from {device.device_kind}")


def recorded(name: str, x: native.Operands) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """o and lse of a run. ValueError if there is no record, or one of other operands."""
    with np.load(RECORDED) as data:
        if f"{name}.operands" not in data or str(data[f"{name}.operands"]) != digest(x):
            raise ValueError(f"{RECORDED.name} has no record of {name} on these operands: make it anew, on a GPU")
        return data[f"{name}.o"].view(x.q.dtype), data[f"{name}.lse"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ptx.hardware", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RECORDED, help="(default: %(default)s)")
    record(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
