"""Sources of keys: one or two, which queries attend to under one softmax.

A source says which keys every query sees. Its kind determines the axes of its operands, its meaning and its gradient;
a tuple of kinds determines which kernel runs. All attention of the package is `attend`. Its gradient is the sum of the
sources' gradients under the lse of all of them, so backward kernels serve kinds of sources, as forward kernels do.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from .. import _check, reference
from .._definitions import attention_gradient, e4m3
from .._definitions.packed import LAYOUTS, V4_FP8, dequantize_cache
from .._definitions.rope import normed_and_turned, normed_and_turned_gradient, pairs_turned
from .._definitions.span import Span
from .._host import attention, gradients, library, rope
from .attention_op import ByGradient, gradient, rowsum
from .autodiff import Differentiable, without_gradient
from .lowering import choose, choose_backward
from .op import ONE_OR_B, RESULTS, SINK, Arrays, Axes, Call, Halo, KernelUse, Op, Params
from .support import Support, not_built

_Q, _ROWS = Axes("q", "b s_q h_q d"), "b s_q"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values", "start", "stop"),
    meta_fields=("names", "axis", "width", "reach", "from_first"),
)
@dataclasses.dataclass(frozen=True)
class SpanSource:
    """One interval of keys for every query.

    Attributes:
      keys: `[b, s, h_kv, d]`, or `[b, s, d]` for a single head, the form that a source beside another has.
      start, stop: int32 `[b, s_q]` within `[0, s]`: query i sees the keys `start <= j < stop`.
      values: like keys; None where V is K.
      names: the caller's names of keys, values if any, start and stop.
      axis: the caller's name of s.
      width: the most keys that a query sees, as far as they are known while tracing.
      reach: where keys stand in the places of queries, and none is seen by queries before it: how far the first key
        that a query sees may be from it.
      from_first: whether it is known while tracing that what a query sees begins with the first key.
    """

    keys: jax.Array
    start: jax.Array
    stop: jax.Array
    values: jax.Array | None = None
    names: tuple[str, ...] = ("keys", "start", "stop")
    axis: str = "s_kv"
    width: int | None = None
    reach: int | None = None
    from_first: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("span" if self.values is None else "separate_kv",)

    def parts(self) -> "Sequence[Part]":
        return [self]

    parts_of_kernel = parts

    @property
    def description(self) -> tuple[str, ...]:
        """How an error describes the source, besides dtype and d."""
        return () if self.keys.ndim == 3 else ("V=K" if self.values is None else "separate K and V",)

    @property
    def halo(self) -> Halo | None:
        return None if self.reach is None else Halo(self.axis, self.reach, self.names[-2:])

    @property
    def axes(self) -> tuple[Axes, ...]:
        keys = f"b {self.axis} d" if self.keys.ndim == 3 else f"b {self.axis} h_kv d"
        held = (keys,) if self.values is None else (keys, keys)
        return tuple(map(Axes, self.names, (*held, _ROWS, _ROWS)))

    def reference(
        self, q: jax.Array, sink: jax.Array | None, scale: float, products: str | None = None
    ) -> reference.Attention:
        keys = self.keys[:, :, None] if self.keys.ndim == 3 else self.keys
        span = Span(self.start, self.stop)
        return reference.fmha(q, keys, self.values, span=span, sink=sink, scale=scale, products=products)

    def gradient(self, q: jax.Array, *rows: jax.Array, scale: float) -> Arrays:
        """float32 (dq, dkeys), or (dq, dkeys, dvalues); rows: do, lse, sink_factor, delta (`attention_op.gradient`)."""
        keys = self.keys[:, :, None] if self.keys.ndim == 3 else self.keys
        dq, *of_keys = attention_gradient.fmha(q, keys, self.values, self.start, self.stop, *rows, scale=scale)
        return dq, *(x[:, :, 0] if self.keys.ndim == 3 else x for x in of_keys)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "indices", "length"),
    meta_fields=("names", "axis", "layout", "is_counted"),
)
@dataclasses.dataclass(frozen=True)
class SelectionSource:
    """The keys that a row of indices names, for every query. Each key is both K and V, and counts as often as it is
    named.

    Attributes:
      keys: `[b, s, d]`; with b = 1 a pool that all batch entries share. Or packed: uint8 `[b, pages, page_bytes]`,
        where index i means entry i % n of page i // n, and n entries make a page.
      indices: int32 `[b, s_q, n]`; an index outside of `[0, s)` is absent.
      length: int32 `[b, s_q]`, any value: indices from there on are absent too.
      names: the caller's names of keys, indices and length.
      axis: the caller's name of s.
      layout: the layout of packed keys.
      is_counted: whether indices count through the keys of all batch entries, as those of `flat` do.
    """

    keys: jax.Array
    indices: jax.Array
    length: jax.Array
    names: tuple[str, ...] = ("keys", "indices", "length")
    axis: str = "s_kv"
    layout: str = V4_FP8
    is_counted: bool = False

    @property
    def is_packed(self) -> bool:
        return bool(self.keys.dtype == jnp.uint8)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The layout of packed keys."""
        return (self.layout if self.is_packed else "selection",)

    def parts(self) -> "Sequence[SelectionSource]":
        return [self]

    parts_of_kernel = parts

    @property
    def description(self) -> tuple[str, ...]:
        return (f"{self.layout} caches",) if self.is_packed else ()

    @property
    def axes(self) -> tuple[Axes, ...]:
        width = f"{self.axis}_bytes" if self.is_packed else "d"
        return tuple(map(Axes, self.names, (f"{ONE_OR_B} {self.axis} {width}", f"b s_q {self.axis}_named", _ROWS)))

    def reference(
        self, q: jax.Array, sink: jax.Array | None, scale: float, products: str | None = None
    ) -> reference.Attention:
        keys = self.keys
        if self.is_packed:
            keys = dequantize_cache(keys, self.layout)
            keys = keys.reshape(keys.shape[0], -1, keys.shape[-1])
        keys = keys[0] if keys.shape[0] == 1 and q.shape[0] != 1 else keys
        how: dict[str, Any] = {"topk_length": self.length, "sink": sink, "scale": scale, "products": products}
        return reference.sparse_fmha(q, keys, self.indices, **how)

    def gradient(self, q: jax.Array, *rows: jax.Array, scale: float) -> Arrays:
        """float32 (dq, dkeys), as in `SpanSource`."""
        return attention_gradient.sparse_fmha(q, self.keys, self.indices, self.length, *rows, scale=scale)

    def flat(self) -> "SelectionSource":
        """All keys as one pool, `[s, d]` or `[pages, page_bytes]`, as cache kernels take them."""
        entries = self.keys.shape[1]
        if self.is_packed:
            entries *= LAYOUTS[self.layout].page_entries(self.keys.shape[2])
        indices = self.indices
        if self.keys.shape[0] != 1 and not self.is_counted:
            first = jnp.arange(self.keys.shape[0], dtype=jnp.int32)[:, None, None] * entries
            indices = jnp.where(indices < 0, indices, first + indices)
        return dataclasses.replace(self, keys=self.keys.reshape(-1, self.keys.shape[2]), indices=indices)


