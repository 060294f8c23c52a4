"""`python -m jax_dsv4_fmha bench`: device times beside those of peers and of the machine's roofline.

A row's contestants (ours, its peers, a matrix product, a copy) are measured together, as `_bench/measure.py` says.
Peers that the command line names, FlashMLA or the cuDNN frontend, take part in the rows that they have a call for.
"""

import datetime
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .._bench import SUITES, measure
from .._bench.cudnn_frontend import cudnn_frontend
from .._bench.flashmla import flashmla
from .._bench.outside import Peer
from .._bench.row import Row, Suite, maker
from .._host import library
from . import plot
from .check import matches, reason
from .info import machine, no_devices
from .report import Progress, output, write_json


def bench(
    *,
    suites: Sequence[str] | None,
    pattern: str | None,
    rounds: int,
    source: str | None,
    flashmla_path: str | None,
    with_cudnn_frontend: bool,
    json_path: str | None,
    plot_path: str | None,
    progress: bool | None,
) -> int:
    out = output(json_path)

    def wanted(suite: str, name: str) -> bool:
        return (not suites or suite in suites) and matches(name, pattern)

    if source is not None:
        if flashmla_path is not None or with_cudnn_frontend:
            print("--from measures nothing, so it has no use for --flashmla or --cudnn-frontend.", file=out)
            return 2
        try:
            results = read(source)
        except ValueError as e:
            print(e, file=out)
            return 2
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
        rows = {suite: tuple(row for row in suite.rows if wanted(suite.name, row.name)) for suite in SUITES.values()}
        if not any(rows.values()):
            print(f"No row matches {pattern!r}.", file=out)
            return 2
        try:
            peers = [flashmla(flashmla_path)] if flashmla_path is not None else []
            peers += [cudnn_frontend()] if with_cudnn_frontend else []
        except ImportError as e:
            print(e, file=out)
            return 2
        for results in _measure(rows, peers, rounds, Progress(sum(map(len, rows.values())), progress, out)):
            if json_path not in (None, "-"):  # so that a run that is cut short keeps what it has
                write_json(results, json_path)
    if json_path is not None:
        write_json(results, json_path)
    if plot_path is not None:
        plot.draw(results, plot_path)
    return 0


_RESULTS = {"date": str, "versions": dict, "devices": list, "rows": list}
_NUMBER = (int, float)
_ROW: dict[str, Any] = {"suite": str, "name": str, "times": dict, "skipped": dict}
_ROW |= dict.fromkeys(("flops", "bytes", "matmul_flops_per_s", "copy_bytes_per_s"), _NUMBER)
_TIMES = {"seconds": _NUMBER, "rounds": list}


def read(source: str) -> dict[str, Any]:
    """Results of a file that `bench --json` wrote.

    Raises:
      ValueError: it holds something else.
      OSError: it cannot be read.
    """

    def check(x: Any, what: str, fields: Mapping[str, Any]) -> None:
        if not isinstance(x, dict):
            raise ValueError(f"{source}: {what}: got {type(x).__name__}, wanted an object, as `bench --json` writes it")
        for name, kind in fields.items():
            if not isinstance(x.get(name), kind):
                got = type(x[name]).__name__ if name in x else "nothing"
                raise ValueError(f"{source}: {what}: {name}: got {got}, wanted what `bench --json` writes")

    try:
        results = json.loads(Path(source).read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{source}: got no JSON ({e}), wanted what `bench --json` writes") from e
    check(results, "results", _RESULTS)
    for i, row in enumerate(results["rows"]):
        check(row, f"row {i}", _ROW)
        if row["suite"] not in SUITES:
            raise ValueError(f"{source}: row {i}: suite: got {row['suite']}, wanted {' or '.join(SUITES)}")
        for name, times in row["times"].items():
            check(times, f"row {i}: times of {name}", _TIMES)
    found: dict[str, Any] = results
    return found


def _measure(
    rows_of: Mapping[Suite, Sequence[Row]], peers: Sequence[Peer], rounds: int, bar: Progress
) -> Iterator[dict[str, Any]]:
    """The results so far, after each row."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = {peer.name: peer.facts for peer in peers}
    results: dict[str, Any] = {"date": now, **machine(), "peers": facts, "rounds": rounds, "rows": []}
    bar.note("compiling the programs that make operands")
    yardsticks = measure.yardsticks()
    calls = {call for rows in rows_of.values() for row in rows for call in row.calls}
    with ThreadPoolExecutor() as pool:  # which compiles many at once; nothing is timed yet
        list(pool.map(maker, calls))
    for suite, rows in rows_of.items():
        records: list[dict[str, Any]] = []
        for row in rows:
            bar.begin(row.name)
            records.append({"suite": suite.name, **_measure_row(row, peers, yardsticks, rounds)})
            results["rows"].append(records[-1])
            bar.note(in_a_line(records[-1]))
            if row is rows[-1]:
                bar.print("".join(f"{text}\n" for text in tables(records)))
            yield results
    bar.clear()


def _measure_row(
    row: Row, peers: Sequence[Peer], yardsticks: Mapping[str, measure.Contestant], rounds: int
) -> dict[str, Any]:
    inputs = row.inputs(row.sets)
    contestants: dict[str, measure.Contestant] = {}
    skipped: dict[str, str] = {}
    for name in ("ours", *row.peers):
        try:
            contestants |= row.contestants(name, inputs)
        except Exception as e:  # a refusal, by a peer or because ours is not built, is a result
            skipped[name] = reason(e)
    for peer in peers:
        try:
            if contestant := peer.contestant(row, inputs, contestants.get("ours")):
                contestants[peer.name] = contestant
        except Exception as e:
            skipped[peer.name] = reason(e)
    measured = measure.interleaved({**yardsticks, **contestants}, rounds, row.kernels_named_by)
    matmul, copy = measured.pop("matmul"), measured.pop("copy")
    return {
        "name": row.name,
        "flops": row.flops,
        "bytes": row.bytes,
        "matmul_flops_per_s": 2 * measure.MATMUL**3 / matmul["seconds"],
        "copy_bytes_per_s": 2 * measure.COPY_BYTES / copy["seconds"],
        "times": row.times(measured, contestants),
        "skipped": skipped,
        "case": row.case,
    }


def in_a_line(record: Mapping[str, Any]) -> str:
    """Its name, what was timed, and what was not."""
    times = [f"{name} {x['seconds'] * 1e6:.1f} us" for name, x in record["times"].items()]
    return f"{record['name']}: {', '.join([*times, *(f'no {name}' for name in record['skipped'])])}"


def tables(records: Iterable[dict[str, Any]]) -> list[str]:
    """One for each suite."""
    suites: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        suites[record["suite"]].append(record)
    return [f"{name}\n{SUITES[name].table(found)}" for name, found in suites.items()]
