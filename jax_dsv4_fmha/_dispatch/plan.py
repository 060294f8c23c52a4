"""The choice of the kernels that run a call of attention; no other module chooses.

A call is planned twice. While it is traced, `best` finds which modes are inside of a kernel, and `support_of` which
architectures have one, from dtype, d and the kinds of sources. Where a device runs its part, `launch` and
`launch_gradient` know all sizes: they say which kernels attend, and `explain` prints the names of these.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._host import attention as raw
from .._host import gradients, library
from .._host.mode import BY_COLUMNS, FEW_HEADS, PLAIN, Mode, name_of
from .._host.split_kv import columns_pay, processors
from .lowering import choose_backward
from .modes.base import AttentionMode, Keys
from .op import Arrays, KernelUse
from .sources import PagedSource, Part, Source, SpanSource
from .support import Support, not_built
from .tables import BACKWARD, DENSE, FORWARD, LISTED, SPAN_OF_FEW_HEADS, Kernel

ORDERED_ON = ("sm_90a",)
"""architectures with the canonical order; ffi/forward.h refuses others"""

FEW_KEYS = 512
"""the most keys of a query with which two kernels of dense gradients are faster than one that adds to memory"""

_ONE_SPAN = (("separate_kv",), ("span",))


# ---- while tracing


class Plan(NamedTuple):
    """The way in which a call attends: its modes, and whether its sources share a launch."""

    inside: tuple[AttentionMode, ...]
    """the modes that its kernel has, or its definition"""
    outside: tuple[AttentionMode, ...]
    """those that passes around it have"""
    is_split: bool
    """whether each source has a launch of its own, whose results are merged"""


def best(q: jax.Array, sources: Sequence[Source], modes: Sequence[AttentionMode]) -> Plan:
    """The plan of a call in these modes: one launch over all sources, or where no kernel takes these one for each."""
    inside, others = ([x for x in modes if x.may_be_outside == outside] for outside in (False, True))
    support = _support_of(q, sources, inside)
    if len(sources) > 1 and not inside and not support.shipped:
        return Plan((), tuple(others), is_split=True)
    for mode in others:
        if _goes_inside(mode, inside, q, sources):
            inside.append(mode)
    return Plan(tuple(inside), tuple(x for x in others if x not in inside), is_split=False)


def support_of(op: str, q: jax.Array, sources: Sequence[Source], modes: Sequence[AttentionMode]) -> Support:
    """The kernel for all of these sources in one launch, with these modes inside. Where one insists on the canonical
    order, it is an error if there is none.
    """
    support = _support_of(q, sources, modes)
    return _ordered_support_of(op, q, sources, support.got) if _are_ordered(modes) else support


def _support_of(q: jax.Array, sources: Sequence[Source], modes: Sequence[AttentionMode]) -> Support:
    """The kernel in any order of sums."""
    kinds, mode = kinds_of(sources), _kernel_mode(modes)
    described = [*(x for y in sources for x in y.description), *(x for y in modes for x in y.description)]
    got = ", ".join([q.dtype.name, f"d={q.shape[-1]}", *dict.fromkeys(described)])
    row, found = _first_shipped(FORWARD.get(kinds, ()), mode, q)
    if kinds in _ONE_SPAN and mode == PLAIN and not found:
        return Support(got, tuple(FORWARD[x][0].op for x in _ONE_SPAN), ())
    names = (row.name(mode),) if row else _names_for_some(FORWARD, kinds, mode)
    return Support(got, names, found, packing=(row and row.packing) or "")


def _ordered_support_of(op: str, q: jax.Array, sources: Sequence[Source], got: str) -> Support:
    kinds, (first, *_) = kinds_of(sources), sources
    (dense,) = FORWARD["separate_kv",]  # also serves where K and V are one, as in `_support_of`
    row = FORWARD[kinds][0] if kinds in FORWARD else None
    if kinds in LISTED and not _spans_have_order(q):
        row = LISTED[kinds]
    if row and row.d_v and isinstance(first, SpanSource) and (first.keys.shape[2] != 1 or not _spans_have_order(q)):
        row, got = None, f"{got}, {q.shape[2]} heads and {first.keys.shape[2]} KV heads"
    if isinstance(first, SpanSource) and kinds in _ONE_SPAN:
        row = row if row and _shipped(row, PLAIN, q) else dense
        if row is dense and not first.from_first:
            row, got = None, f"{got}, keys that may begin after the first"
        elif row is not dense and first.keys.shape[2] != 1:
            row, got = None, f"{got}, {first.keys.shape[2]} KV heads"
    archs = tuple(x for x in _shipped(row, PLAIN, q) if x in ORDERED_ON) if row else ()
    support = Support(got, (row.name(),) if row else (), archs, packing=(row and row.packing) or "")
    if not support.is_there:
        known = dict.fromkeys(LISTED.get(x, rows[0]).name() for x, rows in FORWARD.items())
        wanted = f"operands of a kernel that sums in the canonical order, on {' or '.join(ORDERED_ON)}"
        raise not_built(op, "batch_invariant", f"True for {got}", wanted, tuple(known))
    return support


def support_of_gradient(
    op: str, q: jax.Array, kinds: tuple[str, ...], got: str, forward: KernelUse, deterministic: bool
) -> Support:
    """The kernel of the gradient of a call that uses its own one so. Where there is none and XLA would add in no fixed
    order, `deterministic` is an error.
    """
    choices = {"deterministic": True} if deterministic else {}
    rows = BACKWARD.get(kinds, ())
    found = _shipped(rows[0], PLAIN, q, **choices) if rows else ()
    support = Support(got, (rows[0].name(),) if rows else _names_for_some(BACKWARD, kinds, PLAIN), found)
    if not found and kinds in _ONE_SPAN:
        support = Support(got, (rows[-1].op,), _shipped(rows[-1], PLAIN, q))
    never = choose_backward(forward, support.built) == KernelUse.NEVER
    if deterministic and never and any(x.startswith("selection") for x in kinds) and library.local_architectures():
        wanted = "operands that a kernel for it is built for, or 'reference' and --xla_gpu_deterministic_ops"
        raise not_built(op, "deterministic", f"True for {got}", wanted, support.kernels)
    return support


def kinds_of(sources: Sequence[Source]) -> tuple[str, ...]:
    return tuple(kind for source in sources for kind in source.kinds)


def _are_ordered(modes: Sequence[AttentionMode]) -> bool:
    return any(mode.is_batch_invariant for mode in modes)


def _kernel_mode(modes: Sequence[AttentionMode]) -> Mode:
    """The mode that a kernel with these modes inside is compiled for."""
    return Mode(**{name: value for mode in modes for name, value in mode.kernel_mode.items()})


def _shipped(row: Kernel, mode: Mode, q: jax.Array, **choices: Any) -> tuple[str, ...]:
    """The architectures that have the kernel for q's d and dtype."""
    choices |= {} if row.packing is None else {"packing": row.packing}
    return library.shipped_for(row.name(mode), d=q.shape[-1], dtype=q.dtype.name, **choices)