Part = SpanSource | SelectionSource


class Source(Protocol):
    """What `attend` takes: a part, or what makes parts of its arrays where attention runs."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its parts"""

    @property
    def description(self) -> tuple[str, ...]: ...

    @property
    def axes(self) -> tuple[Axes, ...]:
        """Of its arrays, in the order of its leaves"""

    def parts(self) -> Sequence[Part]:
        """By definition"""

    def parts_of_kernel(self) -> Sequence[Part]:
        """As the row of `FORWARD` takes them"""


class Turn(NamedTuple):
    """That q is as a product makes it, and attention does the norm of its heads and their RoPE, and turns o back."""

    table: jax.Array
    """float32 `[b, s_q, n]` or `[1, s_q, n]`: cos and sin of each pair by turns"""
    eps: float | None
    """of the norm; None for RoPE without it, for which there is no kernel"""
    group_heads: int = 1
    """heads of which one product takes o: in groups of these it makes the cotangent of o"""


def attend(
    op: str,
    q: jax.Array,
    sources: Sequence[Source],
    *,
    sink: jax.Array | None,
    scale: float,
    implementation: _check.Implementation | None,
    differentiable: bool = True,
    names: tuple[str, str] = ("q", "sink"),
    deterministic: bool = False,
    batch_invariant: bool = False,
    turn: Turn | None = None,
    products: str | None = None,
) -> reference.Attention:
    """One softmax over the keys of all sources and the sink.

    Args:
      op: the caller's name, for errors.
      q: `[b, s_q, h_q, d]`.
      sources: one or two, in q's dtype, or packed with q in bfloat16.
      sink: float32 `[h_q]`, or None.
      implementation: None or "cubin".
      differentiable: whether there is a gradient; if not, asking for one is an error.
      names: the caller's names of q and sink.
      deterministic: whether the gradient must have the same bits every time.
      batch_invariant: whether the kernel must sum in the canonical order (docs/semantics.md).
      turn: what makes q of the given one, for sources that `support_of` knows a kernel of with it.
      products: "float8_e4m3fn" for products of e4m3, over sources that are not packed; there is no gradient.

    Returns:
      o like q, rounded once, and lse float32 `[b, s_q, h_q]`, without the sink.

    Raises:
      NotImplementedError: "cubin", and no kernel is built for these sources; or `deterministic` where XLA's scatter
        would compute the gradient on a GPU; or `batch_invariant`, and no kernel with this order is built for them.
    """
    if not isinstance(deterministic, bool):
        raise _check.error(TypeError, op, "deterministic", deterministic, "a bool")
    if len(sources) == 1 and isinstance(sources[0], SpanSource) and sources[0].keys.ndim == 3:
        sources = [dataclasses.replace(sources[0], keys=sources[0].keys[:, :, None])]
    leaves, tree = jax.tree.flatten(tuple(sources))
    axes, kinds = tuple(x for source in sources for x in source.axes), _kinds(sources)
    support = (
        _support_in_order(op, q, sources) if batch_invariant else support_of(q, sources, turn is not None, products)
    )
    use = choose(op, "cubin" if batch_invariant else implementation, support)
    if sink is None:
        sink = jnp.full(q.shape[2:3], -jnp.inf, jnp.float32)
    params: Params = (("scale", scale),)
    ordered = (("batch_invariant", True),) * batch_invariant
    if turn is not None:
        leaves, params = [*leaves, turn.table], (*params, ("eps", turn.eps))
    halo = next((x.halo for x in sources if isinstance(x, SpanSource) and x.halo), None)
    attention, its_gradient = _ops(op, names, tree, axes, kinds, halo, turn is not None, products)
    if not differentiable:
        o, lse = without_gradient(Call(attention, use, params + ordered, support), q, *leaves, sink[None])
        return o, lse
    in_groups = () if turn is None else (("group_heads", turn.group_heads),)
    its_support = _support_of_gradient(q, kinds, support.got, **_same_bits(deterministic))
    use_backward = choose_backward(use, its_support.built)
    if deterministic and use_backward == KernelUse.NEVER and "selection" in kinds and library.local_architectures():
        wanted = "operands that a kernel for it is built for, or 'reference' and --xla_gpu_deterministic_ops"
        raise not_built(op, "deterministic", f"True for {support.got}", wanted, its_support.kernels)
    backward = Call(its_gradient, use_backward, (*params, *in_groups, *_same_bits(deterministic).items()), its_support)
    forward = Call(attention, use, params + ordered, support)
    o, lse = Differentiable(forward, backward, ByGradient)(q, *leaves, sink[None])
    return o, lse


