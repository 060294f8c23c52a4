"""The programs of a server: what they get from the host in a call, what they tell it, and what stays on the device.

One array goes to the device in a call, and one comes back. A call may begin before the host has heard of the one before
it: the device itself keeps the last token of each place, and how many tokens its caches hold.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsv4_fmha.layers import STEP_OPTIONS

from .sampling import choose


class Call(NamedTuple):
    """The arrays that a chunk or a step gets from the host, with a row for each place that may take part."""

    place: Any
    """int32 `[rows]`; the number of places is none"""
    start: Any
    """int32 `[rows]`: the position of a chunk's first token; in a step, a position not after that of the new one"""
    most: Any
    """int32 `[rows]`: tokens that the caches hold afterwards, in a step at most; 0 is a row that takes no part"""
    temperature: Any
    top_p: Any
    """float32 `[rows]`"""
    seed: Any
    """uint32 `[rows]`"""
    slot: Any
    """int32 `[rows]`: where a chunk keeps the place as it is afterwards, beside its pages; -1 is nowhere"""
    tokens: Any
    """int32 `[rows, s]`: those of a chunk, or drafts that the host has found"""
    pages: Any
    """int32 `[rows, n]`: the pages from that of `start` on; -1 where none is"""

    def packed(self) -> np.ndarray:
        """int32 `[rows, columns]`: all in one array, which is one transfer."""
        return np.concatenate([x.view(np.int32).reshape(len(x), -1) for x in self], 1)

    @classmethod
    def unpacked(cls, packed: jax.Array, s: int) -> "Call":
        """The call on the device; s: its tokens of a row."""
        place, start, most, *others, slot = packed[:, :7].T
        dtypes = jnp.float32, jnp.float32, jnp.uint32
        sampling = (jax.lax.bitcast_convert_type(x, dtype) for x, dtype in zip(others, dtypes, strict=True))
        return cls(place, start, most, *sampling, slot, packed[:, 7 : 7 + s], packed[:, 7 + s :])


class Flight(NamedTuple):
    """A call that the device works on, or has done, and the host has not heard of."""

    rows: np.ndarray
    """bool: those that take part"""
    place: np.ndarray
    """int32 `[n]`, of each of these"""
    since: np.ndarray
    """int32 `[n]`: the number of the request that had the place, among all that got one"""
    says: np.ndarray
    """int32 `[n]`: how many tokens the call says, at most"""
    found: jax.Array
    """int32 `[rows, rounds, 2 + s]`: how many tokens are said, of how many drafts, and the tokens"""
    is_step: bool


class State(NamedTuple):
    """The arrays that stay on the device, with a number or a row for each place."""

    table: jax.Array
    """int32 `[places, n]`: the pages of each place; one table for all layers"""
    cached: jax.Array
    """int32 `[places]`: tokens that the caches hold"""
    last: jax.Array
    """int32 `[places]`: the token after them"""
    drafts: jax.Array
    """int32 `[places, n]`: the model's own drafts of what follows that, or -1 each"""
    caches: Any
    kept: Any
    """caches without pages, with a row for each prefix (prefixes.py), or None"""


