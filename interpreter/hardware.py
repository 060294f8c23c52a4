"""What a GPU computes for the case "tiles" of every Hopper kernel, recorded once and compared with since.

    python -m interpreter.hardware --out tests/data/h200.npz        on a machine with such a GPU; needs a built library

A kernel that splits keys is recorded with these whole, and split, where `combine` merges what it leaves. The record
keeps lse whole, every 11th row of o, and a digest of all of o, which a GPU test compares: 11 shares no factor with a
tile's rows or a group's heads, so every lane's rows are among those kept. The operands are made from a seed; the record
has a digest of them, for a comparison with results of other operands would be none.
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
from kernels.abi import Forward
from kernels.variants import VARIANTS

from . import attention, cases, native

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "h200.npz"
ARCH, CASE = "sm_90a", "tiles"
EVERY = 11  # rows of o, one of which is kept

RUNS = {
    f"{v.key}{'.split' * (splits > 1)}": (v, splits)
    for v in VARIANTS
    if v.arch == ARCH and isinstance(v, Forward)
    for splits in ((1, 3) if v.splits else (1,))
}
"""What is recorded, by its name: (variant, splits)."""


def missing() -> list[str]:
    """The runs of which there is no record."""
    with np.load(RECORDED) as data:
        return [name for name in RUNS if f"{name}.operands" not in data]


def digest(*arrays: Any) -> str:
    content = hashlib.sha256()
    for array in arrays:
        if array is not None:
            content.update(f"{array.shape} {array.dtype}\n".encode() + array.tobytes())
    return content.hexdigest()


def kept(o: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows of o that a record keeps: [n, d]."""
    return o.reshape(-1, o.shape[-1])[::EVERY]


def record_of(o: np.ndarray[Any, Any], lse: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What is kept of an answer."""
    return {"o": kept(o).view(np.uint16), "o.digest": digest(o), "lse": lse}


def operands(variant: Forward) -> attention.Operands:
    (tile_n,) = {row.tile_n for row in _ffi.variants() if row.key == variant.key}
    x = cases.operands(variant, tile_n, CASE)
    assert x is not None
    return x


def on_gpu(variant: Forward, splits: int, x: attention.Operands) -> tuple[np.ndarray[Any, Any], ...]:
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
    for name, (variant, splits) in RUNS.items():
        x = operands(variant)
        o, lse = (first := on_gpu(variant, splits, x))
        assert [y.tobytes() for y in first] == [y.tobytes() for y in on_gpu(variant, splits, x)], name
        attention.assert_right((o, lse), x, variant.d**-0.5)
        results |= {f"{name}.{what}": value for what, value in record_of(o, lse).items()}
        results[f"{name}.operands"] = digest(*x.arguments())
        print(f"{name}: recorded, and right", flush=True)
    device = jax.devices()[0]
    results["device"] = device.device_kind
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **results)
    print(f"wrote {out}, {out.stat().st_size} bytes, from {device.device_kind}")


def recorded(name: str, x: attention.Operands) -> dict[str, Any]:
    """What `record_of` made of a run's answer. ValueError if there is no record, or one of other operands."""
    with np.load(RECORDED) as data:
        if f"{name}.operands" not in data or str(data[f"{name}.operands"]) != digest(*x.arguments()):
            raise ValueError(f"{RECORDED.name} has no record of {name} on these operands: make it anew, on a GPU")
        return {
            "o": data[f"{name}.o"].view(x.q.dtype),
            "o.digest": str(data[f"{name}.o.digest"]),
            "lse": data[f"{name}.lse"],
            "device": str(data["device"]),
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m interpreter.hardware", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RECORDED, help="(default: %(default)s)")
    record(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
