"""A layer serves texts of different lengths over devices, each with a pool of pages of its own, in FP8.

A place is a row of the batch; each device has some, and the pages of its places. A text takes an idle place of a device
that has pages enough, and gives place and pages back when it ends. The next text takes them as they are: nothing is
cleared. Tables of pages are data, so a call is compiled once, and no call sends anything between devices. At the end
every text is read alone, on one device and without pages, and must have had the same results. Without GPUs there are
four virtual CPU devices.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from examples.serving.pages import Pages
from jax_dsv4_fmha.layers import from_config

CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 8, "compress_ratios": [4],
    "index_n_heads": 4, "index_head_dim": 128, "index_topk": 4, "rope_theta": 1e4, "compress_rope_theta": 1.6e5,
}  # fmt: skip
PAGE = 128  # tokens: 32 entries of ratio 4, which kernels want of index keys in FP8


class Text(NamedTuple):
    """Hidden states bfloat16 `[s, hidden]`, the first `prompt` known at once, the others one in a step."""

    x: np.ndarray
    prompt: int


class Served:
    """Places of all devices, for texts of up to `room` tokens with prompts of up to `chunk`."""

    def __init__(self, layer, params, mesh, places, room, chunk, pages):
        """So many `places` and `pages` on each device of the mesh's axis "data"."""
        self.params, self.each, self.chunk = params, places, chunk
        self.pools = [Pages(places, room, PAGE, pages) for _ in mesh.devices.flat]
        self.texts, self.lengths = [None] * (places * mesh.size), np.zeros(places * mesh.size, np.int32)
        part = P("data")
        on_each = functools.partial(jax.shard_map, mesh=mesh, out_specs=part)

        def empty(table):
            return layer.cache(places, room, jnp.float8_e4m3fn, block_table=table, page_tokens=PAGE, pages=pages)

        def read(params, x, cache, table, lengths):
            out = layer(params, x, cache.with_block_table(table), start=0, lengths=lengths)
            return out.cache

        def step(params, x, cache, table, lengths):
            out = layer.step(params, x, cache.with_block_table(table), lengths=lengths)
            return out.y, out.cache

        self.cache = jax.jit(on_each(empty, in_specs=part))(self.table())
        specs = (P(), part, part, part, part)
        self.read, self.step = (jax.jit(on_each(f, in_specs=specs), donate_argnums=2) for f in (read, step))

    def table(self):
        """int32 `[b, n]`: each row has numbers of pages of its own device's pool."""
        return np.concatenate([pool.table for pool in self.pools])

    def begin(self, text):
        """Gives a text a place, and pages for all its tokens; returns the place, or None where no device has both."""
        for place in (i for i, other in enumerate(self.texts) if other is None):
            device, row = divmod(place, self.each)
            if self.pools[device].grow(row, len(text.x)):
                self.texts[place] = text
                return place
        return None

    def end(self, place):
        device, row = divmod(place, self.each)
        self.pools[device].leave(row)
        self.texts[place], self.lengths[place] = None, 0

    def read_prompts(self, new):
        """Reads the prompts of new places; others have length 0 here, and stay as they are."""
        x, lengths = np.zeros((len(self.texts), self.chunk, CONFIG["hidden_size"]), jnp.bfloat16), 0 * self.lengths
        for place in new:
            text = self.texts[place]
            x[place, : text.prompt], lengths[place] = text.x[: text.prompt], text.prompt
            self.lengths[place] = text.prompt
        self.cache = self.read(self.params, x, self.cache, self.table(), lengths)

    def operands(self):
        """The next token of every text; an idle place has length 0, and its token is not looked at."""
        x = np.zeros((len(self.texts), 1, CONFIG["hidden_size"]), jnp.bfloat16)
        for place, text in enumerate(self.texts):
            if text is not None:
                x[place, 0] = text.x[self.lengths[place]]
                self.lengths[place] += 1
        return self.params, x, self.cache, self.table(), self.lengths.copy()


def serve(served, texts):
    """Serves all texts; returns the results of their steps, and how often a place had another text before."""
    waiting, said, before, reused = list(enumerate(texts)), [[] for _ in texts], set(), 0
    at = {}
    while waiting or at:
        new = []
        while waiting and (place := served.begin(waiting[0][1])) is not None:
            at[place], reused = waiting.pop(0)[0], reused + (place in before)
            before.add(place)
            new.append(place)
        if new:
            served.read_prompts(new)
        y, served.cache = served.step(*served.operands())
        for place, i in list(at.items()):
            said[i].append(np.asarray(y[place, 0], np.float32))
            if served.lengths[place] == len(texts[i].x):
                served.end(place)
                del at[place]
    return [np.stack(x) for x in said], reused


class Alone:
    """One device with caches without pages, in which only the first place is ever busy."""

    def __init__(self, layer, params, places, room, chunk):
        self.layer, self.params, self.places, self.room, self.chunk = layer, params, places, room, chunk
        self.read, self.step = jax.jit(layer), jax.jit(layer.step, donate_argnums=2)

    def results(self, text):
        """The results of a text's steps."""
        cache = self.layer.cache(self.places, self.room, jnp.float8_e4m3fn)
        lengths, said = np.zeros(self.places, np.int32), []
        lengths[0] = text.prompt
        prompt = self._first(text.x[: text.prompt], self.chunk)
        cache = self.read(self.params, prompt, cache, start=0, lengths=lengths).cache
        for x in text.x[text.prompt :]:
            lengths = lengths + (lengths > 0)
            out = self.step(self.params, self._first(x[None], 1), cache, lengths=lengths)
            cache, said = out.cache, [*said, np.asarray(out.y[0, 0], np.float32)]
        return np.stack(said)

    def _first(self, x, s):
        """These hidden states as the first row of a batch of s tokens."""
        batch = np.zeros((self.places, s, x.shape[1]), x.dtype)
        batch[0, : len(x)] = x
        return batch


def main(texts=11, places=2, pages=3, room=256, chunk=128, steps=6):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    (layer,) = from_config(CONFIG)
    params = jax.jit(layer.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts = rng.integers(chunk // 2, chunk + 1, texts)
    lengths = prompts + rng.integers(1, steps + 1, texts)
    asked = [
        Text(rng.standard_normal((s, CONFIG["hidden_size"]), np.float32).astype(jnp.bfloat16), int(prompt))
        for s, prompt in zip(lengths, prompts, strict=True)
    ]
    served = Served(layer, params, mesh, places, room, chunk, pages)
    said, reused = serve(served, asked)
    alone = Alone(layer, params, places, room, chunk)
    off = max(np.abs(x - alone.results(text)).max() for x, text in zip(said, asked, strict=True))
    compiled = served.step.lower(*served.operands()).compile().as_text()
    sent = sorted(set(re.findall(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", compiled)))
    print(f"{texts} texts in {len(served.texts)} places of {mesh.size} {jax.default_backend()} devices,")
    print(f"{reused} of them where another had ended; collectives of a step: {', '.join(sent) or 'none'}")
    print(f"results differ by at most {off:.0e} from those alone; free pages: {[len(x.free) for x in served.pools]}")
    return off


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
