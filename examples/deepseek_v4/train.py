"""Trains DeepSeek-V4: `python -m examples.deepseek_v4.train [CHECKPOINT] --tokens FILE.npy --keep DIRECTORY`.

The indexers learn from attention to the entries they chose, the balance of experts from their loads, everything else
from the next token. Parameters and Adam's moments are in float32 and shared out over all devices: over "tensor" and
"expert" as the model's products are, and what is left over "data" and "context". A layer gathers its own part over the
latter two in the dtype it computes in. "context" shares out the tokens of each sequence, in zigzag order, in which
devices have equal work. The directory keeps the last states; a program that finds one there goes on with it.
"""

import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.serving import checked_tokens
from examples.serving.request import integer, number
from jax_dsv4_fmha.layers import Shared, zigzag

from . import common
from .model import FIXED, Model, Streams

ATTENTION = jax.checkpoint_policies.save_only_these_names("dsv4_fmha_o", "dsv4_fmha_lse")
PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
POLICIES = {
    "all": jax.checkpoint_policies.nothing_saveable,
    "but-attention": ATTENTION,
    "but-products": jax.checkpoint_policies.save_from_both_policies(ATTENTION, PRODUCTS),
    "none": jax.checkpoint_policies.everything_saveable,
}
"""what the backward pass computes anew of a layer: all of it, all but attention, all but products too, or nothing"""
REST = ("data", "context")
"""the mesh axes that share out states beside the model's own"""
MANY = 1 << 24
"""tokens of a file that are checked at once"""
PEAK = {"H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""dense bfloat16 FLOP/s of a device whose kind has this in its name"""


class State(NamedTuple):
    learned: Any
    fixed: Any
    """what gradients do not change; of these the routers' biases follow the experts' loads"""
    moments: Any


def losses(model: Model, dtype: Any, policy: Any, learned: Any, fixed: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """The loss that is minimised; the tokens', the indexers', and the loads of the experts `[layers, experts]`.

    tokens: `[b, s]` in their own order, whole on every device of "context".
    """
    context = jax.sharding.get_abstract_mesh().shape["context"]
    order = context if context > 1 else None
    specs, like = model.partition(), jax.eval_shape(lambda: model.init(jax.random.key(0), dtype))

    def ready(params: Any, *path: Any) -> Any:
        """Parameters as the model computes with them: their dtype, and whole over "data" and "context"."""
        spec, shape = (functools.reduce(lambda x, key: x[key], path, tree) for tree in (specs, like))
        return jax.tree.map(lambda x, p, s: jax.lax.with_sharding_constraint(x.astype(s.dtype), p), params, spec, shape)

    def shared_out(x: jax.Array) -> jax.Array:
        """Moves what each token has, `[b, s, …]`, to where the token is."""
        return jax.lax.with_sharding_constraint(zigzag(x, order), P("data", "context")) if order else x

    rows, _ = model.rows(fixed, tokens)
    rows = {i: shared_out(x) for i, x in rows.items()}
    b, s = tokens.shape
    following, has_following = jnp.roll(tokens, -1, 1), jnp.broadcast_to(jnp.arange(s) < s - 1, (b, s))
    tokens, following, has_following = map(shared_out, (tokens, following, has_following))

    def block(i: int, p: Any, streams: Streams, shared: Shared) -> tuple[Streams, Shared, jax.Array, jax.Array]:
        def attend(layer, p, x, _, shared):
            return layer(p, x, shared=shared, zigzag=order)

        p = ready(p, "layers", i)
        streams = model.reminded(i, fixed, p, streams, rows.get(i))
        streams, out, load = model.block(i, fixed, p, streams, tokens, None, shared, attend)
        layer = model.layers[i]
        of_indexer = 0.0 if layer.indexer is None else layer.indexer_loss(p["attention"], out, shared).mean()
        return streams, shared.after(out), jnp.float32(of_indexer), load

    others = {name: ready(x, name) for name, x in learned.items() if name != "layers"}
    x, shared, of_indexers, loads = model.embedded(others, tokens), Shared(), jnp.float32(0), []
    for i, p in enumerate(learned["layers"]):
        layer = jax.checkpoint(functools.partial(block, i), policy=policy)
        x, shared, of_indexer, load = layer(p, x, shared)
        of_indexers += of_indexer
        loads.append(load)
    of_each = optax.softmax_cross_entropy_with_integer_labels(model.logits(others, x), following)
    of_tokens = jnp.where(has_following, of_each, 0).sum() / (b * (s - 1))
    return of_tokens + of_indexers, (of_tokens, of_indexers, jnp.stack(loads))


class Trainer:
    """A model, an optimizer and one jitted step over the mesh around it."""

    def __init__(self, model: Model, mesh: Mesh, steps: int, rate: float, remat: str, speed: float = 1e-3) -> None:
        self.model, self.mesh = model, mesh
        warmup = max(steps // 10, 1)
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup, max(steps, warmup + 1))
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
        dtype, policy = common.compute_dtype(), POLICIES[remat]

        def step(state: State, tokens: jax.Array) -> tuple[State, Any]:
            gradient = jax.grad(functools.partial(losses, model, dtype, policy), has_aux=True)
            gradient, (of_tokens, of_indexers, loads) = gradient(state.learned, state.fixed, tokens)
            updates, moments = self.optimizer.update(gradient, state.moments, state.learned)
            routing = [  # a bias rises where an expert has fewer tokens than the mean
                r if r.ndim == 2 else r + speed * jnp.sign(load.mean() - load)
                for r, load in zip(state.fixed["routing"], loads, strict=True)
            ]
            fixed = {**state.fixed, "routing": routing}
            return State(optax.apply_updates(state.learned, updates), fixed, moments), (of_tokens, of_indexers)

        self.step = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings(), None))

    def begin(self, params: dict[str, Any]) -> State:
        def state(params: dict[str, Any]) -> State:
            fixed = {name: params[name] for name in FIXED if name in params}
            learned = {name: x for name, x in params.items() if name not in fixed}
            learned = jax.tree.map(lambda x: x.astype(jnp.float32), learned)
            return State(learned, fixed, self.optimizer.init(learned))

        return jax.jit(state, out_shardings=self.shardings())(params)

    @functools.cache  # noqa: B019
    def shardings(self) -> State:
        """Returns where a state's parts lie: as the model has them, and over REST along an axis that is whole there."""
        specs = self.model.partition()
        shapes = jax.eval_shape(lambda: self.model.init(jax.random.key(0), jnp.float32))
        fixed = {name: specs.pop(name) for name in FIXED if name in specs}
        fixed = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), fixed)
        shapes = {name: shapes[name] for name in specs}

        def sharding(spec: P, x: jax.ShapeDtypeStruct) -> NamedSharding:
            axes = [*spec, *[None] * (x.ndim - len(spec))]
            rest = math.prod(self.mesh.shape[axis] for axis in REST)
            free = [n for n, axis in enumerate(axes) if axis is None and x.shape[n] % rest == 0]
            if x.ndim > 1 and free:
                axes[max(free, key=lambda n: x.shape[n])] = REST
            return NamedSharding(self.mesh, P(*axes))

        learned = jax.tree.map(sharding, specs, shapes)
        moments = optax.tree.map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self.optimizer.init, shapes),
            learned,
            transform_non_params=lambda _: NamedSharding(self.mesh, P()),
        )
        return State(learned, fixed, moments)