_ONE_SPAN = (("separate_kv",), ("span",))


def support_of(q: jax.Array, sources: Sequence[Source], turns: bool = False, products: str | None = None) -> Support:
    """The kernel for all of these sources in one launch; turns: that with a `Turn`; products: that by these."""
    kinds = _kinds(sources)
    descriptions = dict.fromkeys(x for source in sources for x in source.description)
    got = ", ".join([q.dtype.name, f"d={q.shape[-1]}", *descriptions])
    if products is not None:
        return Support(f"{got}, {products} products", _kernels_for(E4M3, kinds), _shipped(E4M3.get(kinds), q))
    if turns:
        return Support(got, _kernels_for(TURNED, kinds), _shipped(TURNED.get(kinds), q))
    found = _shipped(FORWARD.get(kinds), q)
    if kinds == ("span",) and not found:  # a kernel that reads separate K and V serves where they are one
        kinds, found = ("separate_kv",), _shipped(FORWARD["separate_kv",], q)
    if kinds in _ONE_SPAN and not found:
        return Support(got, tuple(FORWARD[x].op for x in _ONE_SPAN), ())
    packing = FORWARD[kinds].packing if kinds in FORWARD else None
    return Support(got, _kernels_for(FORWARD, kinds), found, packing=packing or "")


