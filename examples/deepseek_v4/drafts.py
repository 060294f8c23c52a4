"""DSpark, the model's own drafts: three layers that propose a block of tokens at once, which the model then verifies.

    main = norm(w [means of the streams after the model's last layers])        of each token that the model has read
    X    = copies of the embeddings of the model's last token and of a placeholder, block - 1 times
    for every layer: X as in the model, by attention of a window alone: X's tokens see each other, not causally,
        and the latents of main, made by the same weights
    logits of draft i = head norm(pre · X) + w2 w1[draft i - 1]                a bigram table of low rank

V4.1's are as these, but for what differs in its layers, and two things: the means are of the streams before the named
layers, and the layers for drafts have fewer experts than the model's.
The embedding and the head are the model's. (A checkpoint also has a head that says how sure each draft is, which is not
read here: as many drafts as a step has room for are verified.)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_dsv4_fmha.layers import DSV4Attention, LayerCache

from .caches import Caches
from .config import Entries
from .model import Forward, Model
from .packed import whole
from .streams import norm

SHARED = ("embed", "head")
CANDIDATES = (
    "candidate_source_layer_id", "candidate_source_layer", "candidate_topk_blocks", "candidate_block_size",
)  # fmt: skip
CHOSEN = ("dspark_num_experts_per_tok", "dspark_n_activated_experts")


@dataclasses.dataclass(frozen=True)
class DSpark:
    """A model with its layers for drafts. In `Server`'s eyes a model that also has `propose`."""

    model: Model
    stack: Model
    """the layers for drafts, as a model of their own"""
    block: int
    """drafts of a call"""
    placeholder: int
    """the token that stands where drafts will be"""
    rank: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path) -> "DSpark":
        """Reads a config.json, as `Model.from_config` does; raises ValueError if the model has no layers for drafts."""
        model, read = Model.from_config(config), Entries(config)
        if not read.has("dspark_block_size"):
            raise ValueError("config: wanted dspark_block_size, …, for drafts of the model's own")
        c, more = read.all, len(read.all.get("compress_ratios") or ()) - len(model.layers)
        stated = read.integer("n_mtp_layers") if read.has("n_mtp_layers") else None
        if stated is not None and more > 0 and stated != more:
            raise ValueError(f"config: n_mtp_layers: got {stated}, wanted {more}, as compress_ratios says")
        n = stated or (more if more > 0 else read.integer("num_nextn_predict_layers"))
        if read.has("dspark_n_routed_experts") != read.has(*CHOSEN):
            raise ValueError(f"config: wanted dspark_n_routed_experts and {CHOSEN[0]}, or neither")
        kinds = {"layer_types": ["sliding_attention"] * n, "compress_ratios": [0] * n}
        if model.delayed:  # these layers have a window alone, and read no entries of other layers
            kinds |= {"kv_source_layer_ids": [], "index_source_layer_ids": []}
            kinds |= dict.fromkeys(("kv_source_layers", "index_source_layers", *CANDIDATES))
        sizes = {"num_hidden_layers": n, "n_layers": n, "num_hash_layers": 0, "n_hash_layers": 0}
        no_engrams = {name: None for name in c if str(name).startswith("engram_")}
        stack = Model.from_config({**c, **kinds, **sizes, "mlp_layer_types": None, **no_engrams})
        stack = dataclasses.replace(
            stack,
            experts=read.integer("dspark_n_routed_experts") if read.has("dspark_n_routed_experts") else stack.experts,
            chosen=read.integer(*CHOSEN, most=stack.experts) if read.has(*CHOSEN) else stack.chosen,
        )
        seen = read.integers("dspark_target_layer_ids", most=len(model.layers) - 1)
        if list(seen) != sorted(set(seen)):
            raise ValueError(f"config: dspark_target_layer_ids: got {seen}, wanted each once, in the layers' order")
        return cls(
            dataclasses.replace(model, seen=seen),
            stack,
            block=read.integer("dspark_block_size"),
            placeholder=read.integer("dspark_noise_token_id", least=0, most=model.vocabulary - 1),
            rank=read.integer("dspark_markov_rank"),
        )

    def with_precision(self, precision: str | None) -> "DSpark":
        """Does what `Model.with_precision` does; a draft is made as without."""
        return dataclasses.replace(self, model=self.model.with_precision(precision))

    @property
    def vocabulary(self) -> int:
        return self.model.vocabulary

    @property
    def layers(self) -> tuple[DSV4Attention, ...]:
        """The model's own, without those for drafts."""
        return self.model.layers

    def __call__(self, params: Any, tokens: jax.Array) -> jax.Array:
        return self.model(params, tokens)

    def read(self, params: Any, tokens: jax.Array, caches: Caches, start: Any, lengths: jax.Array) -> Any:
        """Does what `Model.read` does. Caches of drafts get the latents of these tokens, too."""
        out, after = self.model.chunk(params, tokens, caches, start, lengths)
        return out.logits[:, 0], self._after(params, out, caches, after, "__call__", start, lengths)

    def steps(self, params: Any, tokens: jax.Array, caches: Caches, start: jax.Array, lengths: jax.Array) -> Any:
        """Does what `Model.steps` does. Caches of drafts get the latents of these tokens, too."""
        out, after = self.model.new(params, tokens, caches, start, lengths)
        return out.logits, self._after(params, out, caches, after, "step", start, lengths)

    def _after(self, params: Any, out: Forward, before: Caches, after: Caches, method: str, start: Any, lengths: Any):
        return after._replace(drafts=self.kept(params["drafts"], out.means, before.drafts, method, start, lengths))

    def kept(self, p: Any, means: Any, caches: Sequence[LayerCache], method: str, start: Any, lengths: Any) -> Any:
        """The caches of drafts with the latents of tokens, whose streams have these means; p: parameters of drafts."""
        main, kept = norm(means @ whole(p["main"], means.dtype), p["main_norm"], self.stack.layers[0].eps), []
        for layer, own, cache in zip(self.stack.layers, p["layers"], caches, strict=True):
            made = getattr(layer, method)(own["attention"], main, cache, start=start, lengths=lengths)
            kept.append(made.cache)  # XLA leaves out what only made.y needs
        return kept

    def propose(self, params: Any, token: jax.Array, caches: Caches, lengths: jax.Array) -> tuple[jax.Array, Caches]:
        """Drafts int32 `[b, block]` of what follows `token` `[b]`, the one after the `lengths` tokens that are cached.

        Nobody sees what they leave in the caches: the model's next tokens overwrite it. A length of 0 is an idle place.
        """
        p = {**params["drafts"], **{name: params[name] for name in SHARED}}
        tokens = jnp.full((len(token), self.block), self.placeholder).at[:, 0].set(token)
        ends = jnp.where(lengths > 0, lengths + self.block, 0)

        def attend(layer, own, x, cache, shared):
            return layer.step(own, x, cache, shared, lengths=ends, is_causal=False)

        out = self.stack.forward(p, tokens, {}, caches.drafts, attend)
        said = [token]
        for i in range(self.block):
            bias = jnp.matmul(p["w1"][said[-1]], p["w2"], preferred_element_type=jnp.float32)
            said.append((out.logits[:, i] + bias).argmax(-1).astype(jnp.int32))
        return jnp.stack(said[1:], 1), caches._replace(drafts=out.caches)

    # ---- parameters and caches

    def init(self, key: jax.Array, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
        """Random parameters: those of `Model.init` with this key, and "drafts"."""
        b, c, d, e = jax.random.split(jax.random.fold_in(key, 1), 4)
        drafts = {name: x for name, x in self.stack.init(b, dtype).items() if name not in SHARED}
        wide, v = len(self.model.seen) * self.model.hidden, self.vocabulary
        drafts["main"] = (jax.random.normal(c, (wide, self.model.hidden)) * wide**-0.5).astype(dtype)
        drafts["main_norm"] = jnp.ones(self.model.hidden, jnp.float32)
        drafts["w1"] = jax.random.normal(d, (v, self.rank), dtype)
        drafts["w2"] = (jax.random.normal(e, (self.rank, v)) * self.rank**-0.5).astype(dtype)
        return {**self.model.init(key, dtype), "drafts": drafts}

    def partition(self) -> dict[str, Any]:
        drafts = {name: x for name, x in self.stack.partition().items() if name not in SHARED}
        return {**self.model.partition(), "drafts": drafts | dict.fromkeys(("main", "main_norm", "w1", "w2"), P())}

    def joined(self, params: Any) -> dict[str, Any]:
        return self.model.joined(params)

    def cache(self, b: int, max_length: int, dtype: Any = jnp.bfloat16, steps: int = 1, **pages: Any) -> Caches:
        """Makes the caches of `Model.cache`, and those of drafts, with room for a block that sees all of its window."""
        drafts = self.stack.cache(b, max_length, dtype, steps=max(steps, self.block + 1), **pages).layers
        return self.model.cache(b, max_length, dtype, steps=steps, **pages)._replace(drafts=drafts)
