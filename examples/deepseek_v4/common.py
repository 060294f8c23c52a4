"""The parts that the programs share: a model from a directory or a small random one, its mesh, and its words."""

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from examples.serving import checked_tokens, integer, option
from examples.serving.request import short
from jax_dsv4_fmha import Cache

from . import stand_in
from .caches import Caches
from .checkpoint import read_json
from .config import text_of
from .drafts import DSpark
from .model import Model
from .weights import load

LONGEST_CHARACTER = 32
"""tokens that are not one character, or special ones, if no text has come by then"""
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
"""The entries in which V4.1's differs: layers that read others' entries and choices, and an engram"""


def config_of(random: str) -> dict[str, Any]:
    """The config of a random model: of `small`, or a file's."""
    if random in ("v4", "v4.1"):
        return small(random)
    if not Path(random).is_file():
        raise SystemExit(f"--random: got {random!r}, wanted v4, v4.1 or a config.json")
    return read_json(Path(random))


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
    for name, what in (("tensor", "every expert"), ("expert", "the experts")):
        made.add_argument(f"--{name}", type=at_least(1), default=1, help=f"devices that share out {what} (default: 1)")
    option_compiled(made)
    return made


def option_compiled(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compiled", help="a directory that keeps what is compiled for programs that are run again")


def run(main: Callable[..., Any], compiled: str | None = None, **arguments: Any) -> None:
    """Calls a program. What it raises of what it was given is said in a line; `python -X dev` says where, too.

    compiled: the directory of JAX's persistent compilation cache.
    """
    if compiled is not None:
        jax.config.update("jax_compilation_cache_dir", compiled)
    try:
        main(**arguments)
    except (ValueError, FloatingPointError, NotImplementedError, OSError, MemoryError, jax.errors.JaxRuntimeError) as e:
        of_memory = isinstance(e, MemoryError) or str(e).startswith("RESOURCE_EXHAUSTED")
        if sys.flags.dev_mode or (isinstance(e, jax.errors.JaxRuntimeError) and not of_memory):
            raise
        sys.exit(f"error: not enough memory on {jax.devices()[0]}: {e}" if of_memory else f"error: {e}")


def writable(file: str | None) -> None:
    """Raises OSError if a program, which works long before, could not write to its file."""
    if file is not None:
        open(file, "ab").close()


def at_least(least: int) -> Callable[[str], int]:
    """The type of a command line's option: an integer that is not below `least`."""
    return functools.partial(option, least)


@contextmanager
def mesh_of(tensor: int, expert: int, data: int | None = None, context: int = 1) -> Iterator[Mesh]:
    """All devices as (data, context, tensor, expert), which functions find around them; with data, fewer devices."""
    data = data or jax.device_count() // (context * tensor * expert)
    if not 1 <= data * context * tensor * expert <= jax.device_count():
        got = f"data {data}, context {context}, tensor {tensor}, expert {expert}"
        raise ValueError(f"a mesh of {got}: wanted no more devices than there are, {jax.device_count()}")
    shape, names = (data, context, tensor, expert), ("data", "context", "tensor", "expert")
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4, devices=devices)
    with jax.set_mesh(mesh):
        yield mesh


def on_terminal(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="", flush=True, file=sys.stderr)


def model_of(
    checkpoint: str | None, drafts: bool = False, random: str = "v4", fake_quantize: bool | None = None
) -> Model | DSpark:
    """The model of a directory's config.json, or of `random`; drafts: with its layers for drafts, if it has some.

    fake_quantize: as in `layers.from_config`, of a model without those.
    """
    config = read_json(Path(checkpoint) / "config.json") if checkpoint else config_of(random)
    has_drafts = drafts and text_of(config).get("dspark_block_size") is not None
    return DSpark.from_config(config) if has_drafts else Model.from_config(config, fake_quantize)


