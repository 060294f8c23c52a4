"""`python -m jax_dsv4_fmha bench`: device times beside those of peers and of the machine's roofline.

A row's contestants (ours, its peers, a matrix product, a copy) take turns in rounds of short bursts, because a GPU's
clock drifts by some percent. Each takes its inputs from several sets in turn, so that L2 holds none of them. A
call's time is the sum of its kernels' durations by the profiler; time under two kernels counts once. A round gives the
median of its calls, a contestant the median of its rounds. The spread is that of the middle half of the rounds.
"""

import datetime
import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import Method
from .._definitions.cache import Cache
from .._definitions.span import Span
from .._host import library
from .._testing.cases import OPS, SPANS, Case
from . import bench_decode, bench_grad, bench_indexer, bench_layer, plot
from .check import matches, reason
from .info import machine, no_devices
from .report import Progress, output, table, write_json

_PEERS = ("two_pass", "cudnn", "xla", "contiguous", "v4_fp8", "graph")
_OURS_ON: dict[str, dict[str, Any]] = {"contiguous": {"page": 0}, "v4_fp8": {"features": ("fp8",)}}
"""peers that are ours, on a case that differs so"""
_MATMUL = 8192
_COPY_BYTES = 2**30
_BURST_SECONDS = 0.008
_SLOWEST_PEER = 0.05  # seconds a call
_CACHE_BYTES = 2**28  # bytes of inputs altogether, so that the cache does not hold them
_KERNEL_BY_KERNEL: dict[str, str | bool] = {"xla_gpu_graph_min_graph_size": "10000"}  # no CUDA graphs


@dataclass(frozen=True)
class Row:
    """One call, and the peers that are timed on it. For a whole layer `method` is ours and "two_pass" may be a peer.

    For several layers in a row the peer "graph" is ours too: the whole step by the host's clock, under CUDA graphs,
    many steps in a row. So its ratio shows the gaps between kernels.
    """

    suite: str
    case: Case
    peers: tuple[str, ...] = ()
    method: Method | None = None
    layers: int = 1

    def of(self, name: str) -> "Row":
        """The row that a contestant runs."""
        return replace(self, case=replace(self.case, **_OURS_ON.get(name, {})))

    @property
    def name(self) -> str:
        c = self.case
        if c.op in bench_indexer.OPS:
            return bench_indexer.name(c)
        if c.op == bench_layer.OP:
            return bench_layer.name(c)
        heads = f"h{c.h_q}" if c.shared_kv or c.h_kv == c.h_q else f"h{c.h_q}/{c.h_kv}"
        if c.op == "dsv4_decode":
            keys = bench_decode.name(c)
        else:
            keys = {
                "fmha": f"{c.span} {c.window}" if c.span == "window" else c.span,
                "sparse_fmha": f"top-k {c.topk} of {c.s_kv}",
                "dsv4_attention": f"window {c.window} + "
                + (f"top-k {c.topk} of {c.s_c}" if c.topk else f"{c.s_c} of ratio {c.ratio}")
                + (" in pages" if c.page else ""),
            }[c.op]
        dtype = "".join(f" {x}" for x in c.features) or (f" {c.dtype}" if c.dtype != "bfloat16" else "")
        what = "gradient of " if self.suite == "grad" else f"{self.layers} layers of " if self.layers > 1 else ""
        return f"{what}d {c.d} {keys} b{c.b} s{c.s_q} {heads}{dtype}"


def _dense(d: int, span: str, b: int, s: int, h_q: int, h_kv: int, **kwargs: Any) -> Row:
    suite = "window" if span == "window" else "dense"
    case = Case("fmha", b, s, s, h_q, h_kv, d, shared_kv=d == 512, span=span, **kwargs)
    return Row(suite, case, ("cudnn", "xla"))


def _layer(h_q: int, **kwargs: Any) -> Row:
    case = Case(
        "dsv4_attention", 1, 4096, 4096 + 127, h_q, 1, 512, shared_kv=True, sink="normal", decode=True, **kwargs
    )
    return Row("dsv4", case, ("two_pass",), "fused")


