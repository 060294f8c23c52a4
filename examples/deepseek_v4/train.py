"""Trains DeepSeek-V4: `python -m examples.deepseek_v4.train [CHECKPOINT] --tokens SHARDS --keep DIRECTORY`.

The indexers learn from attention to the entries they chose, the balance of experts from their loads, everything else
from the next token. Parameters and Adam's moments are in float32 and shared out over all devices, and tokens over all
but those of "tensor" (layout.py). "context" shares out the tokens of each sequence, in zigzag order, in which devices
have equal work. The directory keeps the last states; a program that finds one there goes on with it.

Devices may be those of many processes (cluster.py). data.py has the tokens, and metrics.py what is said of a step.
"""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.serving.request import integer, number
from jax_dsv4_fmha import PackedExperts, Span
from jax_dsv4_fmha.layers import Shared, zigzag

from . import cluster, common, head, layout, lora
from . import save as saving
from .data import Batches, Row, rows_of
from .metrics import Log, Step, recall
from .model import FIXED, Model
from .packed import is_packed
from .states import States
from .streams import Streams

ATTENTION, EXPERTS, PARAMETERS = ("dsv4_fmha_o", "dsv4_fmha_lse"), ("dsv4_fmha_gates", layout.GATHERED), "parameters"
"""names of what a layer makes, for policies"""


def _products_and(*names: str) -> Any:
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names(*names)
    return policies.save_from_both_policies(named, policies.dots_with_no_batch_dims_saveable)


POLICIES = {
    "all": jax.checkpoint_policies.nothing_saveable,
    "but-attention": jax.checkpoint_policies.save_only_these_names(*ATTENTION),
    "but-experts": jax.checkpoint_policies.save_only_these_names(*ATTENTION, *EXPERTS),
    "but-products": _products_and(*ATTENTION, *EXPERTS),
    "but-parameters": _products_and(*ATTENTION, *EXPERTS, PARAMETERS),
    "none": jax.checkpoint_policies.everything_saveable,
}
"""what the backward pass computes anew of a layer: all; all but attention; all but routed experts' products too; all
but products; all but these and parameters in the model's dtype, as they were gathered; or nothing"""


class State(NamedTuple):
    learned: Any
    fixed: Any
    """what gradients do not change; of these the routers' biases follow the experts' loads"""
    moments: Any


