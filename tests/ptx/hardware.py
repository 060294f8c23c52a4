"""What a GPU computes for the case "tiles" of every Hopper kernel, recorded once and compared with since.

    python -m tests.ptx.hardware --out tests/data/h200.npz        on a machine with such a GPU; needs a built library

The operands are made from a seed and are not recorded, but a digest of them is: a comparison with results of other
operands would be none.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jax_dsv4_fmha import _ffi
from kernels.variants import VARIANTS
from tests import native

from . import cases

RECORDED = Path(__file__).parent.parent / "data" / "h200.npz"
ARCH, CASE = "sm_90a", "tiles"


KEYS = [v.key for v in VARIANTS if v.arch == ARCH and v.op not in ("dsv4_decode", "dsv4_decode_fp8", "combine")]
"""What is recorded. Of decoding there is nothing yet."""


def digest(x: native.Operands) -> str:
    content = hashlib.sha256()
    for array in x.arguments():
        if array is not None:
            content.update(f"{array.shape} {array.dtype}\n".encode() + array.tobytes())
    return content.hexdigest()


def record(out: Path) -> None:
    import jax

    results: dict[str, Any] = {}
    for row in _ffi.manifest()["variants"]:
        if row["key"] not in KEYS:
            continue
        variant = native.variant_of(row["key"])
        x = cases.operands(variant, row["tile_n"], CASE)
        assert x is not None
        call = jax.jit(functools.partial(getattr(_ffi, row["op"]), scale=variant.d**-0.5))
        o, lse = (np.asarray(y) for y in call(*x.arguments()))
        again = call(*x.arguments())
        assert all(
            (a.view(np.uint8) == np.asarray(b).view(np.uint8)).all() for a, b in zip((o, lse), again, strict=True)
        )
        native.assert_right((o, lse), x, variant.d**-0.5)
        results |= {f"{row['key']}.o": o.view(np.uint16), f"{row['key']}.lse": lse, f"{row['key']}.operands": digest(x)}
        print(f"{row['key']}: recorded, and right", flush=True)
    device = jax.devices()[0]
    results["device"] = device.device_kind
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **results)
    print(f"wrote {out}, {out.stat().st_size} bytes, from {device.device_kind}")


def recorded(variant: Any, x: native.Operands) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """o and lse of a variant. ValueError if they are of other operands."""
    with np.load(RECORDED) as data:
        if str(data[f"{variant.key}.operands"]) != digest(x):
            raise ValueError(f"{variant.key}: the operands are not those of {RECORDED.name}; record it again")
        return data[f"{variant.key}.o"].view(x.q.dtype), data[f"{variant.key}.lse"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ptx.hardware", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RECORDED, help="(default: %(default)s)")
    record(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
