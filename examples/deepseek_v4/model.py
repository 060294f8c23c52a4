"""DeepSeek-V4 as functions of arrays: from tokens to logits.

    X  = n copies of the token's embedding                                        n streams of hidden states
    for every layer, with F = attention, then F = experts:
        pre, post, mix = connections(X)                                           n, n and n × n numbers of each token
        X = mixᵀ X + post · F(norm(pre · X))                                      V4.1: the pre made before this one
    logits = head norm(pre · X)

Attention is `jax_dsv4_fmha.layers`. The experts are one that is shared by all tokens and k of many that a router
chooses: by their scores, or in the first layers by the token's number in a table. Hyper-connections with a doubly
stochastic mix stand where other models add residuals. V4.1 has engrams in two layers (engram.py) and no tables of
experts, and most of its layers attend to what earlier ones have made.

`Model` is the static part, and `Model.from_config` makes it from a config.json: V4-Flash, V4-Pro, V4.1-Flash.
Parameters are a dict that `init` or `weights.load` makes. In a mesh with axes "data", "context", "tensor" and "expert"
(`jax.set_mesh`), `partition` says how parameters lie, in inference and in training (layout.py). Everything else follows
from it and from where tokens are.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha import HyperConnection, PackedExperts, PackedMatrix, fused_moe, hyper_connection, route
from jax_dsv4_fmha.layers import (
    DSV4Attention,
    LayerCache,
    Output,
    Shared,
    from_config,
    step_product,
    unzigzag,
)
from jax_dsv4_fmha.layers import zigzag as zigzagged

from . import devices
from .caches import Caches
from .config import Entries
from .engram import BLOCK, Engrams, History, recalled
from .exact import exact_product, split
from .layout import ALL, GROUP, SPLIT, gather, rows_of, scatter, within
from .packed import Packed, in_file, of_data, one_matrix, product
from .sinkhorn import doubly_stochastic
from .streams import Streams, joined, means_of, norm, projected

FIXED = ("routing", "tables", "words")
"""parameters without a gradient: tables and biases of routers, tables of engrams, words of tokens"""
PACKED = (Packed, PackedExperts, PackedMatrix)
FUSED = (4096, jnp.bfloat16)
"""channels and dtype for which `hyper_connection` has kernels; of others its definition would be loops of launches on a
GPU"""
SCORES = ("sqrtsoftplus", "sigmoid")
"""of routers, by the names that configs have for them"""


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a model."""

    layers: tuple[DSV4Attention, ...]
    vocabulary: int
    experts: int
    """routed experts of a layer"""
    chosen: int
    """how many of them a token gets"""
    inner: int
    """channels inside of an expert"""
    hashed: int
    """how many layers, the first ones, choose experts by the token's number"""
    scale: float = 1.5
    """of the routed experts' weights, whose sum is 1 otherwise"""
    limit: float = 10.0
    """bound of the channels inside of an expert"""
    score: str = "sqrtsoftplus"
    streams: int = 4
    sinkhorn: int = 20
    """iterations that make a mix doubly stochastic"""
    hc_eps: float = 1e-6
    temperature: float = 1.0
    """divides the routers' logits"""
    delayed: bool = False
    """whether a sublayer takes in the streams by the numbers that the sublayer before it made (V4.1)"""
    engrams: Engrams | None = None
    seen: tuple[int, ...] = ()
    """layers of which drafts see the streams' mean: after the layer, in V4.1 before it"""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, fake_quantize: bool | None = None) -> "Model":
        """The model of a config.json, given as a path or as its contents, with Hugging Face's names or DeepSeek's.

        fake_quantize: as in `layers.from_config`.

        Raises:
          ValueError: an entry is missing, is not known, or is out of its range.
          NotImplementedError: an entry says what this model does not have.
        """
        try:
            layers = from_config(config, fake_quantize=fake_quantize)  # refuses other models
            read = Entries(config)
        except TypeError as e:  # an entry of another type is as wrong as one out of its range
            raise ValueError(str(e)) from e
        is_v41 = read.has("kv_source_layer_ids", "kv_source_layers")
        if read.has("n_shared_experts") and (shared := read.integer("n_shared_experts", least=0)) != 1:
            raise NotImplementedError(f"config: got {shared} shared experts, wanted 1")
        score = read.get("scoring_func", "score_func", default="sqrtsoftplus")
        if not isinstance(score, str) or score not in SCORES:
            raise NotImplementedError(f"config: got scores by {score}, wanted one of {', '.join(SCORES)}")
        engrams, vocabulary = None, read.integer("vocab_size")
        if read.has(*(name for name in read.all if str(name).startswith("engram_"))):
            engrams = Engrams(
                read.integers("engram_layer_ids", most=len(layers) - 1),
                read.integers("engram_num_embeddings"),
                longest=read.integer("engram_max_ngram_size", least=2),
                heads=read.integer("engram_n_heads"),
                d=read.integer("engram_head_dim"),
                buckets=read.integer("engram_vocab_size"),
                words=read.integer("engram_compressed_vocab_size"),
                pad=read.integer("engram_pad_token_id", "engram_pad_id", default=2, least=0, most=vocabulary - 1),
            )
        experts = read.integer("n_routed_experts", "num_local_experts")
        return cls(
            layers,
            vocabulary=vocabulary,
            experts=experts,
            chosen=read.integer("num_experts_per_tok", "n_activated_experts", most=experts),
            inner=read.integer("moe_intermediate_size", "moe_inter_dim"),
            hashed=read.hash_layers(len(layers)),
            scale=read.number("routed_scaling_factor", "route_scale", default=1.5),
            limit=read.number("swiglu_limit", default=10.0) or float("inf"),
            score=score,
            streams=read.integer("hc_mult", default=4),
            sinkhorn=read.integer("hc_sinkhorn_iters", default=20),
            hc_eps=read.number("hc_eps", default=1e-6),
            temperature=read.number("gate_temp", may_be_0=False) if read.has("gate_temp") else 1.0,
            delayed=is_v41,
            engrams=engrams,
        )

    def with_precision(self, precision: str | None) -> "Model":
        """The same with this choice of its layers: the precision of products by which prompts are read."""
        return dataclasses.replace(
            self, layers=tuple(dataclasses.replace(layer, precision=precision) for layer in self.layers)
        )

    @property
    def hidden(self) -> int:
        return self.layers[0].hidden

    # ---- the model, in the order in which a token sees it

    def __call__(self, params: Any, tokens: jax.Array, zigzag: int | None = None) -> jax.Array:
        """float32 logits `[b, s, vocabulary]` of whole sequences `[b, s]`, without caches.

        zigzag: an int, if "context" shares out tokens, which are in `layers.zigzag` order over so many devices. Logits
          are in that order.
        """

        def attend(layer, p, x, _, shared):
            return layer(p, x, shared=shared, zigzag=zigzag)

        rows, _ = self.rows(params, unzigzag(tokens, zigzag) if zigzag else tokens)
        rows = {i: zigzagged(x, zigzag) for i, x in rows.items()} if zigzag else rows
        return self.forward(params, tokens, rows, [None] * len(self.layers), attend).logits

    def read(
        self, params: Any, tokens: jax.Array, caches: Caches, start: Any, lengths: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """A chunk of prompts `[b, s]` from position `start` on: the logits `[b, vocabulary]` of each one's last token.

        Of a sequence the first `lengths` tokens count, those before `start` included; donate the caches.
        """
        out, caches = self.chunk(params, tokens, caches, start, lengths)
        return out.logits[:, 0], caches

    def chunk(
        self, params: Any, tokens: jax.Array, caches: Caches, start: Any, lengths: jax.Array
    ) -> tuple["Forward", Caches]:
        """Does what `read` does, and returns all that `forward` returns."""

        count, attend = count_of(tokens, start, lengths), reading(start, lengths)
        rows, history = self.rows(params, tokens, caches.history, start, count)
        out = self.forward(params, tokens, rows, caches.layers, attend, jnp.maximum(count - 1, 0))
        return out, Caches(out.caches, history)

    def step(self, params: Any, tokens: jax.Array, caches: Caches, lengths: jax.Array) -> tuple[jax.Array, Caches]:
        """A token `[b]` for each sequence, the last of `lengths` tokens: logits `[b, vocabulary]`; donate caches."""
        logits, caches = self.steps(params, tokens[:, None], caches, lengths - 1, lengths)
        return logits[:, 0], caches

    def several(
        self, params: Any, tokens: jax.Array, caches: Caches, lengths: jax.Array, count: int
    ) -> tuple[jax.Array, Caches]:
        """`count` steps in one program, for one call of the host: the likeliest tokens `[b, count]`. Each step takes
        what the one before has said. Takes what `step` takes.
        """

        def once(now: Any, n: jax.Array) -> Any:
            tokens, caches = now
            logits, caches = self.step(params, tokens, caches, lengths + n)
            tokens = logits.argmax(-1).astype(tokens.dtype)
            return (tokens, caches), tokens

        (_, caches), made = jax.lax.scan(once, (tokens, caches), jnp.arange(count, dtype=lengths.dtype))
        return made.T, caches

    def steps(
        self, params: Any, tokens: jax.Array, caches: Caches, start: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, Caches]:
        """New tokens `[b, s]` from `start` on, as many as `lengths` says: logits `[b, s, vocabulary]`."""
        out, caches = self.new(params, tokens, caches, start, lengths)
        return out.logits, caches

    def new(
        self, params: Any, tokens: jax.Array, caches: Caches, start: jax.Array, lengths: jax.Array
    ) -> tuple["Forward", Caches]:
        """Does what `steps` does, and returns all that `forward` returns."""

        def attend(layer, p, x, cache, shared):
            return layer.step(p, x, cache, shared, start=start, lengths=lengths)

        count = jnp.where(lengths > 0, jnp.clip(lengths - start, 0, tokens.shape[1]), 0)  # idle places keep nothing
        rows, history = self.rows(params, tokens, caches.history, start, count)
        out = self.forward(params, tokens, rows, caches.layers, attend)
        return out, Caches(out.caches, history)

    def rows(
        self,
        params: Any,
        tokens: jax.Array,
        history: History | None = None,
        start: Any = 0,
        count: Any = None,
        place: jax.Array | None = None,
    ) -> tuple[dict[int, jax.Array], History | None]:
        """The rows of the engrams' tables that each token finds, by layer; and the history after the tokens.

        place: int32 `[b, s]`, the position of each token in its document, if a sequence has several.
        """
        if self.engrams is None:
            return {}, None
        rows, after = self.engrams.found(params["words"], tokens, history, start, count, place)
        return {layer: rows[:, :, i] for i, layer in enumerate(self.engrams.layers)}, after

    def forward(
        self,
        params: Any,
        tokens: jax.Array,
        rows: Mapping[int, jax.Array],
        caches: Sequence[Any],
        attend: Callable[[DSV4Attention, Any, jax.Array, Any, Shared], Output],
        at: jax.Array | None = None,
    ) -> "Forward":
        """All layers, with attend(layer, parameters, x, cache, shared) for attention.

        attend is traced once for layers of a kind, so what it traces stays inside of it.

        at: int32 `[b]`: the logits `[b, 1, vocabulary]` of this token of each sequence alone.
        """

        @functools.partial(jax.jit, static_argnums=0)  # StableHLO has a function for each kind, which layers call
        def run(layer, p, of_layer, x, cache, shared):
            return self.run(layer, p, of_layer, x, tokens, cache, shared, attend)

        x, outputs, seen = self.through(run, params, self.embedded(params["embed"][tokens]), rows, caches)
        return Forward(self.logits(params, x if at is None else x.at(at)), outputs, means_of(seen))

    def through(
        self, run: Callable[..., Any], params: Any, x: Streams, rows: Mapping[int, jax.Array], caches: Sequence[Any]
    ) -> tuple[Streams, list[Output], list[Streams]]:
        """All layers by run(layer, parameters, of_layer, streams, cache, shared): the streams after them, attention's
        outputs, and the streams that drafts see.
        """
        outputs, seen, shared = [], [], Shared()
        for i, (layer, p) in enumerate(zip(self.layers, params["layers"], strict=True)):
            before, x, out = run(layer, p, self.of_layer(i, params, rows), x, caches[i], shared)
            shared, outputs = shared.after(out), [*outputs, out]
            if i in self.seen:
                seen.append(before if self.delayed else x)
        return x, outputs, seen

    def run(
        self,
        layer: DSV4Attention,
        p: Any,
        of_layer: "OfLayer",
        x: Streams,
        tokens: jax.Array,
        cache: Any,
        shared: Shared,
        attend: Callable[..., Output],
    ) -> tuple[Streams, Streams, Output]:
        """A layer: the streams before it, with what an engram recalls, and after it; attention's output."""
        before = self.reminded(p, of_layer, x)
        block = functools.partial(self.block, layer, attend=attend)
        given = p, OfLayer(of_layer.routing), before, tokens, cache, shared
        if cache is not None and devices.share(SPLIT):
            block = functools.partial(block, apart=(apart := devices.of_tokens(tokens.shape[1], SPLIT)))
            own = P(None, apart)
            of_given = self._partition_layer(layer, p), P(), own, own, P(), P()
            of_made = own, Output(own, P(), P(), P()), P()
            block = jax.shard_map(block, in_specs=of_given, out_specs=of_made, check_vma=False)
        return before, *block(*given)[:2]

    def embedded(self, y: jax.Array) -> Streams:
        """The streams before the first layer, of the tokens' rows `[b, s, hidden]` of the embedding."""
        x = jnp.zeros((*y.shape[:2], self.streams, self.hidden), y.dtype)
        post, mix = jnp.ones(x.shape[:3]), jnp.zeros((*x.shape[:3], self.streams))
        return Streams(x, y, post, mix, jnp.broadcast_to(jnp.eye(self.streams)[0], x.shape[:3]))

    def of_layer(self, i: int, params: Any, rows: Mapping[int, jax.Array]) -> "OfLayer":
        """The arrays of layer i beside its parameters, with the rows of engrams' tables by layer."""
        return OfLayer(params["routing"][i], params["tables"][str(i)] if i in rows else None, rows.get(i))

    def reminded(self, p: Any, of_layer: "OfLayer", streams: Streams) -> Streams:
        """The streams before a layer with parameters p, and what its engram recalls, if it has one."""
        if of_layer.rows is None:
            return streams
        x = recalled(p["engram"], of_layer.table, streams.after(), of_layer.rows, self.layers[0].eps)
        return Streams.of(x, streams.pre)

    def block(
        self,
        layer: DSV4Attention,
        p: Any,
        of_layer: "OfLayer",
        streams: Streams,
        tokens: jax.Array,
        cache: Any,
        shared: Shared,
        attend: Callable[..., Output],
        apart: tuple[str, ...] = (),
    ) -> tuple[Streams, Output, jax.Array]:
        """A layer with parameters p: the streams after it; attention's output; how many tokens each expert got.

        apart: axes of a mesh whose devices have other tokens of the streams.
        """
        is_trained = cache is None
        of = self.before(p["attention_hc"], p["attention_norm"], streams, is_trained)
        if devices.is_on_each():
            z = gather(of.z, apart, 1)
            out = attend(*devices.own_heads(layer, p["attention"], SPLIT), z, cache, shared)
            out = out._replace(y=devices.summed(out.y, SPLIT, apart))
        else:
            out = attend(layer, p["attention"], of.z, cache, shared)
        streams = Streams(of.x, out.y, of.post, of.mix, of.pre)
        of = self.before(p["moe_hc"], p["moe_norm"], streams, is_trained)
        y, load = self.moe(p["moe"], of_layer.routing, of.z, tokens, is_trained, apart)
        return Streams(of.x, y, of.post, of.mix, of.pre), out, load

    @jax.named_scope("head")
    def logits(self, params: Any, streams: Streams) -> jax.Array:
        """float32 `[b, s, vocabulary]`."""
        x = self.last(params, streams)
        return jnp.einsum("bsm,mv->bsv", x, params["head"], preferred_element_type=jnp.float32)

    def last(self, params: Any, streams: Streams) -> jax.Array:
        """The streams after the last layer as one, normed, `[b, s, hidden]`: what the head multiplies."""
        x, pre, eps = streams.after(), streams.pre, self.layers[0].eps
        if not self.delayed:
            p = params["hc"]
            pre = jax.nn.sigmoid(projected(p["fn"], x, eps) * p["scale"] + p["base"]) + self.hc_eps
        return norm(joined(pre, x), params["norm"], eps)

    # ---- hyper-connections

    @jax.named_scope("connections")
    def before(self, p: Any, weight: jax.Array, streams: Streams, is_trained: bool) -> HyperConnection:
        """The streams before a sublayer with connections p, and what it is given, normed with this weight."""
        x, y, post, mix, pre = streams
        eps, taken = self.layers[0].eps, pre if self.delayed else None
        has_kernel = (self.hidden, x.dtype) == FUSED or jax.default_backend() != "gpu"
        if self.streams == 4 and has_kernel:
            parts, rates = (p["fn"], p["scale"], p["base"], weight), {"eps": eps, "hc_eps": self.hc_eps}
            return hyper_connection(x, y, post, mix, *parts, taken=taken, iterations=self.sinkhorn, **rates)
        x = streams.after()
        pre, post, mix = self.connections(p, x, is_trained)
        return HyperConnection(x, norm(joined(pre if taken is None else taken, x), weight, eps), pre, post, mix)

    def connections(self, p: Any, x: jax.Array, is_trained: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes how streams go into a sublayer and out of it, `[b, s, n]` twice, and past it, `[b, s, n, n]`."""
        n = self.streams
        numbers = projected(p["fn"], x, self.layers[0].eps)
        pre, post, mix = (
            numbers[..., of] * p["scale"][i] + p["base"][of]
            for i, of in enumerate((slice(n), slice(n, 2 * n), slice(2 * n, None)))
        )
        stochastic = functools.partial(doubly_stochastic, iterations=self.sinkhorn, eps=self.hc_eps)
        mix = on_own_tokens(stochastic, mix.reshape(*mix.shape[:-1], n, n), is_trained)
        return jax.nn.sigmoid(pre) + self.hc_eps, 2 * jax.nn.sigmoid(post), mix

    # ---- experts

    @jax.named_scope("moe")
    def moe(
        self,
        p: Any,
        routing: jax.Array,
        x: jax.Array,
        tokens: jax.Array,
        is_trained: bool,
        apart: tuple[str, ...] = (),
    ) -> tuple[jax.Array, jax.Array]:
        """The routed experts and the shared one of x `[b, s, hidden]`; and how many tokens each routed one got.

        is_trained: whether there may be a gradient, which a step's products by kernels have not. apart: as of `block`.
        """
        weights, chosen = self.routed(p["gate"], routing, x, tokens)
        x, weights, chosen = gather((x, weights, chosen), apart, 1)
        load = (chosen[..., None] == jnp.arange(self.experts)).sum((0, 1, 2))  # a scatter's would wait in a row
        matrices = {name: p[name] for name in ("w13", "w2", "shared13", "shared2")}

        def of_all(p: Any, part: Any, x: jax.Array, *of_tokens: jax.Array) -> jax.Array:
            routed = self.of_experts(p["w13"], p["w2"], x, *of_tokens, part)
            return routed + self.of_shared(p["shared13"], p["shared2"], x, is_trained)

        if jax.sharding.get_abstract_mesh().empty:
            return of_all(matrices, 0, x, weights, chosen), load

        def inferred(matrices: Any, *of_tokens: jax.Array) -> jax.Array:
            return devices.summed(of_all(matrices, jax.lax.axis_index("expert"), *of_tokens), SPLIT, apart)

        if devices.is_on_each():
            return inferred(matrices, x, weights, chosen), load
        rows, specs = rows_of(x, is_trained), self._partition_moe(is_trained)
        of_weights = {name: spec_of(w, specs[name]) for name, w in matrices.items()}
        others, alike = within(rows)

        def trained(matrices: Any, *of_tokens: jax.Array) -> jax.Array:
            of_tokens = jax.lax.pcast(of_tokens, alike, to="varying")  # or their gradients would not be summed
            matrices = jax.lax.pcast(matrices, "data", to="varying") if rows[0] else matrices
            of_tokens = gather(of_tokens, others)
            y = jax.lax.psum(of_all(matrices, jax.lax.axis_index(GROUP), *of_tokens), alike)
            return scatter(y, others)

        given = of_weights, rows, rows, rows
        run = jax.shard_map(trained if is_trained else inferred, in_specs=given, out_specs=rows, check_vma=is_trained)
        return run(matrices, x, weights, chosen), load

    def of_shared(self, w13: Any, w2: Any, x: jax.Array, is_trained: bool) -> jax.Array:
        """The shared expert's part of x `[b, s, hidden]`, from this device's channels inside of it."""
        times = product if is_trained else step_product
        inner = times(x, one_matrix(w13)).reshape(*x.shape[:2], 2, -1)
        return times(self.swiglu(inner), one_matrix(w2))

    def routed(
        self, gate: jax.Array, routing: jax.Array, x: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The weights `[b, s, k]` of each token's experts, and their numbers.

        routing is a table `[vocabulary, k]` of experts, or a bias `[experts]` that balances them: it has a say in the
        choice, and none in the weights.
        """
        how = {"score": self.score, "temperature": self.temperature, "scale": self.scale}
        if routing.ndim == 2:
            return route(logits_of(x, gate), table=routing, tokens=tokens, **how)
        return route(logits_of(x, gate), routing, top_k=self.chosen, **how)

    def of_experts(
        self, w13: Any, w2: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array, part: Any = 0
    ) -> jax.Array:
        """Sums what experts add for each token: part number `part` of all, in w13 `[e, 2, inner, hidden]` and w2
        `[e, hidden, inner]`.
        """
        e = len(jax.tree.leaves(w13)[0])
        if not isinstance(w13, Packed):
            return fused_moe(x, w13, w2, chosen - part * e, weights, limit=self.limit, num_experts=self.experts)

        @functools.partial(jax.checkpoint, prevent_cse=False)  # a gradient keeps no matrices that are unpacked
        def add(y: jax.Array, of_expert: Any) -> tuple[jax.Array, None]:
            i, *matrices = of_expert
            w13, w2 = (w.unpacked(x.dtype)[None] for w in matrices)
            return y + fused_moe(x, w13, w2, chosen - (part * e + i), weights, limit=self.limit).astype(y.dtype), None

        return jax.lax.scan(add, 0 * x.astype(jnp.float32), (jnp.arange(e), w13, w2))[0].astype(x.dtype)

    def swiglu(self, x: jax.Array) -> jax.Array:
        """x `[…, 2, inner]`, a gate and what it lets through. In float32."""
        gate, up = jnp.moveaxis(x.astype(jnp.float32), -2, 0)
        y = jax.nn.silu(jnp.minimum(gate, self.limit)) * jnp.clip(up, -self.limit, self.limit)
        return y.astype(x.dtype)

    # ---- parameters and caches

    def init(self, key: jax.Array, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
        """Random parameters: matrices in dtype; norms, connections and routers in float32."""
        keys = iter(jax.random.split(key, 7 + 9 * len(self.layers)))
        m, n, e, inner, grams = self.hidden, self.streams, self.experts, self.inner, self.engrams

        def normal(fan_in: int, *shape: int, dtype: Any = dtype) -> jax.Array:
            return (jax.random.normal(next(keys), shape, jnp.float32) * fan_in**-0.5).astype(dtype)

        def connections(count: int, parts: int) -> dict[str, jax.Array]:
            fn = normal(n * m, count, n * m, dtype=jnp.float32)
            return {"fn": fn, "base": jnp.zeros(count, jnp.float32), "scale": jnp.ones(parts, jnp.float32)}

        def layer(i: int, attention: DSV4Attention) -> dict[str, Any]:
            return {
                **({"engram": engram()} if grams and i in grams.layers else {}),
                "attention": attention.init(next(keys), dtype),
                "attention_norm": jnp.ones(m, jnp.float32),
                "attention_hc": connections((2 + n) * n, 3),
                "moe": {
                    "gate": normal(m, m, e, dtype=jnp.float32),
                    "w13": normal(m, e, m, 2, inner).transpose(0, 2, 3, 1),
                    "w2": normal(inner, e, inner, m).swapaxes(1, 2),
                    "shared13": normal(m, m, 2, inner),
                    "shared2": normal(inner, inner, m),
                },
                "moe_norm": jnp.ones(m, jnp.float32),
                "moe_hc": connections((2 + n) * n, 3),
            }

        def engram() -> dict[str, jax.Array]:
            columns = (grams.longest - 1) * grams.heads * grams.d
            wkv = normal(columns, columns, (n + 1) * m)
            return {"wkv": wkv, "q": jnp.ones((n, m), jnp.float32), "k": jnp.ones((n, m), jnp.float32)}

        def table(rows: int) -> dict[str, jax.Array]:
            values = normal(1, rows, grams.d, dtype=jnp.float8_e4m3fn)
            return {"rows": values, "scales": jnp.ones((rows, grams.d // BLOCK), jnp.float8_e8m0fnu)}

        chosen = jax.random.randint(next(keys), (self.vocabulary, self.chosen), 0, e, jnp.int32)
        made = {
            "embed": normal(1, self.vocabulary, m),
            "layers": [layer(i, x) for i, x in enumerate(self.layers)],
            "norm": jnp.ones(m, jnp.float32),
            "head": normal(m, m, self.vocabulary),
            "routing": [chosen if x < self.hashed else jnp.zeros(e, jnp.float32) for x in range(len(self.layers))],
        }
        if not self.delayed:
            made["hc"] = connections(n, 1)
        if grams:
            made["tables"] = {str(i): table(rows) for i, rows in zip(grams.layers, grams.rows, strict=True)}
            made["words"] = jax.random.randint(next(keys), self.vocabulary, 0, grams.words, jnp.int32)
        return made

    def partition(self, params: Any = None, is_trained: bool = False) -> dict[str, Any]:
        """The PartitionSpec of each parameter, in a mesh with axes "tensor" and "expert".

        Args:
          params: parameters, or their shapes, of which some may be packed, and then have specs of codes and scales, or
            `joined`.
          is_trained: gives those of products in training, and wants an axis "context".
        """
        made = jax.eval_shape(self.init, jax.random.key(0)) if params is None else params
        layers = zip(self.layers, made["layers"], strict=True)
        parts = replicated(made) | {"layers": [self._partition_layer(*of_layer, is_trained) for of_layer in layers]}
        vocabulary = ALL if is_trained else SPLIT
        tables = {i: {"rows": P(None, SPLIT), "scales": P(None, SPLIT)} for i in parts.get("tables", {})}
        embed = P(None, GROUP) if is_trained else P()
        return parts | {"embed": embed, "head": P(None, vocabulary)} | ({"tables": tables} if tables else {})

    def _partition_layer(self, layer: DSV4Attention, p: Any, is_trained: bool = False) -> dict[str, Any]:
        attention = layer.partition("tensor" if is_trained else SPLIT, params=p["attention"])
        moe = self._partition_moe(is_trained)
        return replicated(p) | {
            "attention": attention,
            "moe": {name: spec_of(x, moe[name]) for name, x in p["moe"].items()},
        }

    def _partition_moe(self, is_trained: bool) -> dict[str, P]:
        of, channels = (GROUP, ALL) if is_trained else ("expert", SPLIT)
        experts = {"w13": P(of, None, "tensor"), "w2": P(of, None, "tensor")}
        return {"gate": P(), **experts, "shared13": P(None, None, channels), "shared2": P(channels)}

    def cache(self, b: int, max_length: int, dtype: Any = jnp.bfloat16, **pages: Any) -> Caches:
        """Empty caches for b sequences, as `DSV4Attention.cache` makes them; in a mesh, whole on every device."""
        layers = [layer.cache(b, max_length, dtype, **pages) for layer in self.layers]
        made = Caches(layers)
        if self.engrams is not None:
            words = self.engrams.longest - 1 + pages.get("steps", 1) - 1
            made = made._replace(history=History(jnp.zeros((b, words), jnp.int32), jnp.zeros(b, jnp.int32)))
        return made if jax.sharding.get_abstract_mesh().empty else jax.device_put(made, P())

    def joined(self, params: Any) -> dict[str, Any]:
        """These parameters for `step`, which then has fewer products: see `DSV4Attention.joined`.

        A router's gate becomes numbers in bfloat16, where the model computes in it: see `in_three`.
        """
        layers = []
        for layer, p in zip(self.layers, params["layers"], strict=True):
            moe = p["moe"]
            if params["embed"].dtype == jnp.bfloat16 and moe["gate"].dtype == jnp.float32:
                moe = {**moe, "gate": in_three(moe["gate"])}
            layers.append({**p, "attention": layer.joined(p["attention"]), "moe": moe})
        return {**params, "layers": layers}


class Forward(NamedTuple):
    """The results of `Model.forward`."""

    logits: jax.Array
    """float32 `[b, s, vocabulary]`"""
    outputs: list[Output]
    """of every layer's attention"""
    means: jax.Array | None
    """`[b, s, layers that drafts see · hidden]`"""

    @property
    def caches(self) -> list[LayerCache | None]:
        return [out.cache for out in self.outputs]


class OfLayer(NamedTuple):
    """The arrays of a layer that have no gradient."""

    routing: jax.Array
    """`[experts]` or `[vocabulary, k]`, as `Model.routed` takes it"""
    table: Any = None
    """of its engram, if it has one"""
    rows: jax.Array | None = None
    """of that table, which each token finds"""


def reading(start: Any, lengths: jax.Array) -> Callable[..., Output]:
    """Attention of a chunk from position `start` on, as `Model.forward` takes it."""

    def attend(layer: DSV4Attention, p: Any, x: jax.Array, cache: Any, shared: Shared) -> Output:
        return layer(p, x, cache, shared, start=start, lengths=lengths)

    return attend


def count_of(tokens: jax.Array, start: Any, lengths: jax.Array) -> jax.Array:
    """int32 `[b]`: how many tokens of a chunk `[b, s]` count."""
    return jnp.clip(lengths - start, 0, tokens.shape[1])


def replicated(params: dict[str, Any]) -> dict[str, Any]:
    """The PartitionSpecs of parameters, or of what stands for them, that devices have whole."""
    return jax.tree.map(lambda _: P(), params, is_leaf=lambda x: isinstance(x, PACKED))


def spec_of(w: Any, spec: P) -> P:
    """The PartitionSpec of matrices that have this one as an array: of what they are in memory."""
    if isinstance(w, PackedExperts):
        return P(spec[0])
    if isinstance(w, PackedMatrix):
        return of_data(spec, w.data.ndim)
    return in_file(spec, w.axes) if isinstance(w, Packed) else spec


def on_own_tokens(f: Callable[[jax.Array], jax.Array], x: jax.Array, is_trained: bool) -> jax.Array:
    """f(x) of x `[b, s, …]`, by each device for its own tokens: XLA would gather them for a sort or a kernel."""
    if jax.sharding.get_abstract_mesh().empty or devices.is_on_each():
        return f(x)
    rows = rows_of(x, is_trained)
    return jax.shard_map(f, in_specs=rows, out_specs=rows)(x)


def in_three(gate: jax.Array) -> jax.Array:
    """A gate `[hidden, experts]` in float32 as `[hidden, 3 experts]` in bfloat16: three numbers, whose sum is exact."""
    return jnp.concatenate([*split(gate)], 1)


def logits_of(x: jax.Array, gate: jax.Array) -> jax.Array:
    """x `[b, s, hidden]` times a gate in float32, or as `in_three` makes it: float32 `[b, s, parts, experts]`, in parts
    that add up to it.
    """
    if gate.dtype == x.dtype == jnp.bfloat16:  # products of two are exact in float32, so this is as precise
        return step_product(x, gate, dtype=jnp.float32).reshape(*x.shape[:2], 3, -1)
    if gate.dtype == jnp.bfloat16:
        first, second, third = jnp.split(gate.astype(jnp.float32), 3, 1)
        gate = first + (second + third)
    return exact_product(x, gate.T)[:, :, None]
