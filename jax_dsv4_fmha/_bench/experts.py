"""The suite experts: those of a layer of V4-Flash, their gradient from bfloat16, and what stands before them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._definitions.experts import GROUP, pack_experts
from .._definitions.slabs import BLOCK
from .._ops.fused_moe import fused_moe
from .._ops.hyper_connection import HyperConnection, hyper_connection
from .._ops.route import route
from .measure import Operands
from .row import CallRow, Suite

LIMIT = 10.0


@dataclass(frozen=True, kw_only=True)
class ExpertsRow(CallRow):
    """All experts of a layer, with tokens that choose some of them at random."""

    op = "fused_moe"

    tokens: int
    k: int = 4096
    inner: int = 2048
    experts: int = 256
    chosen: int = 6
    weights: str = "MXFP4"  # or "FP8", "bfloat16"

    @property
    def name(self) -> str:
        return f"experts of {self.tokens} tokens, {self.chosen} of {self.experts}, {self.weights}"

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.chosen * self.k * self.inner

    @property
    def bytes(self) -> float:
        """Matrices of the experts that are chosen on average, and what is between the products and after them."""
        touched = self.experts * (1 - (1 - self.chosen / self.experts) ** self.tokens)
        of_number = {"MXFP4": 1 / 2 + 1 / GROUP, "FP8": 1.0, "bfloat16": 2.0}[self.weights]
        weights = touched * 3 * self.k * self.inner * of_number
        return weights + 2.0 * self.tokens * (2 * self.k + 2 * self.chosen * (self.k + self.inner))

    def operands(self, key: jax.Array) -> Operands:
        keys = jax.random.split(key, 6)
        e, k, n = self.experts, self.k, self.inner

        def in_mxfp4(i: int, *shape: int) -> Any:
            codes = jax.random.bits(keys[i], (*shape[:-1], shape[-1] // 2), jnp.uint8)
            return pack_experts(codes, jnp.full((*shape[:-1], shape[-1] // GROUP), 119, jnp.uint8))  # 2^-8

        def in_fp8(i: int, *shape: int) -> Any:
            codes = jax.random.bits(keys[i], shape, jnp.uint8) & 0xBF  # up to 1.875, and no NaN
            blocks = (*shape[:-2], shape[-2] // BLOCK, shape[-1] // BLOCK)
            return pack_experts(
                jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), jnp.full(blocks, 122, jnp.uint8)
            )

        def in_bfloat16(i: int, *shape: int) -> jax.Array:
            """Expert by expert: random bits of all would not fit beside them."""
            one = lambda key: jax.random.normal(key, shape[1:], jnp.bfloat16) * shape[-1] ** -0.5  # noqa: E731
            return jax.lax.map(one, jax.random.split(keys[i], shape[0]))

        matrix = {"MXFP4": in_mxfp4, "FP8": in_fp8, "bfloat16": in_bfloat16}[self.weights]
        choices = jax.vmap(lambda key: jax.random.permutation(key, e)[: self.chosen])
        return {
            "x": jax.random.normal(keys[0], (1, self.tokens, k), jnp.bfloat16),
            "w13": matrix(1, e, 2, n, k),
            "w2": matrix(2, e, k, n),
            "chosen": choices(jax.random.split(keys[3], self.tokens))[None].astype(jnp.int32),
            "weights": jax.random.uniform(keys[4], (1, self.tokens, self.chosen)),
        }

    def ours(self, **operands: Any) -> Any:
        return fused_moe(**operands, limit=LIMIT)


@dataclass(frozen=True, kw_only=True)
class ExpertsGradientRow(ExpertsRow):
    """Both passes of such a layer, from matrices in bfloat16, on a device that has all experts."""

    op = "fused_moe_gradient"

    experts: int = 16
    weights: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"gradient and {super().name}"

    @property
    def flops(self) -> float:
        return 3 * super().flops

    @property
    def bytes(self) -> float:
        """Those of the forward pass, and of what is kept; matrices once more, their gradients, and rows of either."""
        matrices = 2.0 * 3 * self.experts * self.k * self.inner
        rows = 2.0 * self.tokens * (2 * self.k + 2 * self.chosen * (3 * self.k + 5 * self.inner))
        return super().bytes + 2 * matrices + rows

    def operands(self, key: jax.Array) -> Operands:
        x = super().operands(key)
        return {**x, "dy": jax.random.normal(jax.random.fold_in(key, 1), x["x"].shape, jnp.bfloat16)}

    def ours(self, **operands: Any) -> Any:
        dy, chosen = operands.pop("dy"), operands.pop("chosen")
        y, back = jax.vjp(lambda given: fused_moe(**given, chosen=chosen, limit=LIMIT), operands)
        return y, *back(dy)


@dataclass(frozen=True, kw_only=True)
class RouteRow(CallRow):
    """A layer's router after its product with a gate in three numbers of bfloat16, beside XLA's."""

    op = "route"

    tokens: int
    experts: int = 256
    chosen: int = 6
    vocabulary: int = 0  # rows of a table, from which experts are; 0 for the choice by scores

    @property
    def name(self) -> str:
        of = "of a table" if self.vocabulary else f"of {self.experts}"
        return f"router of {self.tokens} tokens, {self.chosen} {of}"

    @property
    def flops(self) -> float:
        """Additions of parts, and about as many operations for a score and the choice."""
        return 30.0 * self.tokens * (self.chosen if self.vocabulary else self.experts)

    @property
    def bytes(self) -> float:
        of_logits = self.chosen if self.vocabulary else self.experts
        return 4.0 * self.tokens * (3 * of_logits + (2 + bool(self.vocabulary)) * self.chosen)

    def operands(self, key: jax.Array) -> Operands:
        of_logits, of_choice, of_tokens = jax.random.split(key, 3)
        size = jnp.array([1, 2**-8, 2**-16])[:, None]
        logits = jax.random.normal(of_logits, (1, self.tokens, 3, self.experts)) * size
        if not self.vocabulary:
            return {"logits": logits, "bias": jax.random.normal(of_choice, (self.experts,)) / 8}
        rows = jax.random.randint(of_choice, (self.vocabulary, self.chosen), 0, self.experts)
        return {
            "logits": logits,
            "table": rows,
            "tokens": jax.random.randint(of_tokens, (1, self.tokens), 0, self.vocabulary),
        }

    def ours(self, implementation: Any = None, **operands: Any) -> Any:
        how: dict[str, Any] = {} if self.vocabulary else {"top_k": self.chosen}
        return route(**operands, **how, scale=1.5, implementation=implementation)

    def peer(self, name: str, **operands: Any) -> Any:
        return self.ours("reference", **operands)


@dataclass(frozen=True, kw_only=True)
class HyperConnectionRow(CallRow):
    """The hyper-connections before a sublayer."""

    op = "hyper_connection"

    tokens: int
    hidden: int = 4096

    @property
    def name(self) -> str:
        return f"hyper-connections of {self.tokens} tokens, hidden {self.hidden}"

    @property
    def flops(self) -> float:
        """Operations of two products of tf32 for each of float32, which take as long as four of bfloat16."""
        return 8.0 * self.tokens * 24 * 4 * self.hidden

    @property
    def bytes(self) -> float:
        return 4.0 * 24 * 4 * self.hidden + self.tokens * (2.0 * (4 + 1) * 2 * self.hidden + 4 * 44)

    def operands(self, key: jax.Array) -> Operands:
        keys, t, h = jax.random.split(key, 5), self.tokens, self.hidden
        return {
            "x": jax.random.normal(keys[0], (1, t, 4, h), jnp.bfloat16),
            "y": jax.random.normal(keys[1], (1, t, h), jnp.bfloat16),
            "post": jax.random.uniform(keys[2], (1, t, 4)),
            "mix": jax.random.uniform(keys[3], (1, t, 4, 4)) / 2,
            "fn": jax.random.normal(keys[4], (24, 4 * h)) * (4 * h) ** -0.5,
            "scale": jnp.ones(3),
            "base": jnp.zeros(24),
            "norm": jnp.ones(h),
        }

    def ours(self, **operands: Any) -> Any:
        return hyper_connection(**operands)


@dataclass(frozen=True, kw_only=True)
class HyperConnectionGradientRow(HyperConnectionRow):
    """Both passes of the hyper-connections before a sublayer."""

    op = "hyper_connection_gradient"

    @property
    def name(self) -> str:
        return f"gradient and {super().name}"

    @property
    def flops(self) -> float:
        """Those of the forward pass; three products of tf32 of fn and numbers, and three of bfloat16 of numbers and
        streams, for one each of float32."""
        return super().flops + (12.0 + 6.0) * self.tokens * 24 * 4 * self.hidden

    @property
    def bytes(self) -> float:
        """Those of the forward pass; fn, which is read again, and its gradient; streams, what a sublayer made, the
        cotangents of both results, and both gradients."""
        return super().bytes + 2 * 4.0 * 24 * 4 * self.hidden + self.tokens * (2.0 * 3 * (4 + 1) * self.hidden + 4 * 72)

    def operands(self, key: jax.Array) -> Operands:
        keys, (t, h) = jax.random.split(jax.random.fold_in(key, 1), 5), (self.tokens, self.hidden)
        cotangents = {
            "x": jax.random.normal(keys[0], (1, t, 4, h), jnp.bfloat16),
            "z": jax.random.normal(keys[1], (1, t, h), jnp.bfloat16),
            "pre": jax.random.normal(keys[2], (1, t, 4)),
            "post": jax.random.normal(keys[3], (1, t, 4)),
            "mix": jax.random.normal(keys[4], (1, t, 4, 4)),
        }
        return {**super().operands(key), **{f"of_{name}": x for name, x in cotangents.items()}}

    def ours(self, **operands: Any) -> Any:
        cotangents = HyperConnection(*(operands.pop(f"of_{name}") for name in HyperConnection._fields))
        made, back = jax.vjp(lambda given: hyper_connection(**given), operands)
        return made, back(cotangents)


SUITE = Suite(
    "experts",
    "#7f3f5f",
    (
        *(ExpertsRow(tokens=n) for n in (1, 8, 64, 256, 1024, 4096)),
        *(ExpertsRow(tokens=n, weights=weights) for weights in ("FP8", "bfloat16") for n in (1, 64, 4096)),
        ExpertsRow(tokens=4096, experts=16, weights="bfloat16"),
        *(ExpertsGradientRow(tokens=n) for n in (2048, 8192)),
        *(HyperConnectionRow(tokens=n) for n in (1, 8, 64, 256, 1024, 4096)),
        *(RouteRow(tokens=n, peers=("xla",)) for n in (1, 8, 64, 256, 1024, 4096)),
        *(RouteRow(tokens=n, experts=384, peers=("xla",)) for n in (1, 64, 4096)),
        *(RouteRow(tokens=n, vocabulary=129280, peers=("xla",)) for n in (1, 64, 4096)),
        *(HyperConnectionGradientRow(tokens=n) for n in (2048, 8192)),
    ),
)
