"""Times of DeepSeek-V4 in MaxText 0.2.5: its dot products beside this package's attention, on this machine.

    python examples/maxtext_times.py attention
    python examples/maxtext_times.py layer --tokens 4096 model_name=deepseek4-284b float32_logits=true
    python examples/maxtext_times.py train --tokens 2048 --steps 200 model_name=gpt-oss-20b per_device_batch_size=2

`attention` times that of each kind of layer alone: its window, CSA over random choices, and HCA. `layer` times
MaxText's attention layers with their projections, compressors and indexers. Results are lines of JSON; `apart` has the
norm of the difference over that of dot products', of the output and each gradient. `train` takes MaxText's training
steps from the same parameters on the same batches, in turns, and prints losses and times of each. Further arguments
are MaxText's.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WAYS = ("dots", "ours")
METRICS = {"loss": "loss", "grad_norm": "raw_grad_norm"}  # of a training step: here, and at MaxText


def arguments(args):
    """MaxText's."""
    base = Path(importlib.util.find_spec("maxtext").origin).parent / "configs/base.yml"
    return [
        str(base), "run_name=times", f"hardware={args.hardware}", "skip_jax_distributed_system=true",
        "log_config=false", "enable_checkpointing=false", "attention=dot_product",
        f"base_output_directory={tempfile.gettempdir()}", *(args.given or ["model_name=deepseek4-284b"]),
    ]  # fmt: skip


