"""The suite product: the products of a step in DeepSeek-V4-Flash's layers, beside XLA's.

XLA's are what a layer takes where no kernel does: its product, and the norm of the low-rank query; with our kernel for
what query heads get after it, or for RoPE back of o before it. Beside them is what unpacks such matrices for products
of more rows.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions import packed_matrix
from .._definitions.packed_matrix import PackedMatrix, pack_matrix
from .._dispatch.unpack_matrix import rows_first
from .._host.few_rows_product import SQUARED
from ..layers import DSV4Attention, _few_rows, from_config
from ..layers._norm import rms_norm
from ..layers._params import widths
from ..layers.rope import index_query
from .layer import FLASH
from .measure import Operands
from .row import CallRow, Suite

WHAT = (
    *("x, ratio 0", "x, ratio 128", "x, ratio 4"),
    *("queries, norm and RoPE", "index queries, RoPE and Hadamard", "RoPE back, wo_a", "wo_b"),
)


@dataclass(frozen=True, kw_only=True)
class ProductRow(CallRow):
    """One product, of b tokens."""

    op = "few_rows_product"

    b: int
    what: str
    """one of `WHAT`"""
    packed: bool = False
    """whether the matrix is in FP8"""

    @property
    def name(self) -> str:
        return f"product of {self.what}{', FP8' * self.packed}, b{self.b}"

    @property
    def layer(self) -> DSV4Attention:
        ratio = int(self.what.split()[-1]) if self.what.startswith("x,") else 4 * self.what.startswith("index")
        return next(layer for layer in from_config(FLASH) if layer.ratio == ratio)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the rows and of the matrix."""
        layer = self.layer
        groups, of_group = layer.o_groups, layer.heads // layer.o_groups * layer.d
        if self.what.startswith("x,"):
            return (self.b, 1, layer.hidden), (layer.hidden, sum(widths(layer).values()))
        if self.what.startswith("queries"):
            return (self.b, 1, layer.q_rank), (layer.q_rank, layer.heads, layer.d)
        if self.what.startswith("index"):
            assert layer.indexer is not None
            return (self.b, 1, layer.q_rank), (layer.q_rank, layer.indexer.heads, layer.indexer.d)
        if self.what.endswith("wo_a"):
            return (self.b, 1, layer.heads, layer.d), (groups, of_group, layer.o_rank)
        return (self.b, 1, groups, layer.o_rank), (groups, layer.o_rank, layer.hidden)

    @property
    def flops(self) -> float:
        return 2.0 * self.b * math.prod(self.shapes[1])

    @property
    def bytes(self) -> float:
        y = jax.eval_shape(self.ours, **jax.eval_shape(self.operands, jax.random.key(0)))
        rows, matrix = map(math.prod, self.shapes)
        return (
            2.0 * rows + matrix * (1 if self.packed else 2) + sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(y))
        )

    def operands(self, key: jax.Array) -> Operands:
        keys = jax.random.split(key, 4)
        x, w = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, self.shapes, strict=False))
        positions = jax.random.randint(keys[2], (self.b, 1), 0, 16384)
        numbers = jax.random.uniform(keys[3], (self.b, 1, 64))  # weights of an indexer's heads, or sums of squares
        matrix = self._in_fp8(w) if self.packed else w * w.shape[0] ** -0.5
        return {"x": x, "w": matrix, "table": self.layer.rope.table(positions), "numbers": numbers}

    def _in_fp8(self, w: jax.Array) -> PackedMatrix:
        """w, of normal numbers, with scales of one power of two."""
        several = self.what.endswith("wo_a")
        first = 2 if self.what.startswith(("RoPE", "wo_b")) else 1  # of the axes of its rows
        matrix = jnp.swapaxes(w.reshape(*w.shape[:several], -1, math.prod(w.shape[first:])), -1, -2)
        blocks = (*matrix.shape[:-2], *(-(-n // 128) for n in matrix.shape[-2:]))
        return pack_matrix(matrix.astype(jnp.float8_e4m3fn), jnp.full(blocks, 121, jnp.uint8), w.shape)

    def ours(self, **operands: jax.Array) -> Any:
        return self._product(True, **operands)

    def peer(self, name: str, **operands: Any) -> Any:
        return self._product(False, **operands)

    def _product(self, kernel: bool, x: jax.Array, w: _few_rows.Matrix, table: jax.Array, numbers: jax.Array) -> Any:
        layer = self.layer
        if self.what.startswith("x,"):
            gain = jnp.ones(layer.q_rank)
            if kernel:
                return _few_rows.product_and_low_rank(x, w, gain)
            y = _few_rows.plain_product(x, w, jnp.float32, kernel)
            return y, rms_norm(y[..., : layer.q_rank].astype(x.dtype), gain, layer.eps)
        squares = numbers[..., : layer.q_rank // SQUARED] if kernel else None
        if self.what.startswith("queries"):
            return _few_rows.query_heads(_few_rows.LowRank(x, squares), w, table, layer.eps, kernel)
        if self.what.startswith("index"):
            if kernel:
                c, how = _few_rows.LowRank(x, squares), {"column": 0, "scale": 1.0, "eps": layer.eps}
                return _few_rows.index_query(c, w, table, numbers, True, **how)
            codes, scales = index_query(jnp.einsum("bsr,rhd->bshd", x, _few_rows.array_of(w, x.dtype)), table)
            return codes, numbers * scales
        if self.what.endswith("wo_a"):
            return _few_rows.grouped_product(x, w, table, kernel)
        return _few_rows.summed_product(x, w, kernel)


@dataclass(frozen=True, kw_only=True)
class UnpackRow(CallRow):
    """A matrix in FP8 as an array, and then its product of b rows, if any. The peer "xla" unpacks it by definition."""

    op = "unpack_matrix"

    what: str
    """one of `WHAT`"""
    b: int = 0

    @property
    def name(self) -> str:
        return f"unpacking for {self.what}" + f", and a product, b{self.b}" * (self.b > 0)

    @property
    def of_step(self) -> ProductRow:
        return ProductRow(b=max(self.b, 1), what=self.what, packed=True)

    @property
    def flops(self) -> float:
        return self.of_step.flops if self.b else 0.0

    @property
    def bytes(self) -> float:
        """Codes and the array; before a product rows, codes and results."""
        rows, matrix = map(math.prod, self.of_step.shapes)
        y = jax.eval_shape(self.ours, **jax.eval_shape(self.operands, jax.random.key(0)))
        return matrix + 2.0 * y.size + 2.0 * rows * (self.b > 0)

    def operands(self, key: jax.Array) -> Operands:
        found = self.of_step.operands(key)
        x, w = found["x"], found["w"]
        several, columns, _ = w.parts()
        return {"x": x.reshape(self.b, *several, *columns), "w": w} if self.b else {"w": w}

    def ours(self, **operands: Any) -> jax.Array:
        w = operands["w"]
        return _few_rows.product_of(self._sums, operands["x"], w) if self.b else rows_first(w, jnp.bfloat16)

    def peer(self, name: str, **operands: Any) -> jax.Array:
        w = operands["w"]
        if self.b:
            return jnp.einsum(self._sums, operands["x"], w.unpacked(jnp.bfloat16))
        return packed_matrix.unpacked(w.data, w.rows, w.columns, jnp.bfloat16)

    @property
    def _sums(self) -> str:
        if self.what.endswith("wo_a"):
            return "bgk,gkn->bgn"
        return "bgk,gkn->bn" if self.what == "wo_b" else "bk,khd->bhd" if "queries" in self.what else "bk,kn->bn"


PACKED = tuple(what for what in WHAT if what not in WHAT[1:3])  # all matrices of such a product have FP8

SUITE = Suite(
    "product",
    "#5f5f2f",
    (
        *(ProductRow(b=b, what=what, peers=("xla",)) for b in (1, 8, 64, 128) for what in WHAT),
        *(ProductRow(b=b, what=what, packed=True) for b in (1, 8, 64, 128) for what in PACKED),
        *(UnpackRow(what=what, b=b, peers=("xla",)) for b in (0, 256, 4096) for what in PACKED),
    ),
)
