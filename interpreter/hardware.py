"""A GPU's answers to a small call of every Hopper kernel of attention, recorded once and compared with since.

    python -m interpreter.hardware          on a machine with such a GPU; needs a built library
    python -m interpreter.hardware --only 'mha_bwd*'         the others' records stay as they are

A forward kernel runs the case "tiles", with keys whole, and split, where `combine` merges what it leaves; the kernels
of a gradient run a case of their own. The record keeps lse whole, every 11th row of o, every 97th number of a gradient,
and a digest of all of those results that are the same bits on every run, which a GPU test compares. 11 and 97 share no
factor with a tile's rows, keys, heads or columns, so every lane's are among those kept. The operands are made from a
seed; the record has a digest of them, for a comparison with results of other operands would be none.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import hashlib
import sys
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from unittest import mock

import numpy as np

from jax_dsv4_fmha._host import attention as raw_attention
from jax_dsv4_fmha._host import library
from jax_dsv4_fmha._host.gradients import mha_bwd
from kernels.abi import Forward, MhaBackward, MlaBackward
from kernels.variants import VARIANTS

from .kernels import attention, cases, gradients, native
from .machine.state import Array

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "hopper.npz"
ARCH, CASE = "sm_90a", "tiles"
ROWS, NUMBERS = 11, 97  # of which one is kept: rows of o, numbers of a gradient
SHAPE = {"b": 1, "s_q": 3, "s_kv": 94, "h_q": 8, "s_kv1": 41, "topk": 70, "width": 1 << 30}
DENSE_SHAPE = {"b": 1, "s_q": 18, "s_kv": 150, "h_q": 14, "h_kv": 2, "width": 1 << 30}
TRACING = threading.Lock()


class Record(NamedTuple):
    results: list[Array]  # what is kept of each, float32
    digest: str  # of those that are the same bits on every run, whole
    device: str


X = TypeVar("X", bound=attention.Operands | gradients.Operands)


class Run(ABC, Generic[X]):
    """A call that is recorded."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def reproducible(self) -> slice:
        """The results that are the same bits on every run, besides what is kept whole."""

    @abstractmethod
    def operands(self) -> X: ...

    @abstractmethod
    def on_gpu(self, x: X) -> tuple[Array, ...]: ...

    @abstractmethod
    def assert_right(self, got: tuple[Array, ...], x: X) -> None: ...

    @abstractmethod
    def kept(self, got: tuple[Array, ...]) -> list[Array]: ...

    def record(self) -> dict[str, Array | str]:
        """This run's part of the record, of an answer that is right, and the same again."""
        import jax

        x = self.operands()
        first, again = self.on_gpu(x), self.on_gpu(x)
        assert digest_of(self, first) == digest_of(self, again), self.name
        self.assert_right(first, x)
        print(f"{self.name}: recorded, and right", flush=True)
        of_results = {f"{self.name}.{i}": y for i, y in enumerate(self.kept(first))}
        facts = {"operands": digest(*x.arguments()), "digest": digest_of(self, first)}
        facts["device"] = jax.devices()[0].device_kind
        return {**{f"{self.name}.{what}": text for what, text in facts.items()}, **of_results}


@dataclass(frozen=True)
class AttentionRun(Run[attention.Operands]):
    """o and lse of a forward kernel."""

    variant: Forward
    splits: int

    @property
    def name(self) -> str:
        return f"{self.variant.key}{'.split' * (self.splits > 1)}"

    @property
    def reproducible(self) -> slice:
        return slice(1)

    def operands(self) -> attention.Operands:
        (tile_n,) = {row.tile_n for row in library.held() if row.key == self.variant.key}
        x = cases.operands(self.variant, tile_n, CASE)
        assert x is not None
        return x

    def on_gpu(self, x: attention.Operands) -> tuple[Array, ...]:
        """Calls the library's function with keys split into so many parts, whatever the shapes say."""
        import jax

        variant, heads = self.variant, x.shape.h_q
        if (called := native.called(variant.key, heads)) != variant.key:
            raise ValueError(f"{variant.key}: a call with {heads} heads gets {called}, so there is no recording it")
        call = jax.jit(functools.partial(native.function(variant), scale=variant.d**-0.5))
        with TRACING, mock.patch.object(raw_attention, "split_count", lambda *_: self.splits):
            lowered = call.lower(*x.arguments())
        return tuple(np.asarray(y) for y in lowered.compile()(*x.arguments()))

    def assert_right(self, got: tuple[Array, ...], x: attention.Operands) -> None:
        o, lse = got
        attention.assert_right((o, lse), x, self.variant.d**-0.5)

    def kept(self, got: tuple[Array, ...]) -> list[Array]:
        o, lse = got
        return [o.reshape(-1, o.shape[-1])[::ROWS].astype(np.float32), lse]