def _top_k(h_q: int, s_kv: int, topk: int) -> Row:
    return Row("dsv4", Case("sparse_fmha", 1, 4096, s_kv, h_q, 1, 512, shared_kv=True, sink="normal", topk=topk))


def _chunk(s_q: int, h_q: int, topk: int) -> Row:
    """A chunk of a prompt, whose compressed entries are in pages."""
    row = replace(_layer(h_q, topk=topk, ratio=4, s_c=16384), suite="decode", peers=("contiguous",))
    return replace(row, case=replace(row.case, s_q=s_q, s_kv=s_q + 127, page=64))


_CACHES = ((), ("fp8",))
ROWS = (
    *(_layer(h, topk=k, ratio=4, s_c=s_c) for h, k in ((128, 1024), (64, 512), (16, 512)) for s_c in (8192, 65536)),
    *(_top_k(h, s_kv, k) for h, k in ((128, 1024), (64, 512)) for s_kv in (8192, 65536)),
    _layer(128, ratio=128, s_c=512),
    _dense(512, "causal", 1, 4096, 128, 1),
    _dense(512, "causal", 1, 8192, 128, 1),
    _dense(512, "causal", 1, 4096, 128, 1, dtype="float16"),
    _dense(64, "causal", 4, 8192, 16, 16),
    _dense(128, "causal", 2, 8192, 16, 16),
    _dense(128, "full", 2, 8192, 16, 16),
    _dense(128, "causal", 2, 8192, 16, 16, dtype="float16"),
    _dense(256, "causal", 2, 8192, 8, 1),
    _dense(128, "causal", 1, 512, 16, 16),
    _dense(128, "causal", 64, 128, 16, 16),
    *(_dense(512, "window", 1, 4096, h, 1, sink="normal") for h in (128, 64, 16)),
    _dense(128, "window", 2, 8192, 16, 1),
    *(
        Row("decode", bench_decode.step(h, k, b, *kind), ("xla",) if b <= 64 else ())
        for h, k in ((128, 1024), (64, 512))
        for kind in _CACHES
        for b in (2, 64, 128, 148)
    ),
    *(Row("decode", bench_decode.step(64, 512, b, "v41_fp4"), ("v4_fp8",)) for b in (64, 128)),
    _chunk(2048, 64, 512),
    Row("decode", Case("fmha", 16, 1, 32768, 128, 1, 512, shared_kv=True), ("cudnn", "xla")),
    *(Row("decode", bench_decode.dense(*kind), ("xla",)) for kind in _CACHES),
    *(Row("decode", bench_decode.step(128, 1024, b, "fp8"), ("graph",), layers=61) for b in (2, 64)),
    *(
        replace(row, suite="grad", peers=peers)
        for row, peers in (
            *((_layer(h, topk=k, ratio=4, s_c=s_c), ()) for h, k in ((128, 1024), (64, 512)) for s_c in (8192, 65536)),
            (_layer(16, topk=512, ratio=4, s_c=8192), ()),
            (_layer(128, ratio=128, s_c=512), ()),
            *((_dense(512, "window", 1, 4096, h, 1, sink="normal"), ("xla",)) for h in (128, 64)),
            (_dense(512, "causal", 1, 4096, 128, 1), ("xla",)),
            *(
                (row, ("cudnn",))
                for row in (
                    _dense(64, "causal", 4, 8192, 16, 16),
                    _dense(128, "causal", 2, 8192, 16, 16),
                    _dense(256, "causal", 2, 8192, 8, 1),
                    _dense(128, "window", 2, 8192, 16, 1),
                    _dense(64, "window", 2, 8192, 64, 8, sink="normal"),
                    _dense(128, "causal", 64, 128, 16, 16),
                )
            ),
        )
    ),
    *(Row("indexer", bench_indexer.prompt(s_c, "float8_e4m3fn")) for s_c in (8192, 16384)),
    *(Row("indexer", bench_indexer.prompt(s_c, "bfloat16"), ("xla",)) for s_c in (8192, 16384)),
    *(Row("indexer", bench_indexer.step(t)) for t in ("float8_e4m3fn", "bfloat16")),
    *(Row("indexer", bench_indexer.choice(s_c, k), ("xla",)) for k in (512, 1024) for s_c in (8192, 16384)),
    Row("indexer", bench_indexer.choice(16384, 512, 64, 2), ("xla",)),
    *(
        Row("indexer", bench_indexer.prompt(8192, t, 512, 32768, ratio))
        for t in ("float8_e4m3fn", "bfloat16")
        for ratio in (4, 0)
    ),
    *(
        Row("indexer", bench_indexer.prompt(65536, t, topk, h=32, op=op))
        for t in ("float8_e4m3fn", "bfloat16")
        for op, topk in (("lightning_indexer", 512), ("indexer_blocks", 2048), ("within", 512))
    ),
    Row("indexer", bench_indexer.prompt(8192, "bfloat16", op="indexer_scores"), ("xla",)),
    *(Row("indexer", bench_indexer.prompt(s_c, "bfloat16", op="attended"), ("xla",)) for s_c in (8192, 16384)),
    *(Row("layer", case) for case in bench_layer.cases()),
)