def _first_shipped(rows: Sequence[Kernel], mode: Mode, q: jax.Array) -> tuple[Kernel | None, tuple[str, ...]]:
    """The first kernel that is shipped for q in this mode, or the first one in this mode, and its architectures."""
    rows = [row for row in rows if library.shipped_for(row.name(mode))]
    found = next((row for row in rows if _shipped(row, mode, q)), next(iter(rows), None))
    return found, _shipped(found, mode, q) if found else ()


def _names_for_some(table: dict[tuple[str, ...], tuple[Kernel, ...]], kinds: tuple[str, ...], mode: Mode) -> Any:
    """The kernels in this mode for one of these kinds, for errors."""
    some = [rows for other, rows in table.items() if set(other) & set(kinds)]
    names = [row.name(mode) for rows in some for row in rows[:1]]
    return tuple(dict.fromkeys(name for name in names if library.shipped_for(name)))


def _goes_inside(mode: AttentionMode, inside: Sequence[AttentionMode], q: jax.Array, sources: Sequence[Source]) -> bool:
    """True if every device here has a kernel with this mode inside, too, made for as many heads as that without it. A
    program that is made where no device is runs on all architectures.
    """
    here, rows = library.local_architectures(), FORWARD.get(kinds_of(sources), ())
    if not mode.fits(q) or _are_ordered(inside):
        return False
    without, within = (_kernel_mode(x) for x in (inside, [*inside, mode]))
    row, _ = _first_shipped(rows, without, q)  # others serve where this is not built
    return row is not None and _made_alike(q, row.name(within), row.name(without), here)