@dataclass(frozen=True)
class GradientRun(Run[gradients.Operands]):
    """dq, and for every source dkv, of a backward kernel; or dq, dk and dv of the kernels for separate K and V."""

    variant: MlaBackward | MhaBackward

    @property
    def is_dense(self) -> bool:
        return isinstance(self.variant, MhaBackward)

    @property
    def name(self) -> str:
        return self.variant.key.replace("mha_dq_", "mha_bwd_")

    @property
    def sums_rows(self) -> bool:
        """True where dq is a sum in any order, and the gradients of keys are not."""
        return self.variant.op == "mha_dqdkdv"

    @property
    def reproducible(self) -> slice:
        if self.sums_rows:
            return slice(1, None)
        return slice(None) if self.is_dense or self.variant.choices["deterministic"] else slice(1)

    def operands(self) -> gradients.Operands:
        v = self.variant
        if isinstance(v, MhaBackward):
            return gradients.operands(native.variant_of(f"mha_fwd_{v.arch}_d{v.d}_{v.dtype}"), **DENSE_SHAPE)
        return gradients.operands(v, **{**SHAPE, "h_q": native.heads_for(v, SHAPE["h_q"])})

    def on_gpu(self, x: gradients.Operands) -> tuple[Array, ...]:
        import jax

        v = self.variant
        deterministic = v.deterministic if isinstance(v, MlaBackward) else not self.sums_rows
        call = jax.jit(
            functools.partial(
                mha_bwd if self.is_dense else gradients.FUNCTIONS[v.name], scale=v.d**-0.5, deterministic=deterministic
            )
        )
        return tuple(np.asarray(y) for y in call(*x.arguments()))

    def assert_right(self, got: tuple[Array, ...], x: gradients.Operands) -> None:
        gradients.assert_right(got, x, self.variant.d**-0.5)

    def kept(self, got: tuple[Array, ...]) -> list[Array]:
        return [y.reshape(-1)[::NUMBERS].astype(np.float32) for y in got]


HOPPER = [v for v in VARIANTS if v.arch == ARCH]
ANSWERED = [
    v
    for v in HOPPER
    if isinstance(v, Forward) and not v.mode.is_e4m3  # whose sums are shorter on hardware
]
ATTENTION = [AttentionRun(v, n) for v in ANSWERED for n in ((1, 3) if v.splits else (1,))]
GRADIENTS = [
    GradientRun(v)
    for v in HOPPER
    if (isinstance(v, MlaBackward) and not v.bounds)
    or (isinstance(v, MhaBackward) and v.op in ("mha_dq", "mha_dqdkdv"))
]
ALL: tuple[AttentionRun | GradientRun, ...] = (*ATTENTION, *GRADIENTS)
RUNS = {run.name: run for run in ALL}
"""The recorded runs."""


def digest(*arrays: Array | None) -> str:
    content = hashlib.sha256()
    for array in arrays:
        if array is not None:
            content.update(f"{array.shape} {array.dtype}\n".encode() + array.tobytes())
    return content.hexdigest()


def digest_of(run: Run[X], got: tuple[Array, ...]) -> str:
    """A digest of those results that are the same bits on every run."""
    return digest(*got[run.reproducible])


def missing() -> list[str]:
    """The runs of which there is no record."""
    with np.load(RECORDED) as data:
        return [name for name in RUNS if f"{name}.digest" not in data]


def recorded(run: Run[X], x: X) -> Record:
    """ValueError if there is no record, or one of other operands."""
    with np.load(RECORDED) as data:
        if f"{run.name}.operands" not in data or str(data[f"{run.name}.operands"]) != digest(*x.arguments()):
            raise ValueError(f"{RECORDED.name} has no record of {run.name} on these operands: make it anew, on a GPU")
        results: list[Array] = []
        while (name := f"{run.name}.{len(results)}") in data:
            results.append(data[name])
        return Record(results, str(data[f"{run.name}.digest"]), str(data[f"{run.name}.device"]))


def main(argv: list[str] | None = None) -> int:
    import jax

    parser = argparse.ArgumentParser(
        prog="python -m interpreter.hardware", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RECORDED, help="(default: %(default)s)")
    parser.add_argument("--only", default="*", help="names of runs, with wildcards")
    args = parser.parse_args(argv)
    chosen = {name: run for name, run in RUNS.items() if fnmatch.fnmatchcase(name, args.only)}
    results: dict[str, Any] = {}  # arrays and text
    if args.out.exists():
        with np.load(args.out) as data:
            results = {key: data[key] for key in data if key.rpartition(".")[0] in RUNS.keys() - chosen.keys()}
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda run: run.record(), chosen.values()):
            results |= found
    np.savez_compressed(args.out, **results)
    print(f"wrote {args.out}, {args.out.stat().st_size} bytes, with answers of {jax.devices()[0].device_kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