def flops(model: Model, s: int) -> float:
    """Counts a token's flop in a step: three times the forward pass's, without what the backward pass computes anew."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    total = 2 * model.hidden * model.vocabulary
    for layer, p in zip(model.layers, shapes["layers"], strict=True):
        sizes = jax.tree_util.tree_leaves_with_path(p)
        routed = sum(x.size for path, x in sizes if path[-1].key in ("w13", "w2"))
        rest = sum(x.size for path, x in sizes if x.ndim > 1 and path[-1].key not in ("w13", "w2", "ape"))
        past = s / 2 / layer.ratio if layer.ratio else 0  # entries before a token, on average
        seen = min(layer.window, s / 2) + (min(past, layer.indexer.topk) if layer.indexer else past)
        total += 2 * (rest + routed * model.chosen / model.experts) + 4 * layer.heads * layer.d * seen
        total += 2 * layer.indexer.heads * layer.indexer.d * past if layer.indexer else 0
    return 3 * total


def tokens_in(path: str, vocabulary: int, s: int) -> np.ndarray:
    """The tokens `[n]` of a .npy file, mapped into memory.

    Raises:
      ValueError: the file has no line of integers, fewer than s of them, or one that is not in the vocabulary.
    """
    try:
        whole = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise ValueError(f"{path}: got no array of NumPy, wanted tokens: {e}") from None
    if not isinstance(whole, np.ndarray) or whole.ndim != 1 or whole.dtype.kind not in "iu":
        got = f"{whole.dtype}{list(whole.shape)}" if isinstance(whole, np.ndarray) else "several arrays"
        raise ValueError(f"{path}: got {got}, wanted one line of integers")
    if len(whole) < s:
        raise ValueError(f"{path}: got {len(whole)} tokens, wanted at least {s}, those of a sequence")
    for at in range(0, len(whole), MANY):
        checked_tokens(f"{path}, from token {at} on", whole[at : at + MANY], vocabulary)
    return whole


def batch(tokens: np.ndarray | None, vocabulary: int, step: int, b: int, s: int) -> np.ndarray:
    """Tokens `[b, s]` of a step: some of these, or walks in steps of 1 to 4, whose loss is log 4."""
    random = np.random.default_rng(step)
    if tokens is None:
        return (np.cumsum(random.integers(1, 5, (b, s)), 1) % vocabulary).astype(np.int32)
    return np.stack([tokens[at : at + s] for at in random.integers(0, len(tokens) - s + 1, b)]).astype(np.int32)


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
) -> list[tuple[float, float]]:
    """Prints losses, tokens/s and MFU, and returns the losses (tokens', indexers') of each step from the first made."""
    for name, x in {"steps": steps, "b": b, "every": every}.items():
        integer(name, x, 1)
    integer("s", s, 2)  # each token but the last of a sequence has one that follows it
    number("rate", rate, 0, 1)
    model = common.model_of(checkpoint, random=random)
    learned_from = None if tokens is None else tokens_in(tokens, model.vocabulary, s)
    with common.mesh_of(tensor, expert, data, context) as mesh:
        params = common.parameters_of(model, checkpoint, mesh, jnp.float32)
        trainer = Trainer(model, mesh, steps, rate, remat)
        state, first = trainer.begin(params), 0
        del params
        manager = keep and ocp.CheckpointManager(
            keep, options=ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=every)
        )
        if manager and manager.latest_step() is not None:
            first = manager.latest_step() + 1
            state = manager.restore(first - 1, args=ocp.args.StandardRestore(state))
        peak = next((x for name, x in PEAK.items() if name in jax.devices()[0].device_kind), None)
        print(f"mesh {dict(mesh.shape)} of {jax.default_backend()} devices, from step {first} on", flush=True)
        found, began, done = [], time.perf_counter(), 0
        for i in range(first, until or steps):
            x = jax.device_put(batch(learned_from, model.vocabulary, i, b, s), NamedSharding(mesh, P("data")))
            state, both = trainer.step(state, x)
            found.append(both)
            done += 1
            if i == first:  # without the compilation
                jax.block_until_ready(both)
                began, done = time.perf_counter(), 0
            if manager:
                manager.save(i, args=ocp.args.StandardSave(state))
            if i % every == 0 or i == steps - 1:
                of_tokens, of_indexers = map(float, both)
                text = f"step {i:4}  loss {of_tokens:.3f}, of indexers {of_indexers:.4f}"
                if done:
                    speed = done * b * s / (time.perf_counter() - began)
                    mfu = f", MFU {speed * flops(model, s) / peak / mesh.size:.1%}" if peak else ""
                    text += f"; {speed:.0f} tokens/s{mfu}"
                print(text, flush=True)
        if manager:
            manager.wait_until_finished()
            manager.close()
    return [tuple(map(float, both)) for both in found]


def arguments() -> dict:
    parser = common.parser(__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", help="a .npy file of tokens in one row; by default walks that can be learned")
    parser.add_argument("--keep", help="a directory for states; a program that finds one there goes on with it")
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
    return vars(parser.parse_args())


if __name__ == "__main__":
    common.run(main, **arguments())