def _made_alike(q: jax.Array, name: str, other: str, archs: Sequence[str]) -> bool:
    """True if on all of these architectures the kernels of two names that take q are made for as many heads."""

    def made_for(name: str, arch: str) -> int | None:
        built = library.variants_for(name, d=q.shape[-1], dtype=q.dtype.name)
        limits = (v.choices["max_heads"] for v in built if v.arch == arch)
        return min((n for n in limits if n >= q.shape[2]), default=None)

    return bool(archs) and all(made_for(name, arch) == made_for(other, arch) is not None for arch in archs)


# ---- where all sizes are known


class Launch(NamedTuple):
    """A raw call of attention."""

    op: str
    mode: Mode
    operands: Arrays
    """after q"""
    attributes: dict[str, Any]
    before: tuple[str, ...]
    """the kernels that made its operands"""

    def run(self, q: jax.Array, scale: float) -> Arrays:
        return raw.attention(self.op, self.mode, q, *self.operands, scale=scale, **self.attributes)

    def kernels(self, q: jax.Array) -> tuple[str, ...]:
        """All that it launches, in order, by their names in the manifest."""
        how = {name: self.attributes[name] for name in ("order", "packing", "most") if name in self.attributes}
        splits = raw.parts(self.op, self.mode, q, self.operands, **how).splits
        after = ("row_columns",) if self.mode == BY_COLUMNS else ("combine",) if splits > 1 else ()
        return (*self.before, name_of(self.op, self.mode), *after)


def launch(q: jax.Array, sources: Sequence[Source], modes: Sequence[AttentionMode], sink: jax.Array) -> Launch:
    """The call over these sources, with these modes inside."""
    made = [keys for mode in modes if (keys := mode.keys(q, sources)) is not None]
    keys = made[0] if made else Keys.of(sources)
    kinds, mode, is_ordered = kinds_of(sources), _kernel_mode(modes), _are_ordered(modes)
    row, mode = _chosen_in_order(q, kinds, keys.parts) if is_ordered else (_row(FORWARD[kinds], mode, q), mode)
    operands = (*row.operands(*keys.parts), sink, *keys.operands, *(x for y in modes for x in y.operands))
    attributes: dict[str, Any] = {"order": raw.ORDER} if is_ordered else {}
    attributes |= {} if row.packing is None else {"packing": row.packing}
    (first, *_) = keys.parts
    attributes |= {"most": first.width, "window": first.window} if isinstance(first, PagedSource) else {}
    attributes |= {name: value for x in modes for name, value in x.attributes.items()}
    if is_ordered and mode == PLAIN and _by_columns(row.op, q, raw.keys_of(row.op, operands), row.packing or ""):
        mode = BY_COLUMNS
    return Launch(row.op, row.in_mode(mode), operands, attributes, keys.launched)


def _row(rows: Sequence[Kernel], mode: Mode, q: jax.Array) -> Kernel:
    row, _ = _first_shipped(rows, mode, q)
    assert row is not None
    return row


def _chosen_in_order(q: jax.Array, kinds: tuple[str, ...], parts: Sequence[Part]) -> tuple[Kernel, Mode]:
    """The kernel that sums in the canonical order. Tiles of keys are counted from the first key that a query sees: a
    tile of rows has one query's heads, or for separate K and V all queries begin with the first key.
    """
    made_for_them, *others = FORWARD[kinds]
    if kinds not in LISTED:
        return made_for_them, PLAIN
    if not _shipped(LISTED[kinds], PLAIN, q):  # a kernel of separate K and V takes the keys twice
        return others[0], PLAIN
    keys = (*(part.keys.shape[1] for part in parts), 1)[:2]
    if _spans_have_order(q) and not _by_columns(LISTED[kinds].op, q, keys):
        return made_for_them, PLAIN
    if len(parts) == 1 and _groups_pay(q):
        return SPAN_OF_FEW_HEADS, FEW_HEADS
    return LISTED[kinds], PLAIN


def _spans_have_order(q: jax.Array) -> bool:
    """True if the kernels of spans take q in the canonical order: a tile of rows has heads of one query."""
    return q.shape[2] % raw.TILE == 0