class Programs:
    """The jitted functions of a server, each of which takes the state and returns it anew; and the first state.

    Args:
      caches: of the model, empty.
      table: the shape of the table of pages: places, and pages of each.
      page, chunk: in tokens.
      ahead: tokens of a step, at most.
      rounds: steps of a call.
      own_drafts: whether drafts are the model's own, and not the host's.
      prefixes: how many are kept, at most.
      reader: makes of the model and operands what is called in place of `model.read`, apart from all else that a chunk
        takes; None is one program.
    """

    def __init__(
        self,
        model: Any,
        caches: Any,
        table: tuple[int, ...],
        page: int,
        chunk: int,
        ahead: int,
        own_drafts: bool,
        prefixes: int,
        rounds: int,
        reader: Callable[..., Callable[..., Any]] | None = None,
    ) -> None:
        b, pages = table
        numbers = jnp.full(table, -1, jnp.int32), *(jnp.zeros(b, jnp.int32) for _ in range(2))
        numbers = *numbers, jnp.full((b, (ahead - 1) * own_drafts), -1, jnp.int32)
        kept = None
        if prefixes:
            kept = jax.tree.map(lambda x: jnp.zeros((prefixes, *x.shape[1:]), x.dtype), caches.rings())
        if not jax.sharding.get_abstract_mesh().empty:
            numbers, kept = jax.device_put((numbers, kept), jax.sharding.PartitionSpec())
        state = State(*numbers, caches, kept)
        where = jax.tree.map(lambda x: x.sharding, state)
        # All stay where they are, and are bound to it: programs for what is not would be compiled again for results.
        self.state = jax.device_put(state, where)

        def entered(call: Call, table: jax.Array) -> jax.Array:
            """The table of pages with those of the call in it."""
            which = call.start[:, None] // page + jnp.arange(call.pages.shape[1])
            which = jnp.where((call.most > 0)[:, None] & (call.pages >= 0), which, pages)
            return table.at[call.place[:, None], which].set(call.pages, mode="drop")

        def before(state: State, packed: jax.Array) -> tuple[Call, Any, jax.Array]:
            """A chunk's call, the caches of its places, and the table of pages."""
            call = Call.unpacked(packed, chunk)
            table = entered(call, state.table)
            own = state.caches.take(call.place).with_block_table(table[call.place])
            return call, own, table

        def after(state: State, own: Any, call: Call, logits: jax.Array) -> tuple[jax.Array, State]:
            chosen = choose(logits[:, None], call.most[:, None], call.temperature, call.top_p, call.seed)
            at = jnp.where(call.most > 0, call.place, b)
            numbers = (state.cached, call.most), (state.last, chosen[:, 0]), (state.drafts, -1)
            one, none = jnp.ones_like(chosen), jnp.zeros_like(chosen)
            numbers = (x.at[at].set(y, mode="drop") for x, y in numbers)
            kept, slot = state.kept, jnp.where(call.slot >= 0, call.slot, prefixes)
            kept = kept.put(slot, own.rings()) if prefixes else None
            found = jnp.concatenate([one, none, chosen], 1)[:, None]
            return found, State(state.table, *numbers, state.caches.put(at, own), kept)

        def read(parameters: Any, state: State, packed: jax.Array) -> tuple[jax.Array, State]:
            call, own, table = before(state, packed)
            logits, own = model.read(parameters, call.tokens, own, call.start, call.most)
            return after(state._replace(table=table), own, call, logits)

        def say(parameters: Any, state: State, packed: jax.Array) -> tuple[jax.Array, State]:
            call = Call.unpacked(packed, 0 if own_drafts else ahead - 1)
            state = state._replace(table=entered(call, state.table))
            step = functools.partial(say_once, parameters, call)
            # One call of the host for several steps: it takes the longer, the more arrays a model has.
            state, found = jax.lax.scan(lambda state, _: step(state), state, length=rounds)
            return jnp.swapaxes(found, 0, 1), state

        def say_once(parameters: Any, call: Call, state: State) -> tuple[State, jax.Array]:
            """A step: the state after it, and int32 `[rows, 2 + ahead]`, as `Flight.found` has it."""
            table, start = state.table, state.cached
            drafts = state.drafts if own_drafts else call.tokens
            says = start < call.most
            start = jnp.where(says, start, 0)
            lengths = jnp.where(says, jnp.minimum(start + 1 + (drafts >= 0).sum(1), call.most), 0)
            tokens = jnp.concatenate([state.last[:, None], jnp.maximum(drafts, 0)], 1)
            caches = state.caches.with_block_table(table)
            logits, caches = model.steps(parameters, tokens, caches, start, lengths)
            after = start[:, None] + jnp.arange(1, ahead + 1)
            chosen = choose(logits, after, call.temperature, call.top_p, call.seed)
            right = accepted(tokens, start, lengths, chosen)
            said = jnp.where(says, 1 + right, 0)
            cached, last = state.cached + said, jnp.take_along_axis(chosen, right[:, None], 1)[:, 0]
            last, new = jnp.where(says, last, state.last), state.drafts
            if own_drafts:
                new, caches = model.propose(parameters, last, caches, jnp.where(says, cached, 0))
                new = jnp.where(says[:, None], new[:, : ahead - 1], -1)
            found = jnp.concatenate([said[:, None], (lengths - start - says)[:, None], chosen], 1)
            return State(table, cached, last, new, caches, state.kept), found

        def begin(state: State, numbers: jax.Array) -> State:
            """Lets a place go on from a prefix: numbers are the place, the slot, and the place's row of the table."""
            place, slot, row = numbers[:1], numbers[1:2], numbers[None, 2:]
            caches = state.caches.put(place, state.kept.take(slot))
            return state._replace(table=state.table.at[place].set(row, mode="drop"), caches=caches)

        if reader is None:
            self.read = jax.jit(read, donate_argnums=1, out_shardings=(None, where))
        else:
            everywhere = None if jax.sharding.get_abstract_mesh().empty else jax.sharding.PartitionSpec()
            enter = jax.jit(before, out_shardings=everywhere)
            of_rest = where._replace(caches=where.caches.with_pools([None] * len(caches.pools())))
            leave = jax.jit(after, donate_argnums=0, out_shardings=(None, of_rest))
            self.read = in_parts(enter, functools.partial(reader, model), leave)
        self.say = jax.jit(say, donate_argnums=1, out_shardings=(None, where), compiler_options=STEP_OPTIONS)
        self.begin = jax.jit(begin, donate_argnums=0, out_shardings=where)


def in_parts(before: Callable[..., Any], reader: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
    """A chunk by several programs, which the host starts one after another: those of `reader` between two others, which
    are not given pools of pages.
    """
    made: list[Callable[..., Any]] = []

    def read(parameters: Any, state: State, packed: np.ndarray) -> tuple[jax.Array, State]:
        pools = state.caches.pools()
        empty, none = [np.zeros((0, *x.shape[1:]), x.dtype) for x in pools], [None] * len(pools)
        call, own, table = before(state._replace(caches=state.caches.with_pools(empty)), packed)
        given = parameters, call.tokens, own.with_pools(pools), call.start, call.most
        if not made:
            made.append(reader(*given))
        logits, own = made[0](*given)
        state = state._replace(table=table, caches=state.caches.with_pools(none))
        found, state = after(state, own.with_pools(none), call, logits)
        return found, state._replace(caches=state.caches.with_pools(own.pools()))

    return read


def accepted(tokens: jax.Array, start: jax.Array, lengths: jax.Array, chosen: jax.Array) -> jax.Array:
    """Counts the drafts of a step that each place would have said, int32 `[places]`: the first that it has chosen, too.

    tokens: int32 `[places, s]`, the last token and its drafts; chosen: what follows each of them.
    """
    s = tokens.shape[1]
    is_drafted = jnp.arange(1, s) < (lengths - start)[:, None]
    return jnp.cumprod(is_drafted & (tokens[:, 1:] == chosen[:, : s - 1]), 1).sum(1, dtype=jnp.int32)