def _support_in_order(op: str, q: jax.Array, sources: Sequence[Source]) -> Support:
    """The kernel for all of these sources in the canonical order; an error where there is none."""
    kinds, got, (first, *others) = _kinds(sources), support_of(q, sources).got, sources
    kernel = IN_ORDER.get(kinds)
    if set(kinds) == {"span"} and attention.spans_have_order(q):
        kernel = FORWARD[kinds]
    if isinstance(first, SpanSource) and not others:
        dense = IN_ORDER["separate_kv",]  # also serves where K and V are one, as in `support_of`
        kernel = kernel if _shipped(kernel, q) else dense
        if kernel is dense and not first.from_first:
            kernel, got = None, f"{got}, keys that may begin after the first"
        elif kernel is not dense and first.keys.shape[2] != 1:
            kernel, got = None, f"{got}, {first.keys.shape[2]} KV heads"
    archs = tuple(x for x in _shipped(kernel, q) if x in IN_ORDER_ON)
    support = Support(got, (kernel.op,) if kernel else (), archs, packing=(kernel and kernel.packing) or "")
    if not support.built:
        known = dict.fromkeys(x.op for x in IN_ORDER.values())
        wanted = f"operands of a kernel that sums in the canonical order, on {' or '.join(IN_ORDER_ON)}"
        raise not_built(op, "batch_invariant", f"True for {got}", wanted, tuple(known))
    return support


def _support_of_gradient(q: jax.Array, kinds: tuple[str, ...], got: str, **choices: Any) -> Support:
    """The kernel of the gradient."""
    found = _shipped(BACKWARD.get(kinds), q, **choices)
    if not found and kinds in _ONE_SPAN:
        separate = BACKWARD["separate_kv",].op
        return Support(got, (separate,), library.shipped_for(separate, d=q.shape[-1], dtype=q.dtype.name))
    return Support(got, _kernels_for(BACKWARD, kinds), found)