def _groups_pay(q: jax.Array) -> bool:
    """True if the kernel of few heads is to take q in the canonical order: queries in a row fill a tile of rows."""
    _, s_q, h_q, _ = q.shape
    if not isinstance(s_q, int) or not isinstance(h_q, int) or h_q > raw.FEW_HEADS or s_q * h_q < raw.TILE:
        return False
    return bool(_shipped(SPAN_OF_FEW_HEADS, FEW_HEADS, q))


def _by_columns(op: str, q: jax.Array, keys: Sequence[Any], packing: str = "") -> bool:
    """True if two kernels that share out keys and columns are to attend for q, with so many keys of each source."""
    b, s_q, h_q, d = q.shape
    built = library.variants_for(name_of(op, BY_COLUMNS), d=d, dtype=q.dtype.name, packing=packing)
    if not built or h_q <= raw.FEW_HEADS or not all(isinstance(x, int) for x in (b, s_q, h_q, *keys)):
        return False
    return columns_pay(b * s_q * -(-h_q // raw.TILE), raw.tiles_of(keys), processors(built[0].arch))


class GradientLaunch(NamedTuple):
    """The raw call of a gradient, and what passes around it do."""

    op: str
    mode: Mode
    operands: Arrays
    """after the rows"""
    attributes: dict[str, Any]
    inside: tuple[AttentionMode, ...]
    outside: tuple[AttentionMode, ...]
    deterministic: bool

    def run(
        self, q: Any, do: Any, lse: Any, sink_factor: Any, delta: Any, sources: Sequence[Source], *, scale: float
    ) -> Arrays:
        for mode in self.inside:
            do = mode.cotangent(do)
        rows, how = (q, do, lse, sink_factor, delta), {"deterministic": self.deterministic, **self.attributes}
        if self.op != DENSE:
            return gradients.mla_bwd(self.op, self.mode, *rows, *self.operands, scale=scale, **how)
        dq, *of_keys = gradients.mha_bwd(*rows, *self.operands, scale=scale, **how)
        return dq, *(x.astype(jnp.float32) for x in of_keys)

    def kernels(self) -> tuple[str, ...]:
        """All that is launched, in order, by their names in the manifest."""
        if self.op == DENSE:
            found = ["tile_spans", *(["mha_dkdv", DENSE] if self.deterministic else ["mha_dqdkdv"])]
        else:
            bounds = dataclasses.replace(self.mode, bounds=True)
            found = [name_of(self.op, mode) for mode in (*[bounds] * self.deterministic, self.mode)]
        for before, after in (mode.passes_of_gradient for mode in self.outside):
            found = [*before, *found, *after]
        return tuple(found)


def launch_gradient(
    q: jax.Array, sources: Sequence[Source], modes: Sequence[AttentionMode], deterministic: bool
) -> GradientLaunch:
    """The call of the gradient over these sources: in these modes one kernel, or passes around that without them."""
    row = _row(BACKWARD[kinds_of(sources)], PLAIN, q)
    inside: list[AttentionMode] = []
    outside: list[AttentionMode] = []
    for mode in modes:
        name = row.name(_kernel_mode([*inside, mode]))
        archs = library.local_architectures() or library.shipped_for(name)
        is_alone = bool(mode.kernel_mode) and not deterministic and _made_alike(q, name, row.name(), archs)
        (inside if is_alone else outside).append(mode)
    operands = (*row.operands(*sources), *(x for mode in inside for x in mode.operands))
    attributes = {name: value for mode in inside for name, value in mode.attributes.items()}
    if row.op == DENSE:
        (source,) = sources
        assert isinstance(source, SpanSource)
        deterministic = deterministic or not _one_kernel_pays(q, source)
    which = tuple(inside), tuple(outside)
    return GradientLaunch(row.op, row.in_mode(_kernel_mode(inside)), operands, attributes, *which, deterministic)


def _one_kernel_pays(q: jax.Array, source: SpanSource) -> bool:
    """True if one kernel that adds to memory is to make all gradients of a span."""
    known = [n for n in (source.width, source.keys.shape[1]) if isinstance(n, int)]
    is_few = bool(known) and min(known) <= FEW_KEYS
    return not is_few and bool(library.shipped_for("mha_dqdkdv", d=q.shape[-1], dtype=q.dtype.name))
