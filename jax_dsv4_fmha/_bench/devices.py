"""The suite devices: one long sequence over several GPUs, beside one GPU.

A sequence's tokens are shared out over the devices, in a prompt and in a gradient of a layer of DeepSeek-V4-Flash; or
its cache is, in a step of generation. Times are the host's, of many calls in a row.
"""

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._cli.report import table as as_table
from .._definitions.cache import Cache
from ..layers import zigzag
from .layer import FLASH, LayerRow
from .measure import Contestant, Operands, Times
from .row import Row, Suite
from .tables import spread

_ROUNDS = 5
_SETTLING_SECONDS, _BURST_SECONDS = 1.0, 0.4
_AXIS = "ring"


@dataclass(frozen=True, kw_only=True)
class DevicesRow(Row):
    """A row that times `ours` over so many devices, beside one device."""

    devices: int = 2
    peers: tuple[str, ...] = field(default=("one",), compare=False)

    @property
    def sets(self) -> int:
        return 1

    def inputs(self, sets: int) -> list[Operands]:
        """There are none here: `programs` draws operands where they are to be."""
        return []

    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        """There are none, because the profiler would add up the kernels of all devices."""
        if (here := jax.device_count()) < self.devices:
            raise RuntimeError(f"needs {self.devices} devices, and JAX sees {here}")
        return {}

    def times(self, measured: dict[str, Times], contestants: Mapping[str, Contestant]) -> dict[str, Times]:
        """The times of one device and of "ours"; none where there are too few devices."""
        if jax.device_count() < self.devices:
            return {}
        return {name: _clocked(run) for name, run in self.programs().items()}

    @property
    def mesh(self) -> Mesh:
        return jax.make_mesh((self.devices,), (_AXIS,), (AxisType.Auto,), devices=jax.devices()[: self.devices])

    def programs(self) -> dict[str, Callable[[], Any]]:
        """A call on one device, and "ours" over all of them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SequenceRow(DevicesRow):
    """A prompt or a gradient of one sequence, whose tokens the devices share."""

    op = "DSV4Attention"

    tokens: int
    ratio: int
    has_gradient: bool = False
    is_zigzag: bool = False
    """whether the devices share the tokens in zigzag order"""

    @property
    def of_one(self) -> LayerRow:
        """The row of the suite layer that one device computes."""
        return LayerRow(b=1, s_q=self.tokens, s_kv=self.tokens, ratio=self.ratio, has_gradient=self.has_gradient)

    @property
    def name(self) -> str:
        return f"{self.of_one.name} over {self.devices} devices" + ", zigzag" * self.is_zigzag

    @property
    def flops(self) -> float:
        return self.of_one.flops

    @property
    def bytes(self) -> float:
        return self.of_one.bytes

    def programs(self) -> dict[str, Callable[[], Any]]:
        layer, mesh = self.of_one.layer, self.mesh

        def ours(params: Any, x: jax.Array, dy: jax.Array, devices: int | None = None) -> Any:
            y, vjp = jax.vjp(lambda params, x: layer(params, x, zigzag=devices).y, params, x)
            return vjp(dy) if self.has_gradient else y

        drawn = self.of_one.inputs(1)[0]
        operands, devices = (drawn["params"], drawn["x"], drawn["dy"]), self.devices if self.is_zigzag else None
        params, *rows = operands
        rows = [zigzag(x, devices) for x in rows] if devices else rows
        shared_out = (
            jax.device_put(params, NamedSharding(mesh, P())),
            *(jax.device_put(x, NamedSharding(mesh, P(None, _AXIS))) for x in rows),
        )
        return {
            "one": _compiled(ours, operands),
            "ours": _compiled(functools.partial(ours, devices=devices), shared_out),
        }


@dataclass(frozen=True, kw_only=True)
class LongCacheRow(DevicesRow):
    """A step of generation after a context whose entries and index keys the devices share: examples/long_cache.py.

    In a program of several layers each begins after the one before. All read one cache, which is too large for L2.
    """

    op = "long_cache"

    b: int
    tokens: int
    ratio: int = 4
    layers: int = 1

    @property
    def entries(self) -> int:
        return self.tokens // self.ratio

    @property
    def name(self) -> str:
        layers = f", {self.layers} layers" * (self.layers > 1)
        after = f"step of ratio {self.ratio} after {self.tokens}, b{self.b}"
        return f"{after}{layers}, the cache over {self.devices} devices"

    @property
    def flops(self) -> float:
        """The operations of scores, and of attention to the window and the chosen entries."""
        seen = _of("sliding_window") + _of("index_topk")
        scores = 2.0 * _of("index_n_heads") * _of("index_head_dim") * self.entries
        return self.layers * self.b * (scores + 4.0 * _of("num_attention_heads") * _of("head_dim") * seen)

    @property
    def bytes(self) -> float:
        """The bytes of index keys, the window and the chosen entries."""
        seen = _of("sliding_window") + _of("index_topk")
        return 2.0 * self.layers * self.b * (self.entries * _of("index_head_dim") + seen * _of("head_dim"))

    def contestants(self, name: str, inputs: Sequence[Operands]) -> dict[str, Contestant]:
        importlib.import_module("examples.long_cache")  # only a clone has it, and only its root finds it
        return super().contestants(name, inputs)

    def programs(self) -> dict[str, Callable[[], Any]]:
        example: Any = importlib.import_module("examples.long_cache")
        mesh = self.mesh
        keys = iter(jax.random.split(jax.random.key(0), 8))
        b, d, h_i, d_i = self.b, _of("head_dim"), _of("index_n_heads"), _of("index_head_dim")
        h, window, how = _of("num_attention_heads"), _of("sliding_window"), {"ratio": self.ratio}
        how["topk"] = _of("index_topk")

        def normal(*shape: int, dtype: Any = jnp.bfloat16, spec: P | None = None) -> jax.Array:
            where = None if spec is None else NamedSharding(mesh, spec)
            draw = jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=dtype), out_shardings=where)
            return draw(next(keys))

        q, index_q, weights = normal(b, 1, h, d), normal(b, 1, h_i, d_i), normal(b, 1, h_i, dtype=jnp.float32)
        recent, sink = Cache(normal(b, window, d)), normal(h, dtype=jnp.float32)
        lengths = jnp.full(b, self.tokens, jnp.int32)
        before, after = (q, index_q, weights, recent), (lengths, sink)
        entries, index_keys = (normal(b, self.entries, width, spec=P(None, _AXIS)) for width in (d, d_i))
        everywhere = jax.device_put((before, after), NamedSharding(mesh, P()))
        on_one = jax.device_put((entries, index_keys), mesh.devices.flat[0])
        many = functools.partial(example.attend, mesh=mesh, window=window, **how)
        one = functools.partial(example.attend_on_one, window=window, **how)

        def step(attend: Callable[..., Any], q: jax.Array, index_q: jax.Array, *others: Any) -> Any:
            o, lse = attend(q, index_q, *others)
            for _ in range(1, self.layers):
                little = o * 2.0**-20  # so that a layer waits, and chooses among scores like those of the first
                o, lse = attend(q + little, index_q + little[:, :, :h_i, :d_i], *others)
            return o, lse

        return {
            "one": _compiled(functools.partial(step, one), (*before, *on_one, *after)),
            "ours": _compiled(
                functools.partial(step, many), (*everywhere[0], example.Held(entries, index_keys), *everywhere[1])
            ),
        }


def _of(name: str) -> int:
    """A size of V4-Flash."""
    size: Any = FLASH[name]
    return int(size)


def _compiled(f: Callable[..., Any], operands: Sequence[Any]) -> Callable[[], Any]:
    return functools.partial(jax.jit(f).lower(*operands).compile(), *operands)


def _clocked(run: Callable[[], Any]) -> Times:
    """The time of a call, many in a row.

    GPUs that rested run faster until they reach the limit of their power, and then each at a clock of its own. So a
    program is timed after a second of itself, as it runs in a long job.
    """

    def seconds(calls: int) -> float:
        began, last = time.monotonic(), None
        for _ in range(calls):
            last = run()
        jax.block_until_ready(last)
        return (time.monotonic() - began) / calls

    seconds(1)
    calls = [max(1, min(1000, int(wanted / seconds(2)))) for wanted in (_SETTLING_SECONDS, _BURST_SECONDS)]
    seconds(calls[0])
    rounds = [seconds(calls[1]) for _ in range(_ROUNDS)]
    return {"seconds": statistics.median(rounds), "rounds": rounds, "kernels": {}}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        line = [row["name"], *["-"] * 5]
        if ours := row["times"].get("ours"):
            one = row["times"]["one"]
            each = [(f"{x['seconds'] * 1e3:.3f}", f"{spread(x['rounds']):.1%}") for x in (one, ours)]
            line[1:] = [*each[0], *each[1], f"{one['seconds'] / ours['seconds']:.2f}"]
        lines.append(line)
    notes = ["the host's clock; times: one device's over that of all"]
    notes += [f"- {row['name']}: {row['skipped']['ours']}" for row in rows if "ours" in row["skipped"]]
    return "\n".join([as_table(["row", "ms on one", "spread", "on all", "spread", "times"], lines), *notes])


_RATIOS: Any = FLASH["compress_ratios"]
_ORDERS = tuple((ratio, zz) for ratio in _RATIOS for zz in (False, True)[: 1 + (ratio > 0)])
"""The kinds of layers, those whose work grows along the sequence in both orders of its tokens"""
SUITE = Suite(
    "devices",
    "#4f6f8f",
    (
        *(SequenceRow(tokens=65536, ratio=ratio, is_zigzag=zz) for ratio, zz in _ORDERS),
        *(LongCacheRow(b=8, tokens=2**20, layers=n) for n in (1, 8, 43)),
        *(SequenceRow(tokens=65536, ratio=ratio, is_zigzag=zz, has_gradient=True) for ratio, zz in _ORDERS),
    ),
    table,
)