def _kernels_for(kernels: "Mapping[tuple[str, ...], Kernel]", kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The kernel for sources of these kinds; where there is none, those for one of the kinds."""
    alike = [kinds] if kinds in kernels else [other for other in kernels if set(other) & set(kinds)]
    return tuple(dict.fromkeys(kernels[x].op for x in alike))


def _without_heads(keys: jax.Array) -> jax.Array:
    """Keys of a source, which have one head, as [b, s, d]."""
    return keys[:, :, 0] if keys.ndim == 4 else keys


def _kinds(sources: Sequence[Source]) -> tuple[str, ...]:
    return tuple(kind for source in sources for kind in source.kinds)


def _shipped(kernel: "Kernel | None", q: jax.Array, **choices: Any) -> tuple[str, ...]:
    if kernel is None:
        return ()
    if kernel.packing is not None:
        choices["packing"] = kernel.packing
    return library.shipped_for(kernel.op, d=q.shape[-1], dtype=q.dtype.name, **choices)


def _same_bits(deterministic: bool) -> dict[str, Any]:
    """The choices that a gradient's kernel must match."""
    return {"deterministic": True} if deterministic else {}


def takes_turns(q: jax.Array, sources: Sequence[Source], turn: Turn) -> bool:
    """Whether every device here has a kernel that takes q with such a `Turn`, and is made for as many heads as the one
    that takes q without it. A program that is made where no device is runs on all architectures.
    """
    kinds, here = _kinds(sources), library.local_architectures()
    if turn.eps is None or turn.table.shape[-1] != TURNED_DIMS or kinds not in TURNED or not here:
        return False
    return _made_alike(q, TURNED[kinds].op, FORWARD[kinds].op, here)


def _made_alike(q: jax.Array, op: str, other: str, archs: Sequence[str]) -> bool:
    """Whether the kernels of two ops that take q on these architectures are made for as many heads."""

    def made_for(op: str, arch: str) -> int | None:
        built = library.variants_for(op, d=q.shape[-1], dtype=q.dtype.name)
        limits = (v.choices["max_heads"] for v in built if v.arch == arch)
        return min((n for n in limits if n >= q.shape[2]), default=None)

    return all(made_for(op, arch) == made_for(other, arch) is not None for arch in archs)


# Kernels, by kinds of sources


class Kernel(NamedTuple):
    """A raw call for a tuple of kinds of sources."""

    op: str
    """its name in the manifest"""
    run: Callable[..., Arrays]
    """a forward kernel takes (q, *operands, sink), with a `Turn` (q, *operands, sink, table), a gradient's kernel
    (q, do, lse, sink_factor, delta, *operands), with a `Turn` (…, *operands, table) and do in groups of heads"""
    operands: Callable[..., Sequence[Any]] = lambda *sources: jax.tree.leaves(sources)
    """makes `run`'s operands from the sources"""
    packing: str | None = None
    """a choice of an op whose keys may be packed; "" where they are not"""


def _span_fwd(q: Any, kv: Any, *others: Any, scale: float) -> Arrays:
    """Where there is no kernel for V = K, the kernel for separate K and V takes the keys twice."""
    if library.shipped_for("mla_span_fwd", d=q.shape[-1], dtype=q.dtype.name):
        return attention.mla_span_fwd(q, kv, *others, scale=scale)
    return attention.mha_fwd(q, kv, kv, *others, scale=scale)


def _pools(*sources: SelectionSource) -> Sequence[Any]:
    """Keys as pools of all sequences, so that each query may be one. Where it is one, all stays as it is."""

    def as_given(source: SelectionSource) -> bool:
        b, s_q = source.length.shape
        return isinstance(s_q, int) and s_q == 1 and source.keys.shape[0] == b and not source.is_packed

    return jax.tree.leaves([source if as_given(source) else source.flat() for source in sources])


def _span_and_pool(window: SpanSource, source: SelectionSource) -> Sequence[Any]:
    """A pool of all sequences has no batch axis, as the kernel takes it."""
    return jax.tree.leaves((window, source if source.keys.shape[0] == window.keys.shape[0] else source.flat()))


def _pools_of_one(source: SelectionSource, other: SelectionSource | None = None) -> Sequence[Any]:
    """The given source as one of two; queries see nothing of the other, which is made if it is not given."""
    return _pools(source, other or _unseen(source))


def _pools_after_none(source: SelectionSource, other: SelectionSource | None = None, *, first: str) -> Sequence[Any]:
    """The given FP4 source as the second of two; the first is an FP8 page, of which queries see nothing."""
    other = other or _unseen(source)
    page = jnp.zeros((1, LAYOUTS[first].page_bytes(1)), jnp.uint8)
    return [page, other.indices, other.length, *_pools(source)]


def _unseen(source: SelectionSource) -> SelectionSource:
    nothing = jnp.zeros_like(source.length)
    return dataclasses.replace(source, indices=nothing[..., None], length=nothing, is_counted=True)


def _span_beside_none(source: SpanSource) -> Sequence[Any]:
    """A span as the first of two; queries see nothing of the other, which is a key of it."""
    keys, nothing = source.keys[:, :, 0], jnp.zeros_like(source.start)
    return [keys, source.start, source.stop, keys[:, :1], nothing, nothing]


def _with_codes(run: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Makes codes of the keys of two sources, in one unit for a batch entry."""

    def run_with(q: Any, near: Any, start: Any, stop: Any, far: Any, *others: Any, scale: float) -> Arrays:
        unit = reference.unit_of_keys(near, far)
        near, far = (e4m3.codes(x, unit if x.ndim == 3 else unit[0]) for x in (near, far))
        units = jnp.broadcast_to(unit.reshape(-1), q.shape[:1])
        return run(q, near, start, stop, far, *others, units, scale=scale)

    return run_with


def _over_packed(packing: str, operands: Callable[..., Sequence[Any]] = _pools) -> Kernel:
    return Kernel("dsv4_decode", functools.partial(attention.dsv4_decode, packing=packing), operands, packing)


FORWARD: dict[tuple[str, ...], Kernel] = {
    ("separate_kv",): Kernel("mha_fwd", attention.mha_fwd),
    ("span",): Kernel("mla_span_fwd", _span_fwd),
    ("selection",): Kernel("mla_sparse_fwd", attention.mla_sparse_fwd),
    ("span", "selection"): Kernel("csa_fwd", attention.csa_fwd, _span_and_pool),
    ("span", "span"): Kernel("hca_fwd", attention.hca_fwd),
    ("selection", "selection"): Kernel("dsv4_decode", attention.dsv4_decode, _pools, packing=""),
    ("v4_fp8", "v4_fp8"): _over_packed("v4_fp8"),
    ("v4_fp8",): _over_packed("v4_fp8", _pools_of_one),
    ("v4_fp8", "v4_fp4"): _over_packed("v4_fp4"),
    ("v4_fp4",): _over_packed("v4_fp4", functools.partial(_pools_after_none, first="v4_fp8")),
    ("v41_fp8", "v41_fp8"): _over_packed("v41_fp8"),
    ("v41_fp8",): _over_packed("v41_fp8", _pools_of_one),
    ("v41_fp8", "v41_fp4"): _over_packed("v41_fp4"),
    ("v41_fp4",): _over_packed("v41_fp4", functools.partial(_pools_after_none, first="v41_fp8")),
}


def _span_in_order(q: Any, kv: Any, start: Any, stop: Any, sink: Any, **params: Any) -> Arrays:
    """Without the kernel of spans beside a selection of which queries see nothing; where no kernel takes one, the keys
    twice.
    """
    if not library.shipped_for("csa_fwd", d=q.shape[-1], dtype=q.dtype.name):
        return attention.mha_fwd(q, kv, kv, start, stop, sink, **params)
    if attention.spans_pay(q, kv.shape[1], 1):
        return attention.mla_span_fwd(q, kv, start, stop, sink, **params)
    keys, nothing = kv[:, :, 0], jnp.zeros_like(start)
    return attention.csa_fwd(q, keys, start, stop, keys, nothing[..., None], nothing, sink, **params)


def _spans_in_order(q: Any, *operands: Any, **params: Any) -> Arrays:
    """Without the kernel of two spans, the second is a list of its keys, from the first that a query sees."""
    near, start, stop, far, start2, stop2, sink = operands
    if attention.spans_pay(q, near.shape[1], far.shape[1]):
        return attention.hca_fwd(q, *operands, **params)
    indices = start2[..., None] + jnp.arange(far.shape[1], dtype=jnp.int32)[None, None]
    return attention.csa_fwd(q, near, start, stop, far, indices, stop2 - start2, sink, **params)


def _in_order(kernel: Kernel) -> Kernel:
    return kernel._replace(run=functools.partial(kernel.run, order=attention.ORDER))


IN_ORDER: dict[tuple[str, ...], Kernel] = {
    **{kinds: _in_order(kernel) for kinds, kernel in FORWARD.items()},
    ("span",): _in_order(Kernel("csa_fwd", _span_in_order)),
    ("span", "span"): _in_order(Kernel("csa_fwd", _spans_in_order)),
}
"""The kernels that sum in the canonical order. Tiles of keys are counted from the first key that a query sees: a tile
of rows has one query's heads, or for separate K and V all queries begin with the first key."""

IN_ORDER_ON = ("sm_90a",)
"""architectures; ffi/forward.h refuses others"""

TURNED: dict[tuple[str, ...], Kernel] = {
    ("span",): Kernel("mla_span_fwd_turned", attention.mla_span_fwd_turned),
    ("span", "selection"): Kernel("csa_fwd_turned", attention.csa_fwd_turned, _span_and_pool),
    ("span", "span"): Kernel("hca_fwd_turned", attention.hca_fwd_turned),
}
"""With a `Turn`"""

E4M3: dict[tuple[str, ...], Kernel] = {
    ("span",): Kernel("hca_fwd_e4m3", _with_codes(attention.hca_fwd_e4m3), _span_beside_none),
    ("span", "selection"): Kernel("csa_fwd_e4m3", _with_codes(attention.csa_fwd_e4m3), _span_and_pool),
    ("span", "span"): Kernel("hca_fwd_e4m3", _with_codes(attention.hca_fwd_e4m3)),
}
"""By products of e4m3"""

TURNED_DIMS = 64
"""the dimensions of a head that they turn"""


FEW_KEYS = 512
"""the most keys of a query with which two kernels are faster than one that adds to memory"""


def _dense_bwd(*operands: Any, width: int | None, scale: float, deterministic: bool = False) -> Arrays:
    """One kernel makes all gradients where that is faster, unless the same bits are wanted."""
    q, k = operands[0], operands[5]
    known = [n for n in (width, k.shape[1]) if isinstance(n, int)]
    few = bool(known) and min(known) <= FEW_KEYS
    one = library.shipped_for("mha_dqdkdv", d=q.shape[-1], dtype=q.dtype.name)
    dq, *of_keys = gradients.mha_bwd(*operands, scale=scale, deterministic=deterministic or few or not one)
    return dq, *(x.astype(jnp.float32) for x in of_keys)


def _separate_bwd(*operands: Any, **params: Any) -> Arrays:
    *arrays, width = operands
    return _dense_bwd(*arrays, width=width, **params)


def _span_bwd(q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, kv: Any, *span: Any, **params: Any) -> Arrays:
    """Where there is no kernel for V = K, the kernels for separate K and V take the keys twice."""
    rows, (start, stop, width) = (q, do, lse, sink_factor, delta), span
    if library.shipped_for("mla_span_bwd", d=q.shape[-1], dtype=q.dtype.name):
        return gradients.mla_span_bwd(*rows, kv, start, stop, **params)
    return _dense_bwd(*rows, kv, None, start, stop, width=width, **params)


BACKWARD: dict[tuple[str, ...], Kernel] = {
    ("separate_kv",): Kernel("mha_dq", _separate_bwd, lambda x: (x.keys, x.values, x.start, x.stop, x.width)),
    ("span",): Kernel("mla_span_bwd", _span_bwd, lambda x: (x.keys, x.start, x.stop, x.width)),
    ("selection",): Kernel("mla_sparse_bwd", gradients.mla_sparse_bwd),
    ("span", "selection"): Kernel("csa_bwd", gradients.csa_bwd),
    ("span", "span"): Kernel("hca_bwd", gradients.hca_bwd),
}
"""A kernel gives dq in q's dtype, and in float32 the gradient of every source's keys, and values, in order."""

TURNED_BACKWARD: dict[tuple[str, ...], Kernel] = {
    ("span",): Kernel("mla_span_bwd_turned", gradients.mla_span_bwd_turned),
    ("span", "selection"): Kernel("csa_bwd_turned", gradients.csa_bwd_turned),
    ("span", "span"): Kernel("hca_bwd_turned", gradients.hca_bwd_turned),
}
"""With a `Turn`, unless the same bits are wanted"""


@functools.cache
def _ops(
    op: str,
    names: tuple[str, str],
    tree: Any,
    axes: tuple[Axes, ...],
    kinds: tuple[str, ...],
    halo: Halo | None,
    turns: bool,
    products: str | None = None,
) -> tuple[Op, Op]:
    """Attention over sources of these kinds, and its gradient. Where it turns, its table is the last operand before the
    sink, and eps is a parameter.

    A rotation leaves rowsum(o∘do) as it is. So of q and o the gradient is made of what is given and returned.
    """

    def definition(q: Any, *operands: Any, scale: float, batch_invariant: bool = False) -> Any:
        del batch_invariant  # which no definition can be; its call insists on the kernel
        *leaves, sink = operands
        parts = [part for source in tree.unflatten(leaves) for part in source.parts()]
        if len(parts) == 1:
            return parts[0].reference(q, sink, scale)
        q32 = q.astype(jnp.float32)
        o, lse = reference.merge([part.reference(q32, None, scale) for part in parts], sink)
        return o.astype(q.dtype), lse

    def turned_definition(q: Any, *operands: Any, scale: float, eps: float) -> Any:
        *leaves, table, sink = operands
        o, lse = definition(*normed_and_turned(q, table, eps=eps), *leaves, sink, scale=scale)
        return *pairs_turned(o, table, direction=-1), lse

    def rounded_definition(q: Any, *operands: Any, scale: float) -> Any:
        *leaves, sink = operands
        parts: list[Part] = [part for source in tree.unflatten(leaves) for part in source.parts()]
        q32, *keys = reference.rounded_for_products(q, *(_without_heads(part.keys) for part in parts))
        parts = [dataclasses.replace(part, keys=k) for part, k in zip(parts, keys, strict=True)]
        o, lse = reference.merge([part.reference(q32, None, scale, products=products) for part in parts], sink)
        return o.astype(q.dtype), lse

    def kernel_by_products(q: Any, *operands: Any, scale: float) -> Any:
        *leaves, sink = operands
        row = E4M3[kinds]
        return row.run(q, *row.operands(*tree.unflatten(leaves)), sink, scale=scale)

    def kernel(q: Any, *operands: Any, scale: float, batch_invariant: bool = False) -> Any:
        *leaves, sink = operands
        row = (IN_ORDER if batch_invariant else FORWARD)[kinds]
        parts = [part for source in tree.unflatten(leaves) for part in source.parts_of_kernel()]
        return row.run(q, *row.operands(*parts), sink, scale=scale)

    def turned_kernel(q: Any, *operands: Any, scale: float, eps: float) -> Any:
        *leaves, table, sink = operands
        row = TURNED[kinds]
        return row.run(q, *row.operands(*tree.unflatten(leaves)), sink, table, scale=scale, eps=eps)

    def backward(q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, *leaves: Any, **params: Any) -> Arrays:
        rows = (do, lse, sink_factor, delta)
        parts = [x.gradient(q, *rows, scale=params["scale"]) for x in tree.unflatten(leaves)]
        dq = functools.reduce(lambda x, y: x + y, [dq for dq, *_ in parts])
        return dq.astype(q.dtype), *(x for _, *of_keys in parts for x in of_keys)

    def backward_kernel(q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, *leaves: Any, **params: Any) -> Arrays:
        row = BACKWARD[kinds]
        return row.run(q, do, lse, sink_factor, delta, *row.operands(*tree.unflatten(leaves)), **params)

    def whole_backward_kernel(
        q: Any, do: Any, *operands: Any, eps: float, group_heads: int, deterministic: bool = False, **params: Any
    ) -> Arrays:
        """By one kernel where there is one, made for these heads; else by passes over q, do and dq besides."""
        row = TURNED_BACKWARD[kinds]
        archs = library.local_architectures() or library.shipped_for(row.op)
        *numbers, delta = operands[:3]
        *leaves, table = operands[3:]
        if deterministic or not _made_alike(q, row.op, BACKWARD[kinds].op, archs):
            params |= _same_bits(deterministic)
            return in_passes(q, do, *operands, eps=eps, group_heads=group_heads, **params)
        b, s, h, d = do.shape
        heads = group_heads if h % group_heads == 0 else h
        do = do.reshape(b, s, h // heads, heads, d).transpose(2, 0, 1, 3, 4)  # which undoes a product's transposition
        sources = row.operands(*tree.unflatten(leaves))
        return row.run(q, do, *numbers, delta, *sources, table, eps=eps, **params)

    def of_rows(run: Callable[..., Arrays]) -> Callable[..., Arrays]:
        """As `gradient` takes it: with o and dlse in place of delta, and with rowsum(o∘do), which XLA makes."""

        def run_with(q: Any, *operands: Any, **params: Any) -> Arrays:
            *leaves, o, do, lse, sink_factor, dlse = operands
            sums = rowsum(o, do)
            return *run(q, do, lse, sink_factor, sink_factor * sums - dlse, *leaves, **params), sums

        return run_with

    def turning(
        run: Callable[..., Arrays],
        forth: Callable[..., Arrays],
        rotate: Callable[..., Arrays],
        back: Callable[..., Arrays],
    ) -> Callable[..., Arrays]:
        """A gradient of q as attention sees it, by the norm and RoPE, by RoPE alone, and by the gradient of both."""

        def run_with(q: Any, do: Any, *operands: Any, eps: float, group_heads: int, **params: Any) -> Arrays:
            del group_heads  # which is about memory
            *numbers, delta = operands[:3]
            *leaves, table = operands[3:]
            do, delta = jax.lax.optimization_barrier((do, delta))  # then nothing reads do, and it is turned in place
            (seen,), (do,) = forth(q, table, eps=eps), rotate(do, table, direction=1)
            dq, *of_keys = run(seen, do, *numbers, delta, *leaves, **params)
            return *back(q, table, dq, eps=eps), *of_keys

        return run_with

    q_axes, sink_axes = Axes(names[0], _Q.axes), Axes(names[1], SINK.axes)
    if turns:
        table_axes = Axes("rope_table", f"{ONE_OR_B} s_q n")
        attention = Op(op, (q_axes, *axes, table_axes, sink_axes), RESULTS, turned_definition, turned_kernel, halo=halo)
        backward = turning(backward, normed_and_turned, pairs_turned, normed_and_turned_gradient)
        in_passes = turning(backward_kernel, rope.norm_rope, rope.rope, rope.norm_rope_bwd)
        backward_kernel = whole_backward_kernel
    elif products is not None:
        by_products = kernel_by_products if kinds in E4M3 else None
        attention = Op(op, (q_axes, *axes, sink_axes), RESULTS, rounded_definition, by_products, halo=halo)
    else:
        forward_kernel = kernel if kinds in FORWARD else None
        attention = Op(op, (q_axes, *axes, sink_axes), RESULTS, definition, forward_kernel, halo=halo)
    return attention, gradient(attention, of_rows(backward), of_rows(backward_kernel) if kinds in BACKWARD else None)
