"""Makes shards of tokens: `python -m examples.deepseek_v4.data TEXT… --to DIRECTORY [--checkpoint DIRECTORY]`.

A line of a text is a document, and so is the "text" of a line of a .jsonl. A shard is two arrays of NumPy: tokens, one
document after the other, and where each ends. `shards.json` lists them.

A row to train on is the next `s` tokens of a shard, whichever documents they are of, and an id of each one's document.
So row i is known without the rows before it, as grain wants it, and what a step trains on follows from its number
alone: whoever goes on after a stop, on any number of processes, has the batches of one process that never stopped.
"""

import argparse
import importlib.util
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from examples.serving import checked_tokens

from . import common
from .checkpoint import read_json

INDEX = "shards.json"
MANY = 1 << 24
"""tokens of a file that are checked at once"""
SHARD = 1 << 26
"""tokens after which a shard is full"""


class Row(NamedTuple):
    """Tokens to train on."""

    tokens: Any
    """int32 `[s]`; of a batch `[b, s]`"""
    documents: Any
    """int32, like tokens: equal for tokens of one document; None if all are of one"""


class Walks:
    """Rows of walks in steps of 1 to 4, whose loss is log 4."""

    def __init__(self, vocabulary: int, s: int, seed: int) -> None:
        self.vocabulary, self.s, self.seed = vocabulary, s, seed

    def __getitem__(self, i: int) -> Row:
        steps = np.random.default_rng([self.seed, i]).integers(1, 5, self.s)
        return Row((np.cumsum(steps) % self.vocabulary).astype(np.int32), None)

    def __repr__(self) -> str:
        return "walks"


class File:
    """Rows of a .npy file of tokens, which is one document. It is mapped into memory.

    Raises:
      ValueError: the file has no line of integers, fewer than s of them, or one that is not in the vocabulary.
    """

    def __init__(self, path: Path, vocabulary: int, s: int) -> None:
        self.path, self.s, self.tokens = path, s, array(path)
        if len(self.tokens) < s:
            raise ValueError(f"{path}: got {len(self.tokens)} tokens, wanted at least {s}, those of a row")
        for at in range(0, len(self.tokens), MANY):
            checked_tokens(f"{path}, from token {at} on", self.tokens[at : at + MANY], vocabulary)

    def __len__(self) -> int:
        return len(self.tokens) // self.s

    def __getitem__(self, i: int) -> Row:
        return Row(self.tokens[i * self.s : (i + 1) * self.s].astype(np.int32), None)

    def __repr__(self) -> str:
        return f"{len(self.tokens)} tokens of {self.path.name}"