Contestant = tuple[Callable[..., Any], Sequence[Any]]
"""a function, and the sets of operands that it takes in turn"""


def bench(
    *,
    suites: Sequence[str] | None,
    pattern: str | None,
    rounds: int,
    source: str | None,
    json_path: str | None,
    plot_path: str | None,
    progress: bool | None,
) -> int:
    out = output(json_path)

    def wanted(suite: str, name: str) -> bool:
        return (not suites or suite in suites) and matches(name, pattern)

    if source is not None:
        results = json.loads(Path(source).read_text(encoding="utf-8"))
        results["rows"] = [row for row in results["rows"] if wanted(row["suite"], row["name"])]
        if not results["rows"]:
            print(f"No row of {source} matches.", file=out)
            return 2
        print("\n\n".join(tables(results["rows"])), file=out)
    else:
        if why := no_devices():
            print(why, file=out)
            return 2
        if not library.local_architectures():
            print(
                "bench measures kernels on a GPU, and JAX sees none here. `bench --from FILE` shows results.", file=out
            )
            return 2
        rows = [row for row in ROWS if wanted(row.suite, row.name)]
        if not rows:
            print(f"No row matches {pattern!r}.", file=out)
            return 2
        for results in _measure(rows, rounds, Progress(len(rows), progress, out)):
            if json_path not in (None, "-"):  # so that a run that is cut short keeps what it has
                write_json(results, json_path)
    if json_path is not None:
        write_json(results, json_path)
    if plot_path is not None:
        plot.draw(results, plot_path)
    return 0


