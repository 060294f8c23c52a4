"""Products of e4m3: q, keys and the softmax's weights are rounded for them, by definition and for a kernel."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ... import _check, reference
from ..._definitions import e4m3
from ..._definitions.packed import LAYOUTS
from ..._host import key_codes
from ..cached import CachedSource
from ..sources import Part, Source
from ..tables import without_heads
from .base import Attention, AttentionMode, Keys


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("precision",))
@dataclasses.dataclass(frozen=True)
class Fp8Products(AttentionMode):
    """Keys become codes, each in a unit of its own. Packed keys are a `CachedSource`.

    Attributes:
      precision: one of `e4m3.PRODUCTS`.
    """

    precision: str

    differentiated: ClassVar[str] = (
        "precision=None, or implementation='reference', which has the gradient as if nothing were rounded"
    )

    @property
    def kernel_mode(self) -> dict[str, Any]:
        return {"precision": {e4m3.E4M3: "e4m3", e4m3.BF16_ROPE: "e4m3_bf16_rope"}[self.precision]}

    @property
    def description(self) -> tuple[str, ...]:
        return (f"{self.precision} products",)

    def definition(self, inner: Attention) -> Attention:
        """The softmax's weights are rounded too, which no wrapping of `inner` does."""

        def attention(q: Any, sources: Sequence[Source], sink: Any, *, scale: float) -> reference.Attention:
            parts = [part for source in sources for part in source.parts()]
            arrays = (q, *(without_heads(part.keys) for part in parts))
            q32, *keys = reference.rounded_for_products(self.precision, *arrays)
            rounded = [dataclasses.replace(part, keys=k) for part, k in zip(parts, keys, strict=True)]
            results = [part.reference(q32, None, scale, products=self.precision) for part in rounded]
            o, lse = reference.merge(results, sink)
            return o[..., : q.shape[-1]].astype(q.dtype), lse

        return attention

    def keys(self, q: jax.Array, sources: Sequence[Source]) -> Keys:
        """Codes, each key's with its unit; no key is in memory in between."""
        return Keys([_in_codes(source, self.precision == e4m3.BF16_ROPE) for source in sources], (), ("key_codes",))


def wanted(op: str, precision: str | None, q: jax.Array, batch_invariant: bool) -> list[AttentionMode]:
    """The modes, one or none, that the option `precision` asks for.

    Raises:
      ValueError: it is not one of `e4m3.PRODUCTS`, or does not go with q or with batch_invariant.
    """
    _check.one_of(op, "precision", precision, (None, *e4m3.PRODUCTS))
    if precision is None:
        return []
    if q.dtype != jnp.bfloat16:
        raise _check.error(ValueError, op, "q", q, f"bfloat16 with precision={precision!r}")
    if precision == e4m3.BF16_ROPE and isinstance(q.shape[-1], int) and q.shape[-1] <= e4m3.ROPE:
        least = f"d > {e4m3.ROPE}, of which the last {e4m3.ROPE} are RoPE's, with precision={precision!r}"
        raise _check.error(ValueError, op, "q", q, least)
    if batch_invariant:
        raise _check.error(ValueError, op, "precision", precision, "None with batch_invariant=True")
    return [Fp8Products(precision)]


def _in_codes(source: Source, rope: bool) -> Part:
    part, pool, slots, packing = _located(source)
    codes = key_codes.key_codes(*_in_pool(pool, slots, packing), packing=packing, rope=rope)
    return dataclasses.replace(part, keys=codes)


def _located(source: Source) -> tuple[Part, jax.Array, jax.Array, str]:
    """A part without its keys, where these are, [b or 1, rows, d] or [b or 1, pages, page_bytes], the slots that they
    have there, and their layout; "" where they are not packed."""
    if isinstance(source, CachedSource):
        slots, part = source.located()
        return part, source.pool, slots, source.layout if source.is_packed else ""
    (part,) = source.parts()
    keys = without_heads(part.keys)
    return part, keys, jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape[:2]), ""


def _in_pool(pool: jax.Array, slots: jax.Array, packing: str) -> tuple[jax.Array, jax.Array]:
    """All of it as one pool, and slots of that."""
    entries = pool.shape[1] * (LAYOUTS[packing].page_entries(pool.shape[2]) if packing else 1)
    if pool.shape[0] != 1:
        first = jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None] * entries
        slots = jnp.where(slots < 0, slots, first + slots)
    return pool.reshape(-1, pool.shape[2]), slots