class Shards:
    """Rows of the shards of a directory. Tokens are checked when the row that has them is read.

    Raises:
      ValueError: the directory has no shards, those of a larger vocabulary, other files than it says, or no row.
    """

    def __init__(self, directory: Path, vocabulary: int, s: int) -> None:
        self.directory, self.vocabulary, self.s = directory, vocabulary, s
        if not (directory / INDEX).is_file():
            raise ValueError(f"{directory}: got no {INDEX}, wanted the directory of `examples.deepseek_v4.data --to`")
        index = read_json(directory / INDEX)
        if index["vocabulary"] > vocabulary:
            raise ValueError(
                f"{directory}: got shards of {index['vocabulary']} tokens, wanted the model's {vocabulary}"
            )
        self.checksum, self.shards = index.get("checksum"), []
        for name, size in index["tokens"].items():
            tokens, ends = (array(directory / f"{name}.{part}.npy") for part in ("tokens", "ends"))
            if not len(tokens) == size == (ends[-1] if len(ends) else 0):
                raise ValueError(f"{directory / name}: got {len(tokens)} tokens, wanted {size}, as {INDEX} says")
            self.shards.append((name, tokens, ends))
        self.rows = np.cumsum([0, *(len(tokens) // s for _, tokens, _ in self.shards)])
        if not len(self):
            raise ValueError(f"{directory}: got no shard of {s} tokens, wanted at least one, with a row")

    def __len__(self) -> int:
        return int(self.rows[-1])

    def __getitem__(self, i: int) -> Row:
        n = int(np.searchsorted(self.rows, i, "right")) - 1
        (name, all_tokens, ends), at = self.shards[n], (i - int(self.rows[n])) * self.s
        tokens = checked_tokens(
            f"{self.directory / name}, from token {at} on", all_tokens[at : at + self.s], self.vocabulary
        )
        first = np.searchsorted(ends, at, "right")
        inside = ends[first : np.searchsorted(ends, at + self.s, "right")] - at
        return Row(tokens, np.searchsorted(inside, np.arange(self.s), "right").astype(np.int32))

    def __repr__(self) -> str:
        tokens, documents = (sum(len(shard[i]) for shard in self.shards) for i in (1, 2))
        return f"{tokens} tokens of {documents} documents, checksum {self.checksum}"


def array(path: Path) -> np.ndarray:
    """Integers `[n]` of a .npy file, mapped into memory.

    Raises:
      ValueError: the file has something else.
    """
    try:
        whole = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise ValueError(f"{path}: got no array of NumPy, wanted tokens: {e}") from None
    if not isinstance(whole, np.ndarray) or whole.ndim != 1 or whole.dtype.kind not in "iu":
        got = f"{whole.dtype}{list(whole.shape)}" if isinstance(whole, np.ndarray) else "several arrays"
        raise ValueError(f"{path}: got {got}, wanted one line of integers")
    return whole


def rows_of(tokens: str | None, vocabulary: int, s: int, seed: int) -> Walks | File | Shards:
    """The rows of a directory of shards, of a .npy file, or of walks that can be learned."""
    if tokens is None:
        return Walks(vocabulary, s, seed)
    if not importlib.util.find_spec("grain"):
        raise SystemExit("--tokens: got no package grain, wanted those of `pip install '.[examples]'`")
    return (Shards if Path(tokens).is_dir() else File)(Path(tokens), vocabulary, s)


class Batches:
    """The batches of b rows: step i has rows `b i` to `b i + b - 1`, shuffled anew each time that all have been seen.

    A process reads the rows of its own devices, ahead of time.
    """

    def __init__(self, rows: Any, b: int, sharding: Sharding, seed: int) -> None:
        self.rows, self.b, self.sharding, self.seed = rows, b, sharding, seed
        parts = sharding.addressable_devices_indices_map((b,)).values()
        self.own = sorted({row for (part,) in parts for row in range(*part.indices(b))})
        """the rows of a batch that this process's devices have"""

    def between(self, first: int, until: int) -> Iterator[dict[int, Row]]:
        """This process's rows of steps first … until - 1, by their place in the batch."""
        if isinstance(self.rows, Walks):
            return ({row: self.rows[i * self.b + row] for row in self.own} for i in range(first, until))
        import grain

        shuffled = grain.MapDataset.source(self.rows).seed(self.seed).shuffle().repeat()
        steps = grain.MapDataset.range(first, until).map(
            lambda i: {row: shuffled[int(i) * self.b + row] for row in self.own}
        )
        return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)))

    def on_devices(self, own: dict[int, Row]) -> Row:
        """The batch as arrays `[b, s]` over the processes' devices."""

        def whole(name: str) -> jax.Array | None:
            some = getattr(own[self.own[0]], name)
            if some is None:
                return None

            def part(at: Sequence[slice]) -> np.ndarray:
                return np.stack([getattr(own[row], name)[at[1]] for row in range(*at[0].indices(self.b))])

            return jax.make_array_from_callback((self.b, len(some)), self.sharding, part)

        return Row(*map(whole, Row._fields))

    def described(self) -> dict[str, Any]:
        """Says what the batches follow from, for a program that goes on: it must have the same."""
        return {"rows": str(self.rows), "s": self.rows.s, "b": self.b, "seed": self.seed}