def _measure(rows: Sequence[Row], rounds: int, bar: Progress) -> Iterator[dict[str, Any]]:
    """The results so far, after each row."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    results: dict[str, Any] = {"date": now, **machine(), "rounds": rounds, "rows": []}
    yardsticks = _yardsticks()
    made = {row.of(name).case for row in rows for name in ("ours", *row.peers) if row.suite != "layer"}
    with ThreadPoolExecutor() as pool:  # which compiles many at once; nothing is timed yet
        list(pool.map(_maker, made))
    for i, row in enumerate(rows):
        bar.begin(row.name)
        results["rows"].append(_measure_row(row, yardsticks, rounds))
        if i + 1 == len(rows) or rows[i + 1].suite != row.suite:
            bar.print("".join(f"{text}\n" for text in tables(r for r in results["rows"] if r["suite"] == row.suite)))
        yield results
    bar.clear()


def _measure_row(row: Row, yardsticks: dict[str, Contestant], rounds: int) -> dict[str, Any]:
    if row.suite == "layer":
        return _measure_layer(row, yardsticks, rounds)
    flops, moved = (row.layers * x for x in work(row.case))
    if row.suite == "grad":
        flops, moved = bench_grad.work(row.case, flops, moved)
    sets = max(2, min(16, int(_CACHE_BYTES // moved))) if row.layers == 1 else 1
    operands = _operands_of(row, sets)
    contestants = dict(yardsticks)
    skipped: dict[str, str] = {}
    for name in ("ours", *(peer for peer in row.peers if peer != "graph")):
        try:
            its = row.of(name)
            sets_of = operands if its == row else _operands_of(its, sets)
            for each, f in _runs(its, name).items():
                contestants[each] = (_compiled(each, f, sets_of), sets_of)
        except Exception as e:  # a refusal, by a peer or because ours is not built, is a result
            skipped[name] = reason(e)
    times = _interleaved(contestants, rounds)
    if row.suite == "grad":
        times = {name: times[name] for name in yardsticks} | bench_grad.backward_alone(times)
    if "graph" in row.peers and "ours" in times:
        times["graph"] = _under_graphs(functools.partial(_call, row, "graph"), operands[0], rounds)
    return _result(row, flops, moved, times, skipped)


def _measure_layer(row: Row, yardsticks: dict[str, Contestant], rounds: int) -> dict[str, Any]:
    """As `_measure_row`, with the time of every part."""
    contestants, skipped, text = dict(yardsticks), {}, ""
    try:
        run, operands, text = bench_layer.contestant(row.case, _KERNEL_BY_KERNEL)
        contestants["ours"] = (run, [operands])
    except Exception as e:
        skipped["ours"] = reason(e)
    times = _interleaved(contestants, rounds, "hlo_op")
    if "ours" in times:
        times["ours"]["parts"] = bench_layer.parts(text, times["ours"]["kernels"])
    return _result(row, *work(row.case), times, skipped)


def _result(
    row: Row, flops: float, moved: float, times: dict[str, dict[str, Any]], skipped: dict[str, str]
) -> dict[str, Any]:
    matmul, copy = times.pop("matmul"), times.pop("copy")
    return {
        "suite": row.suite,
        "name": row.name,
        "flops": flops,
        "bytes": moved,
        "matmul_flops_per_s": 2 * _MATMUL**3 / matmul["seconds"],
        "copy_bytes_per_s": 2 * _COPY_BYTES / copy["seconds"],
        "times": times,
        "skipped": skipped,
        "case": asdict(row.case),
    }


def work(c: Case) -> tuple[float, float]:
    """(flops on visible keys, bytes if each operand is read once and each result written once)"""
    if c.op == "dsv4_decode":
        return bench_decode.work(c)
    if c.op in bench_indexer.OPS:
        return bench_indexer.work(c)
    if c.op == bench_layer.OP:
        return bench_layer.work(c)
    operands = jax.eval_shape(functools.partial(_operands, c), jax.random.key(0))
    if c.op == "fmha":
        seen = _seen(SPANS[c.span](None, c) or Span(0, c.s_kv), c, c.s_kv)
    elif c.op == "sparse_fmha":
        seen = c.b * c.s_q * c.topk
    else:
        at = _positions(c)
        seen = _seen(Span.sliding_window(c.s_q, c.window, at["q_offset"] - at["kv_offset"]), c, c.s_kv)
        compressed = Span.compressed(c.s_q, c.ratio, at["q_offset"])
        seen += c.b * c.s_q * c.topk if c.topk else _seen(compressed, c, c.s_c)
    rows = c.b * c.s_q * c.h_q
    read = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(operands))
    return 4.0 * c.d * c.h_q * seen, float(read + rows * (2 * c.d + 4))


def _seen(span: Span, c: Case, s_kv: int) -> int:
    start, stop = (np.asarray(x, np.int64) for x in span.bounds(c.b, c.s_q, s_kv))
    return int(np.maximum(stop - start, 0).sum())


def _positions(c: Case) -> dict[str, int]:
    """The queries stand at the end of a context, and so does the window cache."""
    end = max(c.s_c * c.ratio, c.s_kv)
    return {"q_offset": end - c.s_q, "kv_offset": end - c.s_kv}


@functools.cache
def _maker(c: Case) -> Callable[[jax.Array], dict[str, Any]]:
    """The compiled program that makes a case's operands from a key."""
    of_suite = {"dsv4_decode": bench_decode.operands, **dict.fromkeys(bench_indexer.OPS, bench_indexer.operands)}
    make = functools.partial(of_suite.get(c.op, _operands), c)
    return jax.jit(make).lower(jax.random.key(0)).compile()