def losses(
    model: Model,
    dtype: Any,
    policy: Any,
    learned: Any,
    fixed: Any,
    tokens: jax.Array,
    documents: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """The loss that is minimised; and the tokens', the indexers', the loads of the experts `[layers, experts]`, the
    indexers' recall `[layers with one]`, and the length that documents have for MFU.

    tokens, documents: `[b, s]` in their own order, whole on every device of "context". A document is a run of equal
    numbers, which sees no other; None is one of each sequence.
    """
    context = jax.sharding.get_abstract_mesh().shape["context"]
    order = context if context > 1 else None
    specs = model.partition(learned | {"layers": list(map(without_adapter, learned["layers"]))}, is_trained=True)
    like = jax.eval_shape(lambda: model.init(jax.random.key(0), dtype))

    def ready(params: Any, *path: Any) -> Any:
        """Parameters as the model computes with them: in their dtype, and where products want them."""
        spec, shape = (functools.reduce(lambda x, key: x[key], path, tree) for tree in (specs, like))

        def one(x: Any, spec: P, shape: Any) -> Any:
            if is_packed(x):
                return jax.lax.with_sharding_constraint(x, spec)
            return checkpoint_name(layout.gathered(shape.dtype, spec, x), PARAMETERS)

        return jax.tree.map(one, params, spec, shape, is_leaf=is_packed)

    def shared_out(x: jax.Array) -> jax.Array:
        """Moves what each token has, `[b, s, …]`, to where the token is."""
        whole = jax.lax.with_sharding_constraint(zigzag(x, order) if order else x, P(layout.SEQUENCES))
        return jax.lax.with_sharding_constraint(whole, layout.TOKENS)  # or XLA would shift tokens between devices

    b, s = tokens.shape
    place = positions(documents) if documents is not None else jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    is_last = place == s - 1 if documents is None else jnp.roll(place, -1, 1) == 0
    following, has_following = jnp.roll(tokens, -1, 1), ~is_last
    count, length = has_following.sum(), 2 * place.mean() + 1
    rows, _ = model.rows(fixed, tokens, place=place)
    rows = {i: shared_out(x) for i, x in rows.items()}
    past = {layer.ratio: past_entries(documents, place, layer.ratio) for layer in model.layers if layer.indexer}
    tokens, following, has_following, place, past = jax.tree.map(
        shared_out, (tokens, following, has_following, place, past)
    )
    documents = None if documents is None else shared_out(documents)

    def block(i: int, p: Any, streams: Streams, shared: Shared) -> tuple[Streams, Shared, jax.Array, Any]:
        def attend(layer, p, x, _, shared):
            return layer(p, x, shared=shared, segment_ids=documents, zigzag=order)

        adapter = jax.lax.with_sharding_constraint(p.get("lora", {}), P())
        p = ready(without_adapter(p), "layers", i)
        p["attention"] = lora.merged(p["attention"], adapter, dtype)
        layer, of_layer = model.layers[i], model.of_layer(i, fixed, rows)
        streams = model.reminded(p, of_layer, streams)
        streams, out, load = model.block(layer, p, of_layer, streams, tokens, None, shared, attend)
        of_indexer, recalled = 0.0, []
        if layer.indexer is not None:
            of_indexer = layer.indexer_loss(p["attention"], out, shared).mean()
        if out.indexed is not None:
            recalled = [recall(layer, out, shared, place, past[layer.ratio])]
        return streams, shared.after(out), jnp.float32(of_indexer), (load, recalled)

    others = {name: ready(x, name) for name, x in learned.items() if name not in ("layers", "head")}
    x, shared = model.embedded(layout.looked_up(others["embed"], tokens)), Shared()
    of_indexers, loads, recalls = jnp.float32(0), [], []
    for i, p in enumerate(learned["layers"]):
        layer = jax.checkpoint(functools.partial(block, i), policy=policy)
        x, shared, of_indexer, (load, recalled) = layer(p, x, shared)
        of_indexers += of_indexer
        loads.append(load)
        recalls += recalled
    weights = has_following / jnp.maximum(count, 1)
    with jax.named_scope("head"):
        of_tokens = head.loss(model.last(others, x), learned["head"], following, weights)
    return of_tokens + of_indexers, (of_tokens, of_indexers, jnp.stack(loads), jnp.array(recalls), length)


def without_adapter(p: dict[str, Any]) -> dict[str, Any]:
    """A layer's parameters but the additions of an adapter."""
    return {name: x for name, x in p.items() if name != "lora"}


def positions(documents: jax.Array) -> jax.Array:
    """int32 `[b, s]`: the position of each token in its document."""
    span = Span.compressed_segments(documents, 1)
    return span.stop - span.start - 1


def past_entries(documents: jax.Array | None, place: jax.Array, ratio: int) -> tuple[jax.Array, jax.Array]:
    """The first and the end of the entries that are past for each token, int32 `[b, s]` each."""
    if documents is None:
        return jnp.zeros_like(place), (place + 1) // ratio
    span = Span.compressed_segments(documents, ratio)
    return span.start, span.stop


class Trainer:
    """A model, an optimizer and one jitted step over the mesh around it.

    only: the parameters that learn are those whose path, such as "layers/3/attention/sink", has a part that this
      regular expression matches. The others stay, and have no moments. "routing" stands for the routers' biases.
    rank: of an adapter (lora.py), which then learns in the place of matrices; the parameters beside it are given to
      every step.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        steps: int,
        rate: float,
        remat: str,
        speed: float = 1e-3,
        only: str = "",
        rank: int | None = None,
    ) -> None:
        self.model, self.mesh, self.only, self.rank = model, mesh, only, rank
        warmup = max(steps // 10, 1)
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(steps, warmup + 1))
        adamw = optax.adamw(schedule, weight_decay=0.1)
        if rank:
            learns, speed = jax.tree.map(lambda _: True, jax.eval_shape(self.adapter)), 0
        else:
            learns, speed = learning(model, only), speed if re.search(only, "routing") else 0
            adamw = optax.masked(adamw, learns) if only else adamw
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
        dtype, policy = common.compute_dtype(), POLICIES[remat]

        def step(state: State, batch: Row, beside: Any = None) -> tuple[State, Step]:
            def loss(learned: Any, *others: Any) -> tuple[jax.Array, Any]:
                whole = learned if beside is None else lora.beside(beside, learned)
                return losses(model, dtype, policy, whole, *others)

            gradient = jax.grad(loss, has_aux=True)
            gradient, (of_tokens, of_indexers, loads, recalls, length) = gradient(state.learned, state.fixed, *batch)
            gradient = jax.tree.map(lambda x, learns: x if learns else jnp.zeros_like(x), gradient, learns)
            with jax.named_scope("optimizer"):
                updates, moments = self.optimizer.update(gradient, state.moments, state.learned)
                learned = optax.apply_updates(state.learned, updates)
            routing = [  # a bias rises where an expert has fewer tokens than the mean
                r if r.ndim == 2 else r + speed * jnp.sign(load.mean() - load)
                for r, load in zip(state.fixed["routing"], loads, strict=True)
            ]
            fixed = {**state.fixed, "routing": routing}
            load = loads.max(1) / loads.mean(1)
            with jax.named_scope("optimizer"):
                norm = optax.tree.norm(gradient)
            numbers = Step(of_tokens, of_indexers, norm, load, recalls, length)
            return State(learned, fixed, moments), numbers

        everywhere = NamedSharding(mesh, P())
        self.step = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings(), everywhere))

    def begin(self, params: dict[str, Any]) -> State:
        """The state before the first step.

        Raises:
          ValueError: matrices in 4 or 8 bits are to learn.
        """
        has_no_gradient = lambda x: is_packed(x) or isinstance(x, PackedExperts)  # noqa: E731
        if not self.rank:
            for path, x in jax.tree_util.tree_leaves_with_path(learnable(params), is_leaf=has_no_gradient):
                if has_no_gradient(x):
                    name = jax.tree_util.keystr(path, simple=True, separator="/")
                    raise ValueError(f"params: {name}: got a {type(x).__name__}, wanted an array, which can learn")
        return jax.jit(self.state, out_shardings=self.shardings())(params)

    def state(self, params: dict[str, Any]) -> State:
        fixed = {name: params[name] for name in FIXED if name in params}
        learned = self.adapter() if self.rank else jax.tree.map(lambda x: x.astype(jnp.float32), learnable(params))
        return State(learned, fixed, self.optimizer.init(learned))

    def adapter(self) -> lora.Adapter:
        return lora.init(self.model, self.rank, self.only)

    def shapes(self) -> State:
        """The shapes of a state, and where its parts lie."""
        params = jax.eval_shape(lambda: self.model.init(jax.random.key(0), jnp.float32))
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            jax.eval_shape(self.state, params),
            self.shardings(),
        )

    @functools.cache  # noqa: B019
    def shardings(self) -> State:
        """Returns where a state's parts lie: see `layout.stored`.

        Raises:
          ValueError: the devices cannot share out a parameter equally.
        """
        specs = self.model.partition(is_trained=True)
        shapes = jax.eval_shape(lambda: self.model.init(jax.random.key(0), jnp.float32))
        fixed = {name: specs.pop(name) for name in FIXED if name in specs}
        fixed = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), fixed)
        shapes = {name: shapes[name] for name in specs}
        layout.checked(specs, shapes, self.mesh)
        if self.rank:
            shapes = jax.eval_shape(self.adapter)
            specs = jax.tree.map(lambda _: P(), shapes)
        learned = jax.tree.map(lambda spec, x: NamedSharding(self.mesh, layout.stored(spec, x)), specs, shapes)
        moments = optax.tree.map_params(
            self.optimizer,
            lambda x, sharding: x if is_masked(x) else sharding,
            jax.eval_shape(self.optimizer.init, shapes),
            learned,
            transform_non_params=lambda _: NamedSharding(self.mesh, P()),
            is_leaf=is_masked,
        )
        return State(learned, fixed, moments)


def learning(model: Model, only: str) -> Any:
    """True for each parameter that learns, in the tree of those that may.

    Raises:
      ValueError: none does.
    """

    def learns(path: Any, _: Any) -> bool:
        return bool(re.search(only, jax.tree_util.keystr(path, simple=True, separator="/")))

    found = jax.tree_util.tree_map_with_path(learns, learnable(model.partition()), is_leaf=lambda x: isinstance(x, P))
    if not any(jax.tree.leaves(found)) and not re.search(only, "routing"):
        raise ValueError(f'--only: got {only!r}, wanted a part of a path such as "layers/0/attention/sink"')
    return found


def learnable(params: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in params.items() if name not in FIXED}


def is_masked(x: Any) -> bool:
    """True in the place of the moments of a parameter that does not learn."""
    return isinstance(x, optax.MaskedNode)


def main(
    checkpoint: str | None = None,
    tokens: str | None = None,
    keep: str | None = None,
    steps: int = 50,
    b: int = 8,
    s: int = 64,
    rate: float = 3e-3,
    remat: str = "but-attention",
    every: int = 10,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    data: int | None = None,
    until: int | None = None,
    random: str = "v4",
    seed: int = 0,
    only: str = "",
    save: str | None = None,
    rank: int | None = None,
    packed: bool = False,
    adapter: str | None = None,
    fake_quantize: bool = False,
    **processes: Any,
) -> list[tuple[float, float]]:
    """Prints what steps computed, and returns the losses (tokens', indexers') of each from the first made."""
    for name, x in {"steps": steps, "b": b, "every": every}.items():
        integer(name, x, 1)
    integer("s", s, 2)  # each token but the last of a sequence has one that follows it
    number("rate", rate, 0, 1)
    try:
        re.compile(only)
    except re.error as e:
        raise ValueError(f"--only: got {only!r}, wanted a regular expression: {e}") from None
    if save is not None and any(Path(save).glob("*.safetensors")):
        raise ValueError(f"--save: got {save}, which has a checkpoint, wanted another directory")
    if rank is None and (packed or adapter):
        raise ValueError("--packed, --adapter: wanted --lora, too")
    if packed and save:
        raise ValueError("--save: got --packed, wanted --adapter: sums with matrices in 4 and 8 bits are not saved")
    if adapter is not None and (Path(adapter) / lora.FILES[0]).exists():
        raise ValueError(f"--adapter: got {adapter}, which has one, wanted another directory")
    for directory in filter(None, (save, adapter)):
        Path(directory).mkdir(parents=True, exist_ok=True)  # raises before anything is trained
    with cluster.joined(**processes):
        model = common.model_of(checkpoint, random=random, fake_quantize=fake_quantize or None)
        rows = rows_of(tokens, model.vocabulary, s, seed)
        with common.mesh_of(tensor, expert, data, context) as mesh:
            if jax.process_count() > 1 and mesh.size != jax.device_count():
                raise ValueError(
                    f"--tensor, --expert, --context: got a mesh of {mesh.size} devices, wanted all {jax.device_count()}"
                    f" of {jax.process_count()} processes in it"
                )
            batches = Batches(rows, b, layout.sequences(mesh, b), seed)
            trainer, states = (
                Trainer(model, mesh, steps, rate, remat, only=only, rank=rank),
                States(keep, every, batches.described()),
            )
            params = beside = None
            if (last := states.last()) is None or rank:
                dtype = common.compute_dtype() if rank else jnp.float32
                params = common.parameters_of(model, checkpoint, mesh, dtype, packed, fused=False)
                beside = learnable(params) if rank else None
            if last is None:
                first, state = 0, trainer.begin(params)
            else:
                first, state = last + 1, states.restore(last, trainer.shapes())
            del params
            log = Log(model, mesh.size, b * s, every, keep, first, steps - 1)
            log.say(f"mesh {dict(mesh.shape)} of {jax.default_backend()} devices, from step {first} on")
            end = until or steps
            for i, own in enumerate(batches.between(first, end), first):
                state, numbers = trainer.step(state, batches.on_devices(own), beside)
                log.add(i, own, numbers)
                if states.wants(i, is_last=i == end - 1):
                    log.look()  # no state is kept of a loss that is no number
                    states.save(i, state)
            log.look()
            states.close()
            if adapter is not None:
                lora.save(model, state.learned, adapter, checkpoint)
            if save is not None:
                learned = lora.applied(beside, state.learned) if rank else state.learned
                saving.save(model, learned | state.fixed, save, checkpoint, common.compute_dtype())
    return [(float(x.loss), float(x.of_indexers)) for x in log.found]


def arguments() -> dict:
    parser = common.parser(__doc__.split("\n\n")[0])
    parser.add_argument(
        "--tokens",
        help="a directory of shards (examples.deepseek_v4.data), or a .npy file of tokens in one row; by default walks "
        "that can be learned",
    )
    parser.add_argument(
        "--keep",
        help="a directory for states and metrics.jsonl; a program that finds states there goes on with the last",
    )
    parser.add_argument(
        "--remat", choices=POLICIES, default="but-attention", help="what the backward pass computes anew"
    )
    parser.add_argument(
        "--context", type=common.at_least(1), default=1, help="devices that share out each sequence (default: 1)"
    )
    for name, default, what in (
        ("steps", 50, "of the whole schedule"),
        ("b", 8, "sequences of a batch"),
        ("s", 64, "tokens of a sequence"),
        ("every", 10, "steps from line to line, and from state to state"),
    ):
        parser.add_argument(f"--{name}", type=common.at_least(1), default=default, help=f"{what} (default: {default})")
    parser.add_argument("--rate", type=float, default=3e-3, help="the greatest learning rate (default: 0.003)")
    parser.add_argument("--seed", type=common.at_least(0), default=0, help="of the order of rows (default: 0)")
    parser.add_argument("--only", default="", help="what learns: parameters whose path it matches (default: all)")
    parser.add_argument(
        "--fake-quantize",
        action="store_true",
        help="latents, entries, index queries and keys are rounded to the numbers of caches in 8 and 4 bits, as V4.1's "
        "always are; gradients pass straight through",
    )
    parser.add_argument("--save", help="a directory for the checkpoint that was made, at the end")
    parser.add_argument(
        "--lora",
        dest="rank",
        metavar="RANK",
        type=common.at_least(1),
        help="the rank of additions to attention's matrices, which learn alone; --only says to which (default: all)",
    )
    parser.add_argument(
        "--packed", action="store_true", help="with --lora: a checkpoint's FP4 and FP8 stay so in memory"
    )
    parser.add_argument("--adapter", help="with --lora: a directory for the additions as PEFT has them, at the end")
    cluster.options(parser)
    return vars(parser.parse_args())


if __name__ == "__main__":
    common.run(main, **arguments())
