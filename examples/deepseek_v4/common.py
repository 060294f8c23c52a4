"""What the programs share: a model from a directory or a small random one, its mesh, and its words."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_dsv4_fmha import Cache

from .drafts import DSpark
from .model import Caches, Model
from .weights import load

KINDS = ("sliding", "compressed_sparse", "heavily_compressed")
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "q_lora_rank": 32,
    "o_groups": 8, "o_lora_rank": 8, "sliding_window": 16, "layer_types": [f"{kind}_attention" for kind in KINDS],
    "compress_rate_hca": 16, "index_n_heads": 16, "index_topk": 8, "rope_theta": 10000, "compress_rope_theta": 160000,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "num_hash_layers": 1,
    "hc_sinkhorn_iters": 3, "n_mtp_layers": 2, "dspark_block_size": 5, "dspark_noise_token_id": 63,
    "dspark_target_layer_ids": [1, 2], "dspark_markov_rank": 16,
}  # fmt: skip
"""A config.json without the sizes of heads"""
OF_V41 = {
    "num_hidden_layers": 5, "compress_ratios": [0, 2, 1, 1, 1], "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 4], "candidate_source_layer_id": 2, "candidate_topk_blocks": 4,
    "candidate_block_size": 4, "layer_types": None, "compress_rate_hca": None, "num_hash_layers": 0, "gate_temp": 1.5,
    "engram_layer_ids": [1], "engram_num_embeddings": [72], "engram_max_ngram_size": 4, "engram_n_heads": 2,
    "engram_head_dim": 64, "engram_vocab_size": 5, "engram_compressed_vocab_size": 23, "engram_pad_token_id": 2,
    "dspark_target_layer_ids": [1, 3], "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
"""What V4.1's differs in: layers that read others' entries and choices, and an engram"""


def config_of(random: str) -> dict[str, Any]:
    """The config of a random model: of `small`, or a file's."""
    if random in ("v4", "v4.1"):
        return small(random)
    if not Path(random).is_file():
        raise SystemExit(f"--random: got {random!r}, wanted v4, v4.1 or a config.json")
    return dict(json.loads(Path(random).read_text()))


def small(kind: str = "v4") -> dict[str, Any]:
    """The config of a model, "v4" or "v4.1", with every kind of layer; on a GPU with heads that kernels take."""
    d = 512 if jax.default_backend() == "gpu" else 32
    sizes = {"head_dim": d, "qk_rope_head_dim": d // 8, "index_head_dim": max(d // 4, 32 if kind == "v4.1" else 8)}
    return {**SMALL, **(OF_V41 if kind == "v4.1" else {}), **sizes}


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("checkpoint", nargs="?", help="a directory with config.json; by default a small random model")
    made.add_argument(
        "--random",
        default="v4",
        help="without a checkpoint: v4 or v4.1 for a small model, or a config.json (default: v4)",
    )
    made.add_argument("--tensor", type=int, default=1, help="devices that share out every expert (default: 1)")
    made.add_argument("--expert", type=int, default=1, help="devices that share out the experts (default: 1)")
    return made


@contextmanager
def mesh_of(tensor: int, expert: int, data: int | None = None, context: int = 1) -> Iterator[Mesh]:
    """All devices as (data, context, tensor, expert), which functions find around them; with data, fewer devices."""
    data = data or jax.device_count() // (context * tensor * expert)
    shape, names = (data, context, tensor, expert), ("data", "context", "tensor", "expert")
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4, devices=devices)
    with jax.set_mesh(mesh):
        yield mesh


def on_terminal(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="", flush=True, file=sys.stderr)


def opened(
    checkpoint: str | None, mesh: Mesh, dtype: Any, packed: bool = False, drafts: bool = False, random: str = "v4"
) -> tuple[Model | DSpark, dict[str, Any]]:
    """The model of a directory with its parameters, as `load` makes them, or one with random parameters.

    drafts: with its layers for drafts, if the config has some.
    """
    config = json.loads((Path(checkpoint) / "config.json").read_text()) if checkpoint else config_of(random)
    has_drafts = bool((config.get("text_config") or config).get("dspark_block_size"))
    model = (DSpark if drafts and has_drafts else Model).from_config(config)
    if checkpoint:
        return model, load(model, checkpoint, dtype, mesh, on_terminal, packed)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), model.partition())
    return model, jax.jit(model.init, static_argnums=1, out_shardings=shardings)(jax.random.key(0), dtype)


def words(checkpoint: str | None) -> tuple[Callable[..., np.ndarray], Callable[[list[int]], str]]:
    """From text to tokens and back, by the directory's tokenizer.json; without one, tokens are numbers.

    The first takes a second argument: whether the tokenizer adds special tokens, such as one that begins a text.
    """
    path = None if checkpoint is None else Path(checkpoint) / "tokenizer.json"
    if path is None or not path.exists():
        return lambda text, special=True: np.array(text.split(), np.int32), lambda tokens: "".join(
            f"{t} " for t in tokens
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def encode(text: str, special: bool = True) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=special).ids, np.int32)

    return encode, tokenizer.decode


def gib(tree: Any) -> float:
    """GiB of arrays, on all devices together."""
    return sum(shard.data.nbytes for x in jax.tree.leaves(tree) for shard in x.addressable_shards) / 2**30


def bytes_a_token(caches: Caches, tokens: int) -> tuple[float, int]:
    """Bytes of pools of pages for each of the tokens that they have room for; and of what each place has besides."""
    of_pages, others = 0, 0
    for cache in caches.layers:
        for part in cache:
            if isinstance(part, Cache) and part.block_table is not None:
                of_pages += part.entries.nbytes
            else:
                others += sum(x.nbytes for x in jax.tree.leaves(part))
    return of_pages / tokens, others // caches.layers[0].window.entries.shape[0]


def compute_dtype() -> Any:
    """bfloat16 where there are kernels for it; on a CPU float32, which is faster there."""
    return jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