def _operands_of(row: Row, sets: int) -> list[dict[str, Any]]:
    one = _maker(row.case)
    each = [one(key) for key in jax.random.split(jax.random.key(0), sets * row.layers)]
    if row.suite == "grad":
        each = [x | {"do": jnp.roll(x["q"], 1, axis=1)} for x in each]
    return each if row.layers == 1 else [{"q": each[0]["q"], "layers": each}]


def _operands(c: Case, key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, c.dtype)

    arrays: dict[str, Any] = {"q": normal(c.b, c.s_q, c.h_q, c.d)}
    if c.op == "fmha":
        arrays["k"] = normal(c.b, c.s_kv, c.h_kv, c.d)
        if not c.shared_kv:
            arrays["v"] = normal(c.b, c.s_kv, c.h_kv, c.d)
    elif c.op == "sparse_fmha":
        arrays["kv"] = normal(c.b, c.s_kv, c.d)
    else:
        arrays["window_kv"], arrays["compressed_kv"] = normal(c.b, c.s_kv, c.d), normal(c.b, c.s_c, c.d)
        if c.page:
            pages = arrays["compressed_kv"].reshape(-1, c.page, c.d)
            table = jax.random.permutation(next(keys), len(pages)).astype(jnp.int32)
            arrays["compressed_kv"] = Cache(pages, table.reshape(c.b, -1))
    if c.topk:
        entries = c.s_c or c.s_kv
        some = lambda key: jnp.argsort(jax.random.bits(key, (entries,)))[: c.topk]  # noqa: E731
        per_query = jax.random.split(next(keys), c.b * c.s_q)
        arrays["indices"] = jax.lax.map(some, per_query, batch_size=256).reshape(c.b, c.s_q, c.topk)
    if c.sink != "none":
        arrays["sink"] = jax.random.normal(next(keys), (c.h_q,))
    return arrays


def _call(row: Row, name: str, **operands: Any) -> Any:
    """The function that the contestant of this name runs on a row's operands."""
    c = row.case
    if c.op == "dsv4_decode":
        run = bench_decode.xla if name == "xla" else bench_decode.layers if row.layers > 1 else bench_decode.call
        return run(c, **operands)
    if c.op in bench_indexer.OPS:
        return (bench_indexer.xla if name == "xla" else bench_indexer.call)(c, **operands)
    if name in ("cudnn", "xla"):
        return _jax_nn(c, name, **operands)
    choices: dict[str, Any] = {"implementation": "cubin"}
    if c.op == "fmha":
        choices["span"] = SPANS[c.span](None, c)
    if c.op == "dsv4_attention":
        choices |= {"method": name if name == "two_pass" else row.method, "window": c.window, "ratio": c.ratio}
        choices |= _positions(c)
    return OPS[c.op](**operands, **choices)


def _runs(row: Row, name: str) -> dict[str, Callable[..., Any]]:
    """The functions that are timed for a contestant, by the names that the profiler gets."""
    run = functools.partial(_call, row, name)
    return bench_grad.contestants(name, run) if row.suite == "grad" else {name: run}


def _jax_nn(c: Case, implementation: Any, *, q: Any, k: Any, v: Any = None, sink: Any = None) -> Any:
    """jax.nn has no sinks, so it runs without."""
    logits = 4 * c.b * c.h_q * c.s_q * c.s_kv
    if implementation == "xla" and logits > _memory() // 4:
        raise MemoryError(f"{logits / 2**30:.0f} GiB of logits")
    window = (c.window - 1, 0) if c.span == "window" else None
    return jax.nn.dot_product_attention(
        q,
        k,
        k if v is None else v,
        is_causal=c.span != "full",
        local_window_size=window,
        implementation=implementation,
    )


def _memory() -> int:
    return (jax.local_devices(backend="cuda")[0].memory_stats() or {})["bytes_limit"]