def documents_of(paths: Iterable[str], words: common.Words, end: int | None) -> Iterator[np.ndarray]:
    """The tokens of each document of some texts that has any; end: a token that is put after each.

    Raises:
      ValueError: a line of a .jsonl has no "text", or a text has what is no token of the vocabulary.
    """
    for path in paths:
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:  # which `encode` refuses by name
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                name = f"{path}:{number}"
                if path.endswith(".jsonl"):
                    try:
                        line = json.loads(line)["text"] + ""
                    except (ValueError, KeyError, TypeError):
                        raise ValueError(f'{name}: got {line[:40]!r}, wanted an object with a "text"') from None
                found = words.encode(line.removesuffix("\n"), name=name)
                if len(found):
                    yield found if end is None else np.append(found, np.int32(end))


def write(documents: Iterable[np.ndarray], directory: Path, vocabulary: int, most: int = SHARD, seed: int = 0) -> str:
    """Writes documents into shards of about `most` tokens, shuffled within each; and says how many there are."""
    random, dtype = np.random.default_rng(seed), np.min_scalar_type(vocabulary - 1)
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / INDEX).exists():
        raise ValueError(f"{directory}: got a directory with {INDEX}, wanted a new one")
    waiting, size, sizes, count, checksum = list[np.ndarray](), 0, dict[str, int](), 0, 0

    def full() -> None:
        nonlocal size, checksum
        shuffled = [waiting[i] for i in random.permutation(len(waiting))]
        name = f"{len(sizes):05}"
        tokens, ends = np.concatenate(shuffled).astype(dtype), np.cumsum([len(x) for x in shuffled])
        checksum = zlib.crc32(ends.tobytes(), zlib.crc32(tokens.tobytes(), checksum))
        np.save(directory / f"{name}.tokens.npy", tokens)
        np.save(directory / f"{name}.ends.npy", ends)
        sizes[name], size = size, 0
        waiting.clear()

    for document in documents:
        waiting.append(document)
        size, count = size + len(document), count + 1
        if size >= most:
            full()
    if waiting:
        full()
    if not count:
        raise ValueError(f"{directory}: got no document to write, wanted at least one")
    (directory / INDEX).write_text(
        json.dumps({"vocabulary": vocabulary, "tokens": sizes, "checksum": checksum})
    )  # last: all are there
    return f"{count} documents, {sum(sizes.values())} tokens, {len(sizes)} shards in {directory}"


def main(
    texts: Sequence[str],
    to: str,
    checkpoint: str | None = None,
    vocabulary: int = common.SMALL["vocab_size"],
    end: int | None = None,
    most: int = SHARD,
    seed: int = 0,
) -> None:
    if checkpoint:
        vocabulary = common.model_of(checkpoint).vocabulary
    if end is not None:
        checked_tokens("--end", [end], vocabulary)
    words = common.Words(checkpoint, vocabulary)
    print(write(documents_of(texts, words, end), Path(to), vocabulary, most, seed))


def arguments() -> dict:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("texts", nargs="+", help='texts with a document on each line, or .jsonl with a "text"')
    parser.add_argument("--to", required=True, help="the directory for shards, which has none yet")
    parser.add_argument(
        "--checkpoint", help="a directory with config.json and tokenizer.json; by default texts are numbers"
    )
    parser.add_argument(
        "--vocabulary", type=common.at_least(1), default=common.SMALL["vocab_size"], help="tokens, without a checkpoint"
    )
    parser.add_argument("--end", type=common.at_least(0), help="a token to put after each document (default: none)")
    parser.add_argument("--most", type=common.at_least(1), default=SHARD, help="tokens after which a shard is full")
    parser.add_argument("--seed", type=common.at_least(0), default=0, help="of the order of a shard's documents")
    return vars(parser.parse_args())


if __name__ == "__main__":
    common.run(main, **arguments())
