"""Measures what choices of entries have in common: `python -m examples.deepseek_v4.choices CHECKPOINT < text.txt`.

A layer with an indexer chooses `topk` past entries for each token. Two tables say which share of them

    the token 1, 2, 4, … tokens before it chose too, in the same layer;
    the same token chose in an earlier layer, too.

If neighbours choose alike, their entries could be gathered once. If layers choose alike, one choice could serve several
(docs/layers.md, "Handing a layer its choice"). Only tokens with twice as many past entries as they choose count, and
"by chance" is the share that a random choice would have. Without a checkpoint the model is small and random.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import common
from .model import Model


def choices(model: Model, params: Any, tokens: jax.Array) -> dict[int, jax.Array]:
    """The entries int32 `[s, topk]` that each layer with an indexer chooses, for tokens `[s]`, by its number."""

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> list[jax.Array]:
        def attend(layer, p, x, _, shared):
            return layer(p, x, shared=shared)

        rows, _ = model.rows(params, tokens)
        outputs = model.forward(params, tokens, rows, [None] * len(model.layers), attend).outputs
        return [out.indices[0] for out in outputs if out.indices is not None]

    which = [i for i, layer in enumerate(model.layers) if layer.indexer]
    found = run(params, tokens[None])
    return dict(zip(which[len(which) - len(found) :], found, strict=True))


def overlap(one: np.ndarray, other: np.ndarray, counts: np.ndarray) -> float:
    """Averages, over the rows that count, the share of a row's entries in `one` that the row has in `other`, too."""
    chosen = np.zeros((2, len(one), max(one.max(initial=-1), other.max(initial=-1)) + 2), bool)
    for of, entries in zip(chosen, (one, other), strict=True):
        np.put_along_axis(of, entries, True, 1)  # -1, which is none, is the last column
    both = chosen[..., :-1].all(0).sum(1) / (one >= 0).sum(1).clip(1)
    return float(both[counts].mean()) if counts.any() else float("nan")


def main(
    text: str | None = None,
    checkpoint: str | None = None,
    length: int = 1024,
    distances: Sequence[int] = (1, 2, 4, 8, 16, 64),
    tensor: int = 1,
    expert: int = 1,
    random: str = "v4",
) -> dict[tuple[int, int | str], float]:
    """Prints the tables, and returns their numbers by (layer, distance) and (layer, "layer i")."""
    with common.mesh_of(tensor, expert, data=1) as mesh:
        model, params = common.opened(checkpoint, mesh, common.compute_dtype(), random=random)
        if checkpoint is None and text is None:
            tokens = np.random.default_rng(0).integers(0, model.vocabulary, length)
        else:
            words = common.Words(checkpoint, model.vocabulary)
            tokens = words.encode(sys.stdin.read() if text is None else text, name="the text")[:length]
            if not len(tokens):
                raise ValueError("the text: got no tokens, wanted at least one")
        found = {i: np.asarray(x) for i, x in choices(model, params, jnp.asarray(tokens, jnp.int32)).items()}
    past = {i: (np.arange(len(tokens)) + 1) // model.layers[i].ratio for i in found}
    counts = {i: past[i] >= 2 * x.shape[1] for i, x in found.items()}
    shares: dict[tuple[int, int | str], float] = {}
    for i, x in found.items():
        some = past[i][counts[i]]
        shares[i, "by chance"] = float((x.shape[1] / some).mean()) if len(some) else float("nan")
        for d in distances:
            shares[i, d] = overlap(x[d:], x[:-d], counts[i][d:])
        for j in found:
            if j < i and model.layers[j].ratio == model.layers[i].ratio:
                shares[i, f"layer {j}"] = overlap(x, found[j], counts[i])
    print(f"{len(tokens)} tokens; the share of a token's entries that …")
    table("chosen by the token before it, at a distance of", shares, found, [*distances, "by chance"])
    table("chosen by itself in an earlier layer", shares, found, [f"layer {j}" for j in list(found)[:-1]])
    return shares


def table(title: str, shares: Any, layers: Any, columns: Sequence[Any]) -> None:
    if not columns:
        return
    print(f"\n{title}\n{'layer':>9}" + "".join(f"{c!s:>11}" for c in columns))
    for i in layers:
        cells = (f"{shares[i, c]:>11.1%}" if (i, c) in shares else " " * 11 for c in columns)
        print(f"{i:>9}" + "".join(cells))


def arguments() -> dict[str, Any]:
    parser = common.parser(__doc__.split("\n\n")[0])
    parser.add_argument(
        "--length", type=common.at_least(1), default=1024, help="tokens of the text that count (default: 1024)"
    )
    parser.add_argument(
        "--distances", type=common.at_least(1), nargs="+", default=(1, 2, 4, 8, 16, 64), help="between tokens"
    )
    return vars(parser.parse_args())


if __name__ == "__main__":
    common.run(main, **arguments())