def parameters_of(
    model: Model | DSpark, checkpoint: str | None, mesh: Mesh, dtype: Any, packed: bool = False, fused: bool = True
) -> dict[str, Any]:
    """The parameters of a directory, as `load` makes them, or random ones, packed where `stand_in` makes such."""
    if checkpoint:
        return load(model, checkpoint, dtype, mesh, on_terminal, packed, fused)
    if packed and fused and stand_in.fits(model, mesh):
        return stand_in.parameters(model, mesh, dtype)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), model.partition())
    return jax.jit(model.init, static_argnums=1, out_shardings=shardings)(jax.random.key(0), dtype)


def opened(checkpoint: str | None, mesh: Mesh, dtype: Any, random: str = "v4") -> tuple[Model | DSpark, dict[str, Any]]:
    """Both of these."""
    model = model_of(checkpoint, random=random)
    return model, parameters_of(model, checkpoint, mesh, dtype)


class Words:
    """Turns text into tokens and back, by a directory's tokenizer.json; without one, tokens are numbers in decimal."""

    def __init__(self, checkpoint: str | None, vocabulary: int) -> None:
        self.vocabulary, self.tokenizer = vocabulary, None
        path = None if checkpoint is None else Path(checkpoint) / "tokenizer.json"
        if path is not None and path.exists():
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str, special: bool = True, name: str = "prompt") -> np.ndarray:
        """Tokens int32 `[n]`, which may be none.

        Args:
          special: adds the tokenizer's own tokens, such as one that begins a text.
          name: of the text, for errors.

        Raises:
          ValueError: a word is no number, a token is not in the model's vocabulary, or the text has a surrogate, as
            Python makes one of a byte that is no character.
        """
        if self.tokenizer is not None:
            try:
                text.encode()
            except UnicodeEncodeError as e:  # the tokenizer's error is a TypeError that says nothing
                got = f"{text[e.start]!r} as character number {e.start}"
                raise ValueError(f"{name}: got {got}, wanted a text in UTF-8") from None
            found = self.tokenizer.encode(text, add_special_tokens=special).ids
        else:
            found = []
            for word in text.split():
                if not re.fullmatch(r"-?[0-9]{1,18}", word):
                    wanted = f"tokens: numbers from 0 to {self.vocabulary - 1}, and blanks"
                    raise ValueError(f"{name}: got {short(word)}, wanted {wanted}")
                found.append(int(word))
        return checked_tokens(name, found, self.vocabulary) if found else np.zeros(0, np.int32)

    def stream(self) -> "Text":
        """Returns what makes text of one request's tokens as they come."""
        return Text(self.tokenizer)


class Text:
    """The text of tokens that come one by one. Each takes as long as the next, however many came before it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.held = tokenizer, list[int]()
        """tokens without a text of their own so far"""
        self._begin()

    def _begin(self) -> None:
        if self.tokenizer is not None:
            from tokenizers.decoders import DecodeStream

            self.stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """Returns the text that a token adds: none for one that ends inside of a character, or that is special."""
        if self.tokenizer is None:
            return f"{token} "
        try:
            new = self.stream.step(self.tokenizer, token)
        except Exception as e:  # the library's, which has no class of its own for it
            if "Invalid prefix" not in str(e):
                raise
            self._begin()  # with this token the last ones have another text; what was said stays
            new = self.stream.step(self.tokenizer, token)
        if new:
            self.held.clear()
            return new
        self.held.append(token)
        return self.end() if len(self.held) == LONGEST_CHARACTER else ""  # the stream decodes these at every token

    def end(self) -> str:
        """Returns the text of the tokens that are still held: at the end, a part of a character."""
        if not self.held:
            return ""
        text = self.tokenizer.decode(self.held)
        self.held.clear()
        self._begin()
        return text


def ends(checkpoint: str | None) -> frozenset[int]:
    """All tokens that end a text, as config.json and generation_config.json name them: one, several or none.

    Raises:
      ValueError: one is not an integer.
    """
    found: list[int] = []
    for name in ("config.json", "generation_config.json") if checkpoint else ():
        path = Path(checkpoint or ".") / name
        config = read_json(path) if path.exists() else {}
        for given in (config.get("eos_token_id"), text_of(config).get("eos_token_id")):
            of_file = [] if given is None else given if isinstance(given, list) else [given]
            found += [integer(f"{path}: eos_token_id", x, 0) for x in of_file]
    return frozenset(found)


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
