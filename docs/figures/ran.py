"""Which kernels ran where: tests on a GPU and compute-sanitizer by hand, times by the records."""

import re
from collections.abc import Iterator
from typing import Any

from jax_dsv4_fmha._bench.machine_code import changed
from jax_dsv4_fmha._host import library

from .records import (
    CUDNN_FRONTEND,
    DECODE,
    DEVICES,
    EXPERTS,
    FORWARD,
    GQA,
    GRAD,
    INDEXER,
    LATENT,
    LAYER,
    ON_H100,
    PEERS,
    PRODUCTS,
    RAN,
    SAME_BITS,
    STACKS,
    STEPS,
    UNPACKED,
    bench_records,
    texts,
)

TIMED = (
    FORWARD,
    DECODE,
    GRAD,
    SAME_BITS,
    INDEXER,
    LAYER,
    PEERS,
    CUDNN_FRONTEND,
    LATENT,
    GQA,
    PRODUCTS,
    DEVICES,
    STEPS,
    STACKS,
    ON_H100,
    EXPERTS,
    UNPACKED,
)


def ran() -> str:
    """A row for each family of kernels."""
    rows = []
    for row in RAN["rows"]:
        rows.append(
            [
                _named(row["kernels"]),
                *(_noted(row[column]) for column in ("tests", "memcheck", "racecheck")),
                _timed(row),
            ]
        )
    rows.append([_named(RAN["never run"]), *["never"] * 4])
    return texts("kernels | GPU tests | memcheck | racecheck | timed", rows)


def _named(kernels: str) -> str:
    """Names of kernels as code; other words say which of them."""
    return re.sub(r"\b(?:\w+_\w+|combine|rope|route)\b", r"`\g<0>`", kernels)


def _noted(found: list[str | None] | None) -> str:
    """Commit, card, date, and the state of the kernel that ran, as far as they are recorded."""
    return ", ".join(filter(None, found)) if found else NOT_RECORDED


NOT_RECORDED = "not recorded"


def _timed(row: dict[str, Any]) -> str:
    """The newest record that has a time of one of these kernels, else a note by hand. Records name no commit."""
    found = [(day, record) for record in TIMED for symbol, day in _symbols(record) if symbol in row["symbols"]]
    if not found:
        return _noted(row.get("timed"))
    day, newest = max(found, key=lambda x: x[0])
    return f"{newest['devices'][0]['name'].split()[1]}, {day}"


def _symbols(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The kernels that a record times, and the day: `mha_fwd_sm90_0` is the first launch of mha_fwd_sm90."""
    for row in record["rows"]:
        for times in row["times"].values():
            day = str(row.get("date", record["date"]))[:10]
            yield from ((name.rsplit("_", 1)[0], day) for name in times.get("kernels", {}))


def machine_code() -> str:
    """A row for each record that bench wrote: for how many of its rows it names the machine code."""
    rows = []
    for name, record in bench_records().items():
        known, of = sum(bool(_digests(row)) for row in record["rows"]), len(record["rows"])
        card = record["devices"][0]["name"].split()[1]
        said = NOT_RECORDED if not known else "recorded" if known == of else f"recorded for {known} rows"
        rows.append([f"`{name}.json`", f"{card}, {record['date'][:10]}", str(of), said])
    return texts("record | taken | rows | machine code", rows)


def _digests(row: dict[str, Any]) -> dict[str, str]:
    """The digests of the kernels of a row, by their keys."""
    return {key: x for times in row["times"].values() for key, x in times.get("machine_code", {}).items()}


def older(records: dict[str, Any]) -> Iterator[str]:
    """The rows of records whose kernels have changed since, as far as kernels are built here; nothing without them."""
    built = library.manifest()["variants"]
    keys_built = {row["key"] for row in built}
    for name, record in records.items():
        for row in record["rows"]:
            arch = f"sm_{str(record['devices'][0]['compute_capability']).replace('.', '')}"
            is_whole = keys_built >= {v.key for v in library.SHIPPED if v.arch.startswith(arch)}
            if keys := changed(_digests(row), built, is_whole=is_whole):
                yield f"docs/{name}.json: {row['name']}: timed older machine code of {', '.join(keys)}"
