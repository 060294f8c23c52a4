"""Chunks of prompts by one program for each kind of layers, which the host starts one after another.

`jax.jit(model.read)` is one program of all layers. XLA inlines a layer wherever it is called, so V4-Flash's 43 layers
take it more than a minute, although there are only four kinds of them. The layers of a chunk of 4096 tokens keep a
device busy for milliseconds each, and a call costs the host some tenths of one: so it is ahead of the device by many
layers. A step's layers are too short for that.
"""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from . import devices
from .caches import Caches
from .drafts import DSpark
from .layout import SPLIT
from .model import Model, OfLayer, Shared, count_of, reading
from .streams import Streams, means_of

BEFORE, AFTER = ("embed", "words"), ("hc", "norm", "head")
"""the parameters that are used before the first layer, and after the last"""


def shapes(where: Any, results: Any) -> Any:
    """The shapes of results, with these shardings, of which one may be of several results. None is no sharding."""

    def placed(where: Any, results: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), results)

    return jax.tree.map(placed, where, results, is_leaf=lambda x: x is None)


class Reader:
    """`read` of a model, compiled for operands of some shapes. It donates the caches. Its results lie whole on
    every device of a mesh, as caches do that `Model.cache` makes. Between programs a device has its own tokens of the
    streams, where `devices.of_tokens` says so.

    Examples:
      >>> import jax
      >>> import numpy as np
      >>> from examples.deepseek_v4 import common
      >>> from examples.deepseek_v4.reader import Reader
      >>> model = common.model_of(None)
      >>> params, caches = model.init(jax.random.key(0)), model.cache(1, 64)
      >>> tokens, start, lengths = np.zeros((1, 16), np.int32), np.zeros(1, np.int32), np.full(1, 16, np.int32)
      >>> read = Reader(model, params, tokens, caches, start, lengths)
      >>> logits, caches = read(params, tokens, caches, start, lengths)
    """

    def __init__(
        self, model: Model | DSpark, params: Any, tokens: Any, caches: Caches, start: Any, lengths: Any, **options: str
    ) -> None:
        """Compiles the programs for such operands, or for what has their shapes and shardings; options: XLA's."""
        mesh = jax.sharding.get_mesh()
        apart = devices.of_tokens(tokens.shape[1], SPLIT) if devices.share(SPLIT) else ()
        specs = P(), P(None, apart)
        everywhere, own = (None if mesh.empty else NamedSharding(mesh, spec) for spec in specs)
        of_results = {self._begin: (own, everywhere, everywhere), self._end: everywhere, self._drafts: everywhere}
        made: dict[Any, tuple[Any, Any]] = {}
        self.drafts = model if isinstance(model, DSpark) else None
        self.model = model.model if isinstance(model, DSpark) else model
        order, began = [], time.perf_counter()

        def compiled(f: Callable[..., Any], *given: Any) -> Any:
            """The shapes of the results of f, whose program is now one more in the order of calls."""
            leaves, kind = jax.tree.flatten(given)
            key = *((x.shape, x.dtype) for x in leaves), kind, f
            if key not in made:
                program = lambda *given: f(*given)  # noqa: E731
                program.__name__ = f"chunk_{len(made)}"  # a profile tells programs apart by their names
                where = of_results.get(f, (own, own, everywhere))
                how: dict[str, Any] = {"out_shardings": where, "compiler_options": options or None}
                how["donate_argnums"] = 0 if jax.tree.leaves(given[0]) else ()
                lowered = jax.jit(program, **how).lower(*given)
                made[key] = pool.submit(lowered.compile), shapes(where, lowered.out_info)
            order.append(key)
            return made[key][1]

        with ThreadPoolExecutor() as pool:
            self._through(compiled, params, tokens, caches, start, lengths)
            self.seconds = time.perf_counter() - began
            """of tracing and lowering, while XLA compiles what is lowered"""
        programs = {key: program.result() for key, (program, _) in made.items()}
        self.programs = list(programs.values())
        """a program for each kind of layers, and those before and after them"""
        self._calls = [programs[key] for key in order]

    def __call__(
        self, params: Any, tokens: jax.Array, caches: Caches, start: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """Does what the model's `read` does."""
        calls = iter(self._calls)
        return self._through(lambda _, *given: next(calls)(*given), params, tokens, caches, start, lengths)

    def as_text(self) -> str:
        """The compiled programs, one after another."""
        return "\n".join(program.as_text() or "" for program in self.programs)

    def _through(
        self, call: Callable[..., Any], params: Any, tokens: Any, caches: Caches, start: Any, lengths: Any
    ) -> tuple[Any, Caches]:
        """All programs in their order, by call(function, what is donated, operands…): logits, and caches."""
        before, after = ({name: params[name] for name in names if name in params} for names in (BEFORE, AFTER))
        of_chunk = tokens, start, lengths
        x, rows, history = call(self._begin, caches.history, before, *of_chunk)
        kinds = {layer: functools.partial(self._layer, layer) for layer in self.model.layers}

        def run(layer: Any, p: Any, of_layer: OfLayer, x: Streams, cache: Any, shared: Shared) -> Any:
            return call(kinds[layer], cache, p, of_layer, x, shared, *of_chunk)

        x, outputs, seen = self.model.through(run, params, x, rows, caches.layers)
        logits, means = call(self._end, None, after, x, seen, *of_chunk)
        drafts = call(self._drafts, caches.drafts, params["drafts"], means, *of_chunk) if self.drafts else ()
        return logits, Caches([out.cache for out in outputs], history, drafts)

    # ---- what is compiled

    def _begin(self, history: Any, params: Any, tokens: Any, start: Any, lengths: Any) -> Any:
        rows, history = self.model.rows(params, tokens, history, start, count_of(tokens, start, lengths))
        return self.model.embedded(params["embed"][tokens]), rows, history

    def _layer(
        self, layer: Any, cache: Any, p: Any, of_layer: OfLayer, x: Any, shared: Any, tokens: Any, *at: Any
    ) -> Any:
        before, x, out = self.model.run(layer, p, of_layer, x, tokens, cache, shared, reading(*at))
        # what nobody takes would be copied, or kept until the last layer
        return before if self.model.delayed and self.model.seen else None, x, out._replace(y=None)

    def _end(self, _: None, params: Any, x: Streams, seen: list[Streams], tokens: Any, start: Any, lengths: Any) -> Any:
        last = jnp.maximum(count_of(tokens, start, lengths) - 1, 0)
        return self.model.logits(params, x.at(last))[:, 0], means_of(seen)

    def _drafts(self, caches: Any, params: Any, means: jax.Array, _: Any, start: Any, lengths: Any) -> Any:
        assert self.drafts is not None
        return self.drafts.kept(params, means, caches, "__call__", start, lengths)