def programs(args):
    """For each ratio: a function that is timed, its operands, and to how many of them it has gradients."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.layers.attention_compressed import CompressedAttention

    from jax_dsv4_fmha.adapters import maxtext as adapter

    s = args.tokens
    config = pyconfig.initialize(["", *arguments(args), f"max_target_length={s}"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes)), config.mesh_axes)
    keys = map(jax.random.key, range(100))
    normal = lambda *shape: jax.random.normal(next(keys), shape, config.dtype)  # noqa: E731
    i, ids = jnp.arange(s)[None], jnp.ones((1, s), jnp.int32)

    def layer(ratio):
        x = (1, s, config.emb_dim)
        return CompressedAttention(
            config=config, compress_ratio=ratio, num_query_heads=config.num_query_heads, num_kv_heads=1, mesh=mesh,
            head_dim=config.head_dim, max_target_length=s, attention_kernel="dot_product", inputs_q_shape=x,
            inputs_kv_shape=x, dtype=config.dtype, weight_dtype=config.weight_dtype, q_lora_rank=config.q_lora_rank,
            float32_logits=config.float32_logits, sliding_window_size=config.sliding_window_size, model_mode="train",
            rngs=nnx.Rngs(0),
        )  # fmt: skip

    def whole(ratio):
        graph, params, rest = nnx.split(layer(ratio), nnx.Param, ...)

        def run(x, params):
            return nnx.merge(graph, params, rest)(x, x, ids, i, deterministic=True, model_mode="train")[0]

        return run, (normal(1, s, config.emb_dim), params), 2

    def alone(ratio):
        op, (h, d), n = layer(ratio).attention_op, (config.num_query_heads, config.head_dim), s // (ratio or s)
        q, kv, sink = normal(1, s, h, d) * d**-0.5, normal(1, s, 1, d), jax.random.normal(next(keys), (h,))
        if not ratio:
            return lambda q, kv, sink: op(q, kv, kv, ids, i, "train", sinks=sink), (q, kv, sink), 3
        seen = jnp.arange(n) * ratio + ratio <= i[0, :, None] + 1
        order = jax.lax.top_k(
            jnp.where(seen, jax.random.uniform(next(keys), seen.shape), -1), min(config.indexer_topk, n)
        )
        indices = jnp.where(order[0] >= 0, order[1], -1)
        if ratio == 4:
            seen = jnp.zeros_like(seen).at[i.T, jnp.where(indices < 0, n, indices)].set(True, mode="drop")
        mask = jnp.where(seen, 0.0, 0.7 * jnp.finfo(jnp.float32).min)[None, None, None]

        def run(q, kv, entries, sink, mask, indices):
            adapter._chosen[:] = [indices] if ratio == 4 else []  # what the layer's indexer leaves there
            return op(
                q, kv, kv, ids, i, "train", sinks=sink, compressed_mask=mask, compressed_kv=entries,
                compress_ratio=ratio, decoder_segment_ids_kv=jnp.ones((1, s + n), jnp.int32),
            )  # fmt: skip

        return run, (q, kv, normal(1, n, 1, d), sink, mask, indices[None]), 4

    return adapter, {
        ratio: {"attention": alone, "layer": whole}[args.what](ratio) for ratio in map(int, args.ratios.split(","))
    }


def measure(args):
    import jax
    import jax.numpy as jnp

    adapter, found = programs(args)

    def gradients(run, count):
        def both(*x):
            y, back = jax.vjp(lambda *some: run(*some, *x[count:]), *x[:count])
            return y, *back(y)

        return both

    def lowered():
        each = {(r, "forward"): jax.jit(f).lower(*x) for r, (f, x, _) in found.items()}
        more = {(r, "forward and gradient"): jax.jit(gradients(f, n)).lower(*x) for r, (f, x, n) in found.items()}
        return each | more

    traced = {"dots": lowered()}
    adapter.register(args.implementation)
    jax.clear_caches()  # else nothing is traced anew
    traced["ours"] = lowered()
    with ThreadPoolExecutor() as pool:
        compiled = {way: {of: pool.submit(x.compile) for of, x in traced[way].items()} for way in WAYS}
    for ratio, name in traced["dots"]:
        runs, x = {way: compiled[way][ratio, name].result() for way in WAYS}, found[ratio][1]
        ours, dots = (jax.tree.leaves(jax.block_until_ready(runs[way](*x))) for way in ("ours", "dots"))
        norm = lambda y: float(jnp.linalg.norm(y.astype(jnp.float32)))  # noqa: E731
        apart = [norm(a - b) / (norm(b) or 1) for a, b in zip(ours, dots, strict=True)]
        del ours, dots
        times = {way: [] for way in WAYS}
        for _ in range(args.rounds):  # in turns, because a GPU's clock drifts
            for way, run in runs.items():
                began = time.monotonic()
                for _ in range(args.calls):
                    y = run(*x)
                jax.block_until_ready(y)
                times[way].append((time.monotonic() - began) / args.calls)
        ms = {f"{way}_ms": round(1e3 * statistics.median(x), 3) for way, x in times.items()}
        of = {"of": args.what, "ratio": ratio, "what": name, "tokens": args.tokens}
        print(json.dumps({**of, **ms, "apart": [round(a, 5) for a in apart]}), flush=True)


def fresh(batch, vocabulary, seed):
    """The batch with other tokens: of a language in which four may follow each, so that losses end near ln 4."""
    import jax
    import numpy as np

    follow = np.random.default_rng(0).integers(vocabulary, size=(vocabulary, 4), dtype=np.int32)
    draw, (rows, length) = np.random.default_rng(seed + 1), batch["inputs"].shape
    tokens = [draw.integers(vocabulary, size=rows)]
    for which in draw.integers(4, size=(length, rows)):
        tokens.append(follow[tokens[-1], which])
    tokens = np.stack(tokens, 1).astype(np.int32)
    parts = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    return batch | {name: jax.device_put(x, batch[name].sharding) for name, x in parts.items()}


def train(args):
    """MaxText's training step, compiled both ways. Both train in turns on MaxText's batch of synthetic tokens."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.trainers.pre_train import train as trainer
    from maxtext.utils import maxtext_utils, sharding, train_utils

    from jax_dsv4_fmha.adapters import maxtext as adapter

    more = [f"max_target_length={args.tokens}", f"steps={args.steps}", "dataset_type=synthetic"]
    config, recorder = trainer.initialize(["", *arguments(args), *more])
    _, _, shardings, _, mesh, *_, loader, _, _, state = train_utils.setup_train_loop(config, recorder)
    graph, state = nnx.split(state)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    of_batch = sharding.get_input_data_sharding(config, mesh)

    def lowered(state):
        step = train_utils.jit_train_step(
            config, graph, state, shardings, of_batch, trainer.train_step, of_params, mesh=mesh
        )
        return step.lower(state, maxtext_utils.get_shaped_batch(config))

    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        traced = [lowered(state)]
        adapter.register(args.implementation)
        jax.clear_caches()  # else nothing is traced anew
        traced.append(lowered(state))
        with ThreadPoolExecutor() as pool:
            steps = dict(zip(WAYS, pool.map(lambda x: x.compile(), traced), strict=True))
        states = {"ours": jax.tree.map(jnp.copy, state), "dots": state}
        del state  # a step takes over the memory of the state before
        lines = []
        for i in range(args.steps):
            batch, line = loader.load_next_batch(), {"of": "train", "step": i}
            batch = fresh(batch, config.vocab_size, i) if args.fresh else batch
            for way, step in steps.items():  # in turns, because a GPU's clock drifts
                began = time.monotonic()
                states[way], metrics = step(states.pop(way), batch)
                metrics = jax.block_until_ready(metrics)["scalar"]
                line[f"{way}_ms"] = round(1e3 * (time.monotonic() - began), 3)
                line |= {f"{way}_{x}": float(metrics[f"learning/{of}"]) for x, of in METRICS.items()}
            print(json.dumps(line), flush=True)
            lines.append(line)
    ms = {f"{way}_ms": round(statistics.median(x[f"{way}_ms"] for x in lines[1:] or lines), 3) for way in WAYS}
    apart = max(abs(x["ours_loss"] - x["dots_loss"]) for x in lines)
    print(json.dumps({"of": "train", "steps": args.steps, "tokens": args.tokens, **ms, "apart": apart}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["attention", "layer", "train"])
    parser.add_argument("--hardware", default="gpu", help="MaxText's: gpu or cpu")
    parser.add_argument("--implementation", help='"cubin" insists on kernels')
    parser.add_argument("--tokens", type=int, default=8192, help="of one row")
    parser.add_argument("--ratios", default="0,4,128", help="kinds of layers; 0 is a window alone")
    parser.add_argument("--rounds", type=int, default=7, help="in turns")
    parser.add_argument("--calls", type=int, default=5, help="in a row, in each round")
    parser.add_argument("--steps", type=int, default=200, help="of train")
    parser.add_argument(
        "--fresh", action="store_true", help="of train: other tokens in each step, of a random language"
    )
    args, args.given = parser.parse_known_args()
    (train if args.what == "train" else measure)(args)
