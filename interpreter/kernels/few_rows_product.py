"""Products of few rows on the interpreter: a launch, and what is wrong with its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_dsv4_fmha._definitions.packed_matrix import pack_matrix
from jax_dsv4_fmha._definitions.slabs import BLOCK
from kernels.abi import FewRowsProduct
from kernels.packings import ROPE

from ..machine import scheduler
from ..machine.state import Array, Machine, new_memory
from . import native
from .launch import Edit, Kernel, machine
from .verdict import Wrong

EPS = 0.25  # large enough to matter
SCALE = 0.375  # of an indexer's weights
HEAD, INDEX_D = 512, 128
SQUARED = 128  # numbers whose squares have a sum
COLUMN = 5  # of given weights, the first one that counts


@dataclass(frozen=True)
class Problem:
    variant: FewRowsProduct
    x: Array  # [rows, groups, k]
    w: Array  # [groups, k, n]
    angle: Array  # float32 [rows, ROPE / 2]
    low_columns: int = 0  # the first columns of y, which are a low-rank query
    left: bool = False  # whether x is left to be normed
    codes: Array | None = None  # float8_e4m3fn [groups, n, k], of which w is made, with `scales`, where it is packed
    scales: Array | None = None  # float32 [groups, n / BLOCK, k / BLOCK]

    @staticmethod
    def of(variant: FewRowsProduct, rows: int, k: int, n: int, groups: int = 1, **how: Any) -> Problem:
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(shape).astype(variant.dtype) for shape in ((rows, groups, k), (groups, k, n)))
        made = Problem(variant, x, w, rng.uniform(-9, 9, (rows, ROPE // 2)).astype(np.float32), **how)
        if not variant.weights:
            return made
        codes = rng.standard_normal((groups, n, k)).astype(ml_dtypes.float8_e4m3fn)
        scales = 2.0 ** rng.uniform(-2, 2, (groups, -(-n // BLOCK), -(-k // BLOCK)))
        return made.of_codes(codes, scales.astype(np.float32))

    def of_codes(self, codes: Array, scales: Array) -> Problem:
        """The same with this matrix, whose scales are rounded, and then its numbers."""
        kept = scales.astype(self.variant.dtype).astype(np.float32)
        whole = np.repeat(np.repeat(kept, BLOCK, 1), BLOCK, 2)[:, : codes.shape[1], : codes.shape[2]]
        w = (codes.astype(np.float32) * whole).swapaxes(1, 2).astype(self.variant.dtype)
        return replace(self, w=w, codes=codes, scales=scales)

    @property
    def packed(self) -> Array:
        """Its bytes, uint8 [groups, tiles, slabs, slab_bytes]."""
        return np.asarray(pack_matrix(jnp.asarray(self.codes), jnp.asarray(self.scales)).data)

    @staticmethod
    def typical(variant: FewRowsProduct, rows: int, groups: int = 1) -> Problem:
        """k and n that fill no tile; heads are whole, and have no groups where columns are heads."""
        if variant.norms:
            return Problem.of(variant, rows, 136, 2 * HEAD)
        if variant.indexes:
            return Problem.of(variant, rows, 2 * SQUARED, 2 * INDEX_D, left=True)
        at_once = BLOCK if variant.weights else 64
        k = 2 * HEAD if variant.turns_back else at_once * (variant.parts + 1) + 8
        return Problem.of(variant, rows, k, 200, groups)

    @staticmethod
    def around(variant: FewRowsProduct, stages: int, turns: int = 2) -> Problem:
        """A few rows and one cluster of CTAs, each of which uses all `stages` of its ring so many times and a part of
        one once more.
        """
        at_once = BLOCK if variant.weights else 64
        k, tail = turns * stages * at_once * (1 if variant.norms else variant.parts), 8
        if variant.turns_back:
            k, tail = -(-k // HEAD) * HEAD, HEAD
        return Problem.of(variant, 5, k + tail, HEAD if variant.norms else INDEX_D if variant.indexes else 72)

    @property
    def table(self) -> Array:
        return np.stack([np.cos(self.angle), np.sin(self.angle)], -1).reshape(len(self.angle), ROPE)

    @property
    def result(self) -> str:
        return "float32" if self.variant.to_float32 else "float8_e4m3fn" if self.variant.to_fp8 else self.variant.dtype

    @property
    def gain(self) -> Array:
        """float32 [low_columns], from 0.5 to 2."""
        return np.geomspace(0.5, 2, self.low_columns, dtype=np.float32)

    @property
    def norm(self) -> Array:
        """The numbers whose squares x is left to be normed by, float32 [rows, tiles, SQUARED]; no tiles where x is as
        it should be. They are of another size in each row.
        """
        numbers = self.x.astype(np.float32)
        if not self.left:
            return np.zeros((len(numbers), 0, SQUARED), np.float32)
        return (numbers * (1 + np.abs(numbers[:, :, :1]))).reshape(len(numbers), -1, SQUARED)

    @property
    def squares(self) -> Array:
        """float32 [rows, tiles]"""
        return np.square(self.norm).sum(-1)

    @property
    def given(self) -> Array:
        """float32 [rows, columns], with the weights of an indexer's query"""
        return self.x[:, 0, : COLUMN + self.w.shape[2] // INDEX_D + 2].astype(np.float32)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The results, by name: shape and dtype."""
        (rows, groups, _), n = self.x.shape, self.w.shape[2]
        found: dict[str, tuple[tuple[int, ...], str]] = {"y": ((rows, groups, n), self.result)}
        if self.low_columns:
            found["low"] = (rows, self.low_columns), self.variant.dtype
            found["squares"] = (rows, self.low_columns // SQUARED), "float32"
        if self.variant.indexes:
            found["weights"] = (rows, n // INDEX_D), "float32"
        return found

    def product(self) -> Array:
        """float64 [rows, groups, n], with x normed if that is left to do."""
        x = self.x.astype(np.float64)
        if self.variant.turns_back:
            x = self.rounded(self.turned(x, -1, HEAD))
        y: Array = np.einsum("rgk,gkn->rgn", x, self.w.astype(np.float64))
        if self.left:
            mean = self.squares.astype(np.float64).sum(-1) / self.x.shape[2]
            y = y / np.sqrt(mean + EPS)[:, None, None]
        return y

    def wanted(self) -> dict[str, Array]:
        """float64, but for the rounding of an indexer's query after each step"""
        y = self.product()
        found = {"y": y}
        if self.low_columns:
            low = y[:, 0, : self.low_columns]
            found |= {"low": low * self.gain, "squares": np.square(low).reshape(len(y), -1, SQUARED).sum(-1)}
        if self.variant.norms:
            heads = y.reshape(len(y), -1, HEAD)
            heads = heads / np.sqrt(np.mean(heads * heads, -1, keepdims=True) + EPS)
            found["y"] = self.turned(heads, 1, HEAD).reshape(y.shape)
        if self.variant.indexes:
            heads = self.rounded(self.turned(self.rounded(y), 1, INDEX_D)).reshape(len(y), -1, INDEX_D)
            found["y"] = (heads @ sylvester(INDEX_D)).reshape(y.shape)
            found["weights"] = SCALE * self.given[:, COLUMN : COLUMN + y.shape[2] // INDEX_D].astype(np.float64)
        return found

    def rounded(self, x: Array) -> Array:
        return x.astype(np.float32).astype(self.variant.dtype).astype(np.float64)

    def turned(self, x: Array, direction: int, d: int) -> Array:
        """x, whose rows are heads of d, with the last numbers of each head turned."""
        heads = x.reshape(len(x), -1, d).copy()
        pairs = heads[..., -ROPE::2] + 1j * heads[..., -ROPE + 1 :: 2]
        pairs = pairs * np.exp(1j * direction * self.angle[:, None].astype(np.float64))
        heads[..., -ROPE::2], heads[..., -ROPE + 1 :: 2] = pairs.real, pairs.imag
        return heads.reshape(x.shape)


def sylvester(d: int) -> Array:
    """The Hadamard matrix over √d."""
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(d)


def launched(
    x: Problem,
    *,
    seed: int = 0,
    edit: Callable[[str], str] = lambda text: text,
    edits: Mapping[str, Edit] | None = None,
) -> Machine:
    """The launch, about to run; the edits plant faults, in PTX and in parameters."""
    kernel, memory = Kernel.of(x.variant), new_memory()
    rows, groups, k = x.x.shape
    w = x.packed if x.variant.weights else x.w
    names = ["x", "table", *["gain"] * bool(x.low_columns), *["given"] * x.variant.indexes]
    addresses = {name: memory.add(name, getattr(x, name)) for name in [*names, *["squares"] * x.left]}
    addresses["w"] = memory.add("w", w)
    for name, (shape, dtype) in x.shapes().items():
        addresses[name] = memory.add(name, None, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    sizes = {"rows": rows, "groups": groups, "k": k, "n": x.w.shape[2], "type": native.TYPES[x.variant.dtype]}
    sizes |= {"makes_heads": x.variant.norms, "takes_heads": x.variant.turns_back, "indexes": x.variant.indexes}
    sizes |= {"low_columns": x.low_columns, "square_tiles": x.low_columns // SQUARED or x.squares.shape[1]}
    if x.variant.weights:
        sizes |= dict(zip(("is_packed", "tiles", "slabs", "slab_bytes"), (1, *w.shape[1:]), strict=True))
    if x.variant.indexes:
        sizes |= {"columns": x.given.shape[1], "column": COLUMN}
    tiles = {name: kernel.facts[name] for name in ("tile_m", "tile_n", "cluster")}
    plan = native.plan_few_rows_product(sizes, EPS, SCALE, **tiles, addresses=addresses)
    return machine(Kernel(x.variant, edit(kernel.ptx), kernel.facts), plan, memory, edits, seed=seed)


def results(x: Problem, **how: Any) -> dict[str, Array]:
    """The kernel's results, by name; how: as in `launched`."""
    of_launch, found = launched(x, **how), {}
    scheduler.run(of_launch)
    for name, (shape, dtype) in x.shapes().items():
        array = of_launch.memory.named(name)
        found[name] = array.bytes[: array.size].view(dtype).reshape(shape)
    return found


def run(x: Problem, **how: Any) -> Array:
    """y [rows, groups, n]"""
    return results(x, **how)["y"]


ROUNDING = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-20, "float8_e4m3fn": 2**-4}


def judge(x: Problem, got: dict[str, Array]) -> None:
    """Raises Wrong unless every number is right, within the rounding of sums and of the results."""
    wanted = x.wanted()
    found = {name: array.astype(np.float64) for name, array in got.items()}
    if x.variant.to_fp8:  # a row's scale is in its weight
        rows = found["y"].reshape(*found["weights"].shape, INDEX_D)
        scale = (found["weights"] / wanted["weights"])[..., None]
        found["y"], found["weights"] = (rows * scale).reshape(found["y"].shape), wanted["weights"]
        if not (np.abs(rows).max(-1) == 448).all():
            raise Wrong("a row's greatest code is not the greatest of e4m3")
    for name, want in wanted.items():
        size = np.sqrt(np.mean(want * want, -1, keepdims=True))
        rounding = ROUNDING[x.shapes()[name][1]]
        wrong = ~(np.abs(found[name] - want) <= rounding * np.maximum(np.abs(want), size))
        if wrong.any():
            place = tuple(int(a) for a in np.argwhere(wrong)[0])
            where = f"number {place[-1]} of row {place[0]}" + f", group {place[1]}" * (len(place) > 2)
            raise Wrong(
                f"{int(wrong.sum())} of {wrong.size} numbers are wrong" + f" of {name}" * (name != "y") + ", in"
                f" {len(np.unique(np.argwhere(wrong)[:, 0]))} rows, first {where}: {float(found[name][place]):.6g},"
                f" wanted {want[place]:.6g}"
            )