def _compiled(name: str, f: Callable[..., Any], operands: Sequence[Any]) -> Callable[..., Any]:
    """`f` as an executable that the profiler calls jit_NAME, without CUDA graphs, so that it sees each kernel."""

    def named(operands: Any) -> Any:
        return f(**operands)

    named.__name__ = name
    run = jax.jit(named).lower(operands[0]).compile(compiler_options=_KERNEL_BY_KERNEL)
    jax.block_until_ready(run(operands[0]))
    began = time.monotonic()
    jax.block_until_ready(run(operands[0]))
    seconds = time.monotonic() - began
    if name.startswith(("cudnn", "xla")) and seconds > _SLOWEST_PEER:
        raise TimeoutError(f"{seconds * 1e3:.0f} ms a call")
    return run


def _yardsticks() -> dict[str, Contestant]:
    a, b = (jax.random.normal(key, (_MATMUL, _MATMUL), jnp.bfloat16) for key in jax.random.split(jax.random.key(1)))
    matmul = [{"a": a, "b": b}, {"a": b, "b": a}]
    copy = [{"x": jnp.full((_COPY_BYTES // 4,), i, jnp.float32)} for i in range(2)]
    return {
        "matmul": (_compiled("matmul", lambda a, b: a @ b, matmul), matmul),
        "copy": (_compiled("copy", lambda x: x.copy(), copy), copy),
    }


def _interleaved(
    contestants: dict[str, Contestant], rounds: int, named_by: str | None = None
) -> dict[str, dict[str, Any]]:
    """The times of every contestant, from one trace; the names of kernels are those of `kernels`."""
    bursts = {name: _burst(*contestant) for name, contestant in contestants.items()}
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for _ in range(rounds):
            for name, (run, sets) in contestants.items():
                jax.block_until_ready([run(sets[i % len(sets)]) for i in range(bursts[name])][-1])
        jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.xplane.pb")
        events = kernels(jax.profiler.ProfileData.from_file(str(path)), named_by)
    return {name: summary(name, events[f"jit_{name}"], bursts[name], rounds) for name in contestants}


def _under_graphs(f: Callable[..., Any], operands: dict[str, Any], rounds: int) -> dict[str, Any]:
    """A step's time by the host's clock, many in a row, compiled with XLA's defaults.

    Each step gets the previous one's o as its q, donated. As with donated caches, no address changes from step to step,
    so CUDA graphs stay as they are.
    """
    q, rest = operands["q"].copy(), {name: x for name, x in operands.items() if name != "q"}
    run = jax.jit(lambda q, rest: f(q=q, **rest), donate_argnums=0).lower(q, rest).compile()
    steps, each = 3, []
    for _ in range(rounds + 1):
        began = time.monotonic()
        for _ in range(steps):
            q = run(q, rest)
        jax.block_until_ready(q)
        each.append((time.monotonic() - began) / steps)
        steps = max(3, min(100, int(20 * _BURST_SECONDS / each[-1])))
    each = each[1:]  # the first call makes the graphs
    return {"seconds": statistics.median(each), "rounds": each, "kernels": {}}


def _burst(run: Callable[..., Any], sets: Sequence[Any]) -> int:
    """How many calls to make in a row."""
    began = time.monotonic()
    jax.block_until_ready([run(operands) for operands in sets[:2]])
    return max(3, min(20, int(_BURST_SECONDS * 2 / (time.monotonic() - began))))


Event = tuple[float, float, str]
"""start and duration in ns, name"""


def kernels(profile: Any, named_by: str | None = None) -> dict[str, list[Event]]:
    """The kernels that ran on the GPU for every HLO module, in order, by their names or by what the profile says of
    them.
    """
    events: dict[str, list[Event]] = defaultdict(list)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # the other lines are derived from these
                continue
            for event in line.events:
                stats = dict(event.stats)
                kernel = event.name if named_by is None else str(stats.get(named_by, ""))
                events[str(stats.get("hlo_module", ""))].append((event.start_ns, event.duration_ns, kernel))
    return {module: sorted(found) for module, found in events.items()}


def in_turn(events: Sequence[Event]) -> list[tuple[float, str]]:
    """Durations and names. Of a kernel that begins before another ends, as `combine` does, only the time after that
    counts.
    """
    alone, end = [], 0.0
    for start, ns, kernel in events:
        alone.append((max(0.0, start + ns - max(start, end)), kernel))
        end = max(end, start + ns)
    return alone


def summary(name: str, events: Sequence[Event], burst: int, rounds: int) -> dict[str, Any]:
    """The time of a call: the median over the rounds, every round's, and the share of each kernel."""
    each, left = divmod(len(events), burst * rounds)
    if each == 0 or left:
        raise RuntimeError(f"{name}: the profiler saw {len(events)} kernels in {burst * rounds} calls")
    calls = [in_turn(events[i : i + each]) for i in range(0, len(events), each)]
    seconds = [1e-9 * sum(ns for ns, _ in call) for call in calls]
    medians = [statistics.median(seconds[i : i + burst]) for i in range(0, len(seconds), burst)]
    names = dict.fromkeys(kernel for _, _, kernel in events)
    totals = {x: [1e-9 * sum(ns for ns, kernel in call if kernel == x) for call in calls] for x in names}
    return {
        "seconds": statistics.median(medians),
        "rounds": medians,
        "kernels": {kernel: statistics.median(total) for kernel, total in totals.items()},
    }


def tables(rows: Iterable[dict[str, Any]]) -> list[str]:
    """One for each suite."""
    suites: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        suites[row["suite"]].append(row)
    return [
        f"{suite}\n{bench_layer.table(found, spread) if suite == 'layer' else _table(found)}"
        for suite, found in suites.items()
    ]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    peers = [name for name in _PEERS if any(name in row["times"] for row in rows)]
    header = ["row", "us", "spread", "TFLOP/s", "of M", "GB/s", "of C"]
    for peer in peers:
        header += [f"{peer} us", "ratio"]
    both = bench_grad.names_of_both(row["times"] for row in rows)
    for name in both:
        header += [f"{name} us", *["ratio"] * (name != both[0])]
    lines: list[list[str]] = []
    notes: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        ours = row["times"].get("ours")
        line = [row["name"], *["-"] * 6]
        if ours:
            rate, flow = row["flops"] / ours["seconds"], row["bytes"] / ours["seconds"]
            line[1:] = [
                f"{ours['seconds'] * 1e6:.1f}",
                f"{spread(ours['rounds']):.1%}",
                f"{rate / 1e12:.0f}",
                f"{rate / row['matmul_flops_per_s']:.2f}",
                f"{flow / 1e9:.0f}",
                f"{flow / row['copy_bytes_per_s']:.2f}",
            ]
        for peer in peers:
            theirs = row["times"].get(peer)
            line.append(f"{theirs['seconds'] * 1e6:.1f}" if theirs else "-")
            line.append(f"{theirs['seconds'] / ours['seconds']:.2f}" if theirs and ours else "-")
        for name in both:
            found, first = (row["times"].get(x) for x in (name, both[0]))
            line.append(f"{found['seconds'] * 1e6:.1f}" if found else "-")
            if name != both[0]:
                line.append(f"{found['seconds'] / first['seconds']:.2f}" if found and first else "-")
        lines.append(line)
        for skipped in row["skipped"].items():
            notes[skipped] += 1
    matmul = statistics.median(row["matmul_flops_per_s"] for row in rows) / 1e12
    copy = statistics.median(row["copy_bytes_per_s"] for row in rows) / 1e9
    foot = f"M {matmul:.0f} TFLOP/s, C {copy:.0f} GB/s; ratio: the peer's time over ours"
    foot += "; us: the backward pass alone, both: the forward one too" if both else ""
    why = [f"- {name}, {n} row{'s' * (n > 1)}: {text}" for (name, text), n in notes.items()]
    return "\n".join([table(header, lines), foot, *why])


def spread(rounds: Sequence[float]) -> float:
    """How far the middle half of the rounds spreads, as a part of their median."""
    low, median, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else [rounds[0]] * 3
    return (high - low) / median
