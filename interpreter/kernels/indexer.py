"""The lightning indexer's two kernels, launched as our own launcher plans them, one after the other; and a judgement.

Blocks of queries are taken `at_a_time`, as a workspace has room for them: the second launch of the scores overwrites
what the first choice has read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kernels.abi import ANY, INDEX_BLOCK, IndexerScores, IndexerScoresAt, TopK
from kernels.variants import VARIANTS

from ..machine import scheduler
from ..machine.reductions import add_cleared
from ..machine.state import Array, Machine, new_memory
from . import native, nibbles
from .launch import Kernel, machine
from .verdict import Wrong

Edit = Callable[[str], str]
TOPKS = {v.arch: v for v in VARIANTS if isinstance(v, TopK) and v.max_rows == ANY}  # of an architecture
TOPK = TOPKS["sm_90a"]
SHARED_ROWS = {v.arch: v for v in VARIANTS if isinstance(v, TopK) and v.max_rows < ANY}  # whose rows CTAs share


CASES = {
    # blocks of queries of two batch entries, three tiles of keys
    "tiles": {"b": 2, "s_q": 9, "s_c": 300, "topk": 40},
    # more key tiles than a ring has stages, several blocks of queries
    "turns": {"b": 1, "s_q": 17, "s_c": 1100, "topk": 40},
}


@dataclass(frozen=True)
class Problem:
    """Operands of an indexer; 8-bit keys have scales, and of 4-bit keys every 32 numbers, as codes of ue8m0."""

    q: Array
    k: Array
    weights: Array
    k_scale: Array
    start: Array
    stop: Array
    topk: int
    page: int = 0  # keys of one; 0 of keys that are in none

    @staticmethod
    def of(variant: IndexerScores, b: int, s_q: int, s_c: int, topk: int, page: int = 0) -> Problem:
        """Spans of every length, none among them; keys that no query sees are NaN."""
        rng, dtype = np.random.default_rng(0), np.dtype(variant.dtype)
        q, k = (rng.standard_normal(s).astype(np.float32) for s in ((b, s_q, variant.heads, 128), (b, s_c, 128)))
        weights = rng.standard_normal((b, s_q, variant.heads)).astype(np.float32)
        k_scale = rng.uniform(0.5, 2, (b, s_c)).astype(np.float32)
        stop = np.linspace(0, s_c - 3, b * s_q).astype(np.int32).reshape(b, s_q)
        start = np.where(np.arange(s_q) % 3 == 2, stop // 3, 0).astype(np.int32) * np.ones_like(stop)
        if variant.packing:
            k_scale = rng.integers(122, 131, (b, s_c, 4)).astype(np.uint8)  # some are greater than 2
            k_scale[:, 5::7, 1] = 90
            k = nibbles.rounded(k, k_scale)
        k[:, s_c - 3 :] = np.nan
        return Problem(q.astype(dtype), k.astype(dtype), weights, k_scale, start, stop, topk, page)

    @staticmethod
    def case(variant: IndexerScores, name: str) -> Problem | None:
        """One of `CASES`; None if there is none of this name."""
        if name not in CASES:
            return None
        return Problem.of(variant, **CASES[name], page=64 if variant.paged else 0)

    @staticmethod
    def seen_by_all(variant: IndexerScores, queries: int, keys: int) -> Problem:
        """Every query sees all keys."""
        x = Problem.of(variant, 1, queries, keys + 3, 40)
        start, stop = np.zeros_like(x.start), np.full_like(x.stop, keys)
        page = -(-keys // 256) * 256 if variant.paged else 0
        return replace(x, k=x.k[:, :keys], k_scale=x.k_scale[:, :keys], start=start, stop=stop, page=page)

    @property
    def of_4_bits(self) -> bool:
        return self.k_scale.dtype == np.uint8

    @property
    def judged(self) -> tuple[Array, Array]:
        """The first block with a key that each query sees, and its newest block, which is not judged."""
        return self.start // INDEX_BLOCK, (self.stop - 1) // INDEX_BLOCK

    def greatest(self) -> Array:
        """float64 [b, s_q, blocks], the greatest score that is a number of each block's keys from `start` on."""
        scores = self.scores()
        scores[np.isnan(scores) | (np.arange(scores.shape[2]) < self.start[..., None])] = -np.inf
        filled = np.pad(scores, ((0, 0), (0, 0), (0, -scores.shape[2] % INDEX_BLOCK)), constant_values=-np.inf)
        greatest: Array = filled.reshape(*scores.shape[:2], -1, INDEX_BLOCK).max(-1)
        return greatest

    def pages(self) -> tuple[Array, Array]:
        """The keys in pages, with their scales where they have 8 bits, in any order and among others; their table."""
        (b, s_c, _), page = self.k.shape, self.page
        width = -(-s_c // page)
        keys = np.full((b, width * page, 128), np.nan, self.k.dtype)
        keys[:, :s_c] = self.k
        nothing = nibbles.NAN if self.of_4_bits else np.nan
        scales = np.full((b, width * page, *self.k_scale.shape[2:]), nothing, self.k_scale.dtype)
        scales[:, :s_c] = self.k_scale
        if self.of_4_bits:
            keys, scales = nibbles.packed(keys, scales)
        parts = [x.reshape(b * width, -1).view(np.uint8) for x in (keys, scales)]
        each = np.concatenate(parts[: 2 if self.of_4_bits or self.k.dtype.itemsize == 1 else 1], 1)
        table = np.random.default_rng(1).permutation(b * width + 3)[: b * width].astype(np.int32)
        pool = np.full((b * width + 3, each.shape[1]), 0xFF, np.uint8)
        pool[table] = each
        return pool, table.reshape(b, width)

    def scores(self) -> Array:
        """float64 [b, s_q, s_c]"""
        q, k = self.q.astype(np.float64), self.k.astype(np.float64)
        products = np.einsum("bnhd,bsd->bnhs", q, k)
        scores: Array = np.einsum("bnhs,bnh->bns", np.maximum(products, 0), self.weights.astype(np.float64))
        return scores * self.k_scale[:, None] if self.q.dtype.itemsize == 1 else scores

    @property
    def seen(self) -> Array:
        j = np.arange(self.k.shape[1])
        return (self.start[..., None] <= j) & (j < self.stop[..., None])


@dataclass
class Run:
    """The results, and the scores from which the entries were chosen."""

    indices: Array
    values: Array
    scores: Array


@dataclass(frozen=True)
class Call:
    """A call of the indexer: what its launches have in common."""

    kernel: Kernel[IndexerScores]
    x: Problem
    operands: dict[str, Array]
    shape: dict[str, int]
    processors: int

    @staticmethod
    def of(kernel: Kernel[IndexerScores], x: Problem, processors: int, wants_values: bool = True) -> Call:
        variant = kernel.variant
        (b, s_q, heads, _), s_c = x.q.shape, x.k.shape[1]
        operands = {name: getattr(x, name) for name in ("q", "k", "weights", "k_scale", "start", "stop")}
        paging = dict.fromkeys(("pages", "page", "width"), 0)
        if variant.paged:
            operands["k"], operands["table"] = x.pages()
            del operands["k_scale"]
            paging = {"pages": len(operands["k"]), "page": x.page, "width": operands["table"].shape[1]}
            s_c = x.page * paging["width"]
        tile_m, tile_n = kernel.facts["tile_m"], kernel.facts["tile_n"]
        shape = {"b": b, "s_q": s_q, "s_c": s_c, "heads": heads, "topk": x.topk, "type": native.TYPES[variant.dtype]}
        shape |= {"of_4_bits": int(x.of_4_bits)}
        keys = INDEX_BLOCK if variant.blocks else 1
        shape |= {"queries": tile_m // heads, "stride": -(-s_c // tile_n) * tile_n // keys, "keys_of_score": keys}
        shape |= {"wants_values": int(wants_values and not variant.blocks)}
        return Call(kernel, x, operands, shape | paging, processors)

    @property
    def blocks_of_entry(self) -> int:
        return -(-self.shape["s_q"] // self.shape["queries"])

    @property
    def blocks(self) -> int:
        return self.shape["b"] * self.blocks_of_entry

    def plans(self, first: int, count: int, addresses: dict[str, int]) -> tuple[native.Plan, native.Plan]:
        """The launches for so many blocks of queries."""
        tiles = {name: self.kernel.facts[name] for name in ("tile_m", "tile_n")}
        how = {"processors": self.processors, "first": first, "count": count}
        return native.plan_indexer(self.shape, **tiles, **how, addresses=addresses)

    def scoring(
        self,
        first: int = 0,
        count: int | None = None,
        *,
        seed: int = 0,
        edit: Edit = lambda text: text,
        record: bool = False,
    ) -> Machine:
        """About to score so many blocks of queries."""
        count, memory = self.blocks if count is None else count, new_memory()
        addresses = {name: memory.add(name, array) for name, array in self.operands.items()}
        size = count * self.shape["queries"] * self.shape["stride"] * 4
        addresses["scores"] = memory.add("scores", None, size)
        plan, _ = self.plans(first, count, addresses)
        return machine(replace(self.kernel, ptx=edit(self.kernel.ptx)), plan, memory, seed=seed, record=record)

    def rows(self, scored: Machine) -> Array:
        """Returns what a machine that has scored leaves: a row of scores for each query of its blocks."""
        found = scored.memory.named("scores")
        return found.bytes[: found.size].view(np.float32).reshape(-1, self.shape["stride"])

    def scores(self, rows: Array) -> Array:
        """[b, s_q, s_c] of the rows of all blocks."""
        (b, s_q, *_), (_, s_c, _) = self.x.q.shape, self.x.k.shape
        scores = -(-s_c // self.shape["keys_of_score"])
        return rows.reshape(b, -1, self.shape["stride"])[:, :s_q, :scores]

    def judge(self, scored: Machine) -> None:
        """Raises Wrong unless a run over all blocks gave the right scores."""
        judge_either(self.kernel.variant, self.x, self.scores(self.rows(scored)))


def run(
    variant: IndexerScores,
    x: Problem,
    *,
    at_a_time: int | None = None,
    processors: int = 2,
    seed: int = 0,
    wants_values: bool = True,
    edit_scores: Edit = lambda text: text,
    edit_topk: Edit = lambda text: text,
) -> Run:
    call, choosing = Call.of(Kernel.of(variant), x, processors, wants_values), Kernel.of(TOPKS[variant.arch])
    (b, s_q, *_), queries = x.q.shape, call.shape["queries"]
    out = Run(np.full((b, s_q, x.topk), -7, np.int32), np.full((b, s_q, x.topk), np.nan, np.float32), np.empty(0))
    parts = []
    for first in range(0, call.blocks, at_a_time or call.blocks):
        count = min(at_a_time or call.blocks, call.blocks - first)
        scored = call.scoring(first, count, seed=seed, edit=edit_scores)
        scheduler.run(scored)
        parts.append(call.rows(scored))

        memory = new_memory()  # between the two is a kernel's end
        names, seen = (("oldest", "newest"), x.judged) if variant.blocks else (("start", "stop"), (x.start, x.stop))
        addresses = {name: memory.add(name, array) for name, array in zip(names, seen, strict=True)}
        addresses["scores"] = memory.add("scores", parts[-1])
        for name, array in (("indices", out.indices), ("values", out.values)):
            addresses[name] = memory.add(name, None, array.nbytes)
        _, launch = call.plans(first, count, addresses)
        choice = replace(choosing, ptx=edit_topk(choosing.ptx))
        scheduler.run(machine(choice, launch, memory, seed=seed))
        of_query = np.arange(b)[:, None] * call.blocks_of_entry + np.arange(s_q) // queries
        mine = (of_query >= first) & (of_query < first + count)
        for name, array in (("indices", out.indices), ("values", out.values)):
            buffer = memory.named(name)
            array[mine] = buffer.bytes[: buffer.size].view(array.dtype).reshape(array.shape)[mine]
    out.scores = call.scores(np.concatenate(parts))
    return out


def choose(
    scores: Array,
    start: Array,
    stop: Array,
    topk: int,
    *,
    variant: TopK = TOPK,
    edit: Edit = lambda text: text,
    seed: int = 0,
) -> Run:
    """Runs the second kernel alone, on given scores [rows, s]."""
    kernel, memory, rows = Kernel.of(variant), new_memory(), len(scores)
    addresses = {name: memory.add(name, x) for name, x in (("scores", scores), ("start", start), ("stop", stop))}
    for name in ("indices", "values"):
        addresses[name] = memory.add(name, None, rows * topk * 4)
    s_c = scores.shape[1]
    shape = {"b": 1, "s_q": rows, "s_c": s_c, "heads": 1, "topk": topk, "type": native.FLOAT32, "queries": 1}
    shape |= {"of_4_bits": 0, "stride": s_c, "wants_values": 1, "keys_of_score": 1, "pages": 0, "page": 0, "width": 0}
    _, choice = native.plan_indexer(shape, ctas_of_row=kernel.facts["cluster"], count=rows, addresses=addresses)
    scheduler.run(machine(Kernel(kernel.variant, edit(kernel.ptx), kernel.facts), choice, memory, seed=seed))
    indices, values = (
        (b := memory.named(name)).bytes[: b.size].view(dtype).reshape(1, rows, topk)
        for name, dtype in (("indices", np.int32), ("values", np.float32))
    )
    return Run(indices, values, scores[None])


def judge_either(variant: IndexerScores, x: Problem, scores: Array) -> None:
    """Raises Wrong unless the scores, or the greatest ones of blocks, are right."""
    if variant.blocks:
        judge_blocks(x, scores)
    else:
        judge_scores(x, scores, x.seen)


def judge_blocks(x: Problem, greatest: Array) -> None:
    """Raises Wrong unless the scores of blocks between which is to be chosen are right."""
    j, (oldest, newest) = np.arange(greatest.shape[2]), x.judged
    scored = x.stop - x.start > INDEX_BLOCK * x.topk
    judge_given(
        x,
        greatest,
        x.greatest(),
        (scored & (newest > oldest))[..., None] & (oldest[..., None] <= j) & (j < newest[..., None]),
    )


def judge_scores(x: Problem, scores: Array, wanted: Array) -> None:
    """Raises Wrong unless the scores that were wanted are right."""
    judge_given(x, scores, x.scores(), wanted)


def judge_given(x: Problem, scores: Array, want: Array, wanted: Array) -> None:
    tolerance = 2e-3 if x.q.dtype.itemsize == 1 else 2e-5
    size = np.abs(want[wanted]).max(initial=1.0)
    wrong = wanted & ~(np.abs(scores - want) <= tolerance * size)
    if wrong.any():
        n, i, j = (int(a) for a in np.argwhere(wrong)[0])
        queries = sorted(set(np.argwhere(wrong)[:, 1].tolist()))
        raise Wrong(
            f"{int(wrong.sum())} scores are wrong, first that of query {i} of batch entry {n} with entry {j}: "
            f"{scores[n, i, j]:.6g}, wanted {want[n, i, j]:.6g}; of queries {queries}"
        )


def judge_choice(got: Run, start: Array, stop: Array) -> None:
    """Raises Wrong unless exactly the greatest of the scores were chosen, ascending, ties to the lower entry."""
    topk = got.indices.shape[-1]
    for n, i in np.ndindex(*got.indices.shape[:2]):
        row, first, last = got.scores[n, i], int(start[n, i]), max(int(stop[n, i]), int(start[n, i]))
        entries = np.arange(first, last)
        score = row[first:last] + np.float32(0)  # -0 is 0
        number = np.where(np.isnan(score), -np.inf, score)
        order = np.lexsort((entries, -number, np.isnan(score)))[:topk]
        want = np.full(topk, -1)
        want[: len(order)] = np.sort(entries[order])
        mine, query = got.indices[n, i], f"query {i} of batch entry {n}"
        if (mine == want).all():
            there = want >= 0
            named = np.where(there, row[np.where(there, want, 0)], -np.inf)
            if not np.array_equal(named, got.values[n, i], equal_nan=True):
                raise Wrong(f"{query}: the scores at the entries are not those")
            continue
        chosen = mine[mine >= 0]
        if ((chosen < first) | (chosen >= last)).any():
            raise Wrong(f"{query}: entries that it does not see: {chosen[(chosen < first) | (chosen >= last)][:4]}")
        if len(set(chosen.tolist())) != len(chosen) or len(chosen) != len(order):
            raise Wrong(f"{query}: {len(set(chosen.tolist()))} different entries, wanted {len(order)}")
        if sorted(chosen.tolist()) == sorted(want[want >= 0].tolist()):
            raise Wrong(f"{query}: the right entries in a wrong order")
        ranks = {True: "of equal scores a higher entry", False: "an entry with a lesser score"}
        wanted, made = set(want.tolist()), set(chosen.tolist())
        left_out, taken = sorted(wanted - made), sorted(made - wanted)
        equal = all(row[a] == row[b] for a, b in zip(sorted(left_out, key=lambda e: row[e]),
                                                     sorted(taken, key=lambda e: row[e]), strict=True))  # fmt: skip
        raise Wrong(f"{query}: {ranks[equal]} was chosen: {taken[:4]} in place of {left_out[:4]}")


# ---- scores at given entries


CASES_AT = {
    # a tile of keys, and a part of one; most entries of the last query are absent
    "tiles": {"b": 2, "s_q": 2, "s_c": 90, "topk": 150},
    # more tiles than shared memory holds
    "turns": {"b": 1, "s_q": 2, "s_c": 300, "topk": 700},
}


@dataclass(frozen=True)
class ProblemAt:
    """Operands of scores at given entries, and a cotangent, NaN where an entry is absent."""

    q: Array
    k: Array
    weights: Array
    indices: Array
    scores: Array

    @staticmethod
    def case(variant: IndexerScoresAt, name: str) -> ProblemAt | None:
        """One of `CASES_AT`; None if there is none of this name."""
        return ProblemAt.of(variant, **CASES_AT[name]) if name in CASES_AT else None

    @staticmethod
    def of(variant: IndexerScoresAt, b: int, s_q: int, s_c: int, topk: int) -> ProblemAt:
        """Indices of every kind; keys that none names are NaN."""
        rng, dtype = np.random.default_rng(0), np.dtype(variant.dtype)
        q, k = (rng.standard_normal(s).astype(np.float32) for s in ((b, s_q, variant.heads, 128), (b, s_c, 128)))
        weights = rng.standard_normal((b, s_q, variant.heads)).astype(np.float32) * np.float32(0.01)
        indices = rng.integers(-3, s_c - 1, (b, s_q, topk), np.int32)
        indices[:, -1, topk // 3 :] = -1
        indices[0, 0, :2] = (2**31 - 1, s_c)
        x = ProblemAt(q.astype(dtype), k.astype(dtype), weights, indices, np.empty(0))
        cotangent = rng.standard_normal(indices.shape).astype(np.float32)
        k[:, s_c - 1] = np.nan
        return replace(x, k=k.astype(dtype), scores=np.where(x.there, cotangent, np.float32(np.nan)))

    @property
    def there(self) -> Array:
        return (self.indices >= 0) & (self.indices < self.k.shape[1])

    def products(self) -> tuple[Array, Array]:
        """float64 [b, s_q, topk, heads], 0 where an entry is absent, and the keys [b, s_q, topk, 128]."""
        where = np.where(self.there, self.indices, 0)
        keys = np.stack([k[i] for k, i in zip(self.k.astype(np.float64), where, strict=True)])
        keys[~self.there] = 0
        return np.einsum("bnhd,bntd->bnth", self.q.astype(np.float64), keys), keys

    def answers(self) -> dict[str, Array]:
        """float64 scores, or dq, dk and dweights."""
        s, keys = self.products()
        q, weights = self.q.astype(np.float64), self.weights.astype(np.float64)
        scores = np.einsum("bnth,bnh->bnt", np.maximum(s, 0), weights)
        di = np.where(self.there, self.scores, 0).astype(np.float64)[..., None]
        ds = di * weights[:, :, None] * (s > 0)
        dk = np.zeros(self.k.shape)
        for n, rows in enumerate(np.where(self.there, self.indices, 0)):
            np.add.at(dk[n], rows, np.einsum("nth,nhd->ntd", ds[n], q[n]))
        return {
            "scores": np.where(self.there, scores, -np.inf),
            "dq": np.einsum("bnth,bntd->bnhd", ds, keys),
            "dk": dk,
            "dweights": (di * np.maximum(s, 0)).sum(2),
        }


@dataclass(frozen=True)
class CallAt:
    """A launch for scores at given entries, or for their gradients, that can be made several times."""

    kernel: Kernel[IndexerScoresAt]
    x: ProblemAt

    @property
    def results_like(self) -> dict[str, Array]:
        """Arrays with the shapes and dtypes of what it writes."""
        x = self.x
        if self.kernel.variant.op == "indexer_scores_at_bwd":
            return {"dq": x.q, "dk": np.empty(x.k.shape, np.float32), "dweights": x.weights}
        return {"scores": np.empty(x.indices.shape, np.float32)}

    def machine(self, *, seed: int = 0, record: bool = False) -> Machine:
        x, memory, like = self.x, new_memory(), self.results_like
        (b, s_q, heads, _), (_, s_c, _), topk = x.q.shape, x.k.shape, x.indices.shape[2]
        given = ("q", "k", "weights", "indices", *(() if "scores" in like else ("scores",)))
        addresses = {name: memory.add(name, getattr(x, name)) for name in given}
        for name, array in like.items():
            if name == "dk":
                addresses[name] = add_cleared(memory, name, array.nbytes)
            else:
                addresses[name] = memory.add(name, None, array.nbytes)
        shape = {"b": b, "s_q": s_q, "s_c": s_c, "heads": heads, "topk": topk}
        plan = native.plan_indexer_scores_at(shape, gradient="dq" in like, addresses=addresses)
        return machine(self.kernel, plan, memory, seed=seed, record=record)

    def results(self, ran: Machine) -> dict[str, Array]:
        """scores, or dq, dk and dweights."""
        found = {name: (ran.memory.named(name), x) for name, x in self.results_like.items()}
        return {name: y.bytes[: x.nbytes].view(x.dtype).reshape(x.shape) for name, (y, x) in found.items()}

    def judge(self, ran: Machine) -> None:
        judge_at(self.x, self.results(ran))


def run_at(
    variant: IndexerScoresAt, x: ProblemAt, *, edit: Edit = lambda text: text, seed: int = 0
) -> dict[str, Array]:
    """scores, or of a gradient's kernel dq, dk and dweights."""
    kernel = Kernel.of(variant)
    call = CallAt(replace(kernel, ptx=edit(kernel.ptx)), x)
    scheduler.run(ran := call.machine(seed=seed))
    return call.results(ran)


def judge_at(x: ProblemAt, got: dict[str, Array]) -> None:
    """Raises Wrong unless these are right, up to what rounding to 16 bits may do to a gradient."""
    want = x.answers()
    for name, given in got.items():
        tolerance = (
            2e-3
            if x.q.dtype.itemsize == 1
            else 2e-5
            if name in ("scores", "dweights")
            else 2e-2
            if x.q.dtype.name == "bfloat16"
            else 2e-3
        )
        finite = np.isfinite(want[name])
        size = np.abs(want[name][finite]).max(initial=1e-30)
        difference = np.abs(given.astype(np.float64) - np.where(finite, want[name], 0))
        wrong = np.where(finite, ~(difference <= tolerance * size), given != want[name])
        if wrong.any():
            at = tuple(int(a) for a in np.argwhere(wrong)[0])
            raise Wrong(
                f"{int(wrong.sum())} of {name} are wrong, first {list(at)}: {given[at]}, wanted {want[name][at]:.6g}"
            )
