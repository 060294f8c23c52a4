"""Compile the variants to cubins, and write the manifest and the C++ table that describe them.

A cubin is made again only when something that it depends on has changed: its kernel's sources, the variant, the
compiler's version, the Python that runs it.  Needs nvidia-cutlass-dsl, but no GPU and no driver.

Writes into the output directory: KEY.cubin, KEY.ptx and KEY.json for every variant, manifest.json (what is shipped),
and cubins.cc (the same for the C++ compiler).
"""

import argparse
import fnmatch
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .cubin import KernelInfo, read_kernel
from .variants import VARIANTS, Variant

ROOT = Path(__file__).resolve().parent.parent
LAUNCHED = ("threads", "smem_bytes", "tile_m", "tile_n", "ctas", "cluster")  # what the launcher needs beside the cubin
FACTS = (*LAUNCHED, "unit")  # what a kernel's module says of it
DESCRIBED = (
    "op",
    "arch",
    "d",
    "dtype",
    "shared_kv",
    "most_heads",
    "splits",
    "evidence",
)  # of a variant, in the manifest
Record = dict[str, Any]


class Refused(Exception):
    """A cubin that must not be shipped."""


# What the launcher hands to a kernel (ffi/launch_plan.h): the sizes of the parameters, in order.
def expected_params(variant: Variant) -> tuple[int, ...]:
    pointer, number = 8, 4
    q, keys = (128, 4 * number), (128, 3 * number)  # a TMA descriptor, then its tensor's dynamic extents
    sources = {
        "span": (*keys * (1 if variant.shared_kv else 2), pointer, pointer, number),  # k, v, start, stop, s_kv
        "selection": (pointer, pointer, pointer, number, number, number),  # keys, indices, length, s_kv, s_batch, topk
    }
    sources["packed"] = sources["selection"]
    if variant.gathers:
        sources["span"] = (pointer, pointer, pointer, number)  # keys, start, stop, s_kv
    elif variant.shared_kv and variant.sources == ("span",):
        sources["span"] = (*keys, pointer, pointer, pointer, number)  # and where k is
    if variant.op == "combine":  # o_parts, lse_parts, o, sink, lse, rows, h_q, d, splits
        return (*[pointer] * 5, *[number] * 4)
    keys_of_all = itertools.chain.from_iterable(sources[kind] for kind in variant.sources)
    o = q if variant.shared_kv else (pointer,)
    # q, o, the keys, sink, lse, o_parts, scale_log2, how the rows are tiled
    return (*q, *o, *keys_of_all, pointer, pointer, pointer, number, *[number] * 11)


def check(variant: Variant, facts: dict[str, int], kernel: KernelInfo) -> None:
    """Refuse a cubin that would be slow or that the launcher would call wrongly."""
    if kernel.local_bytes:
        raise Refused(f"{variant.key}: uses {kernel.local_bytes} bytes of local memory a thread, wanted none (spills)")
    if kernel.params != (wanted := expected_params(variant)):
        raise Refused(f"{variant.key}: got parameters of {kernel.params} bytes, wanted {wanted}")
    if kernel.threads != facts["threads"]:
        raise Refused(f"{variant.key}: cubin requires {kernel.threads} threads, its module says {facts['threads']}")
    if missing := [name for name in FACTS if name not in facts]:
        raise Refused(f"{variant.key}: its module does not say {', '.join(missing)}")


def toolchain() -> str:
    """Everything that compiles: the DSL with its flavour, and the Python it runs on."""
    parts = sorted(
        f"{dist.name.lower()} {dist.version}"
        for dist in importlib.metadata.distributions()
        if dist.name and dist.name.lower().replace("_", "-").startswith("nvidia-cutlass-dsl")
    )
    return ", ".join([*parts, "python " + ".".join(platform.python_version_tuple()[:2])])


def digest(variant: Variant) -> str:
    """Names everything that a variant's cubin depends on."""
    module = ROOT / (variant.module.replace(".", "/") + ".py")
    sources = sorted([module, ROOT / "kernels/aot.py", *ROOT.glob("kernels/lib/**/*.py")])
    content = hashlib.sha256(f"{variant}\n{toolchain()}\n".encode())
    for source in sources:
        content.update(f"{source.relative_to(ROOT)} {source.stat().st_size}\n".encode() + source.read_bytes())
    return content.hexdigest()


def cached(variant: Variant, out: Path) -> Record | None:
    """The record of a cubin that is already there and still right."""
    try:
        record: Record = json.loads((out / f"{variant.key}.json").read_text())
        cubin = (out / f"{variant.key}.cubin").read_bytes()
    except (OSError, ValueError):
        return None
    fresh = record["digest"] == digest(variant) and record["sha256"] == hashlib.sha256(cubin).hexdigest()
    return record if fresh else None


def compile_one(variant: Variant, out: Path) -> Record:
    """Compile in a fresh process, check the cubin, and leave its record beside it."""
    (out / f"{variant.key}.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "kernels.aot", variant.key, "--out", str(out.resolve())]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode != 0:
        raise Refused(f"{variant.key}: did not compile\n{run.stdout}")
    cubin = (out / f"{variant.key}.cubin").read_bytes()
    launch = out / f"{variant.key}.launch.json"
    facts = json.loads(launch.read_text())
    launch.unlink()
    kernel = read_kernel(cubin)
    check(variant, facts, kernel)
    record = {
        "key": variant.key,
        **{name: getattr(variant, name) for name in DESCRIBED},
        **{name: facts[name] for name in FACTS},
        "symbol": facts["symbol"],
        "registers": kernel.registers,
        "spill_bytes": kernel.local_bytes,
        "cubin_bytes": len(cubin),
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "digest": digest(variant),
    }
    (out / f"{variant.key}.json").write_text(json.dumps(record, indent=1))
    return record


def build(variants: Sequence[Variant], out: Path, jobs: int) -> list[Record]:
    """Bring the cubins of `variants` up to date.  Raises Refused for the first one that fails."""
    out.mkdir(parents=True, exist_ok=True)
    records = {v.key: record for v in variants if (record := cached(v, out))}
    stale = [v for v in variants if v.key not in records]
    print(f"kernels: {len(records)} up to date, {len(stale)} to compile ({toolchain()})", flush=True)

    def timed(variant: Variant) -> tuple[Record, float]:
        start = time.monotonic()
        return compile_one(variant, out), time.monotonic() - start

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(timed, v) for v in stale]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                record, seconds = future.result()
                records[record["key"]] = record
                print(
                    f"kernels: [{done}/{len(stale)}] {record['key']}: {seconds:.1f} s, {record['registers']} registers,"
                    f" {record['smem_bytes'] / 1024:.0f} KiB shared memory, {record['cubin_bytes'] / 1024:.0f} KiB",
                    flush=True,
                )
        except Refused:
            pool.shutdown(cancel_futures=True)
            raise
    return [records[v.key] for v in variants]


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_tables(records: Sequence[Record], out: Path) -> None:
    """manifest.json and cubins.cc."""
    shipped = [{name: value for name, value in record.items() if name != "digest"} for record in records]
    manifest = json.dumps({"toolchain": toolchain(), "variants": shipped}, indent=1)
    write_if_changed(out / "manifest.json", manifest)
    blobs, rows = [], []
    for record in records:
        key, path = record["key"], (out / f"{record['key']}.cubin").resolve()
        blobs.append(f'DSV4_FMHA_EMBED({key}, "{path}")  // {record["sha256"]}')
        choice = f'"{record["op"]}", "{record["arch"]}", {record["d"]}, ffi::{_XLA_DTYPE[record["dtype"]]}'
        identity = f'{{{choice}, {str(record["shared_kv"]).lower()}}}, "{key}", "{record["symbol"]}"'
        facts = ", ".join(str(record[name]).lower() for name in (*LAUNCHED, "splits", "most_heads"))
        rows.append(f"      Launcher{{{identity}, {key}, {record['cubin_bytes']}, {facts}}},")
    write_if_changed(
        out / "cubins.cc",
        _TABLE.format(blobs="\n".join(blobs), count=len(rows), rows="\n".join(rows), manifest=manifest),
    )


_XLA_DTYPE = {"bfloat16": "BF16", "float16": "F16"}

_TABLE = """\
// Generated by kernels/build.py from kernels/variants.py.
#include "registry.h"

{blobs}

namespace dsv4_fmha {{

LauncherTable Launchers() {{
  static std::array<Launcher, {count}> launchers{{{{
{rows}
  }}}};
  return {{launchers.data(), launchers.size()}};
}}

const char* Manifest() {{ return R"json({manifest})json"; }}

}}  // namespace dsv4_fmha
"""

_BANNER = """\
===========================================================================================
  jax_dsv4_fmha: building WITHOUT GPU KERNELS.
  nvidia-cutlass-dsl cannot be imported here, so there is nothing to compile them with:
    {reason}
  The package works on CPU through its reference; on a GPU, implementation="cubin" fails.
==========================================================================================="""


def why_no_dsl() -> str | None:
    """The reason why the DSL cannot be imported, tried in a process of its own; None when it can."""
    run = subprocess.run([sys.executable, "-c", "import cutlass.cute"], capture_output=True, text=True)
    return None if run.returncode == 0 else (run.stderr.strip().splitlines() or ["it crashed on import"])[-1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.build", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="output directory, kept between builds")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (default: one a core)"
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only keys that match, e.g. '*d512*' or 'd512'")
    parser.add_argument("--list", action="store_true", help="print the keys and stop")
    parser.add_argument(
        "--optional", action="store_true", help="without the DSL, write empty tables instead of failing"
    )
    args = parser.parse_args(argv)
    variants = [v for v in VARIANTS if fnmatch.fnmatch(v.key, args.only) or args.only in v.key]
    if args.list:
        print("\n".join(v.key for v in variants))
        return 0
    if args.out is None:
        parser.error("--out is required")
    if not variants:
        parser.error(f"no variant matches {args.only!r}; there are {', '.join(v.key for v in VARIANTS)}")
    if reason := why_no_dsl():
        print(_BANNER.format(reason=reason), file=sys.stderr, flush=True)
        if not args.optional:
            return 1
        args.out.mkdir(parents=True, exist_ok=True)
        write_tables([], args.out)
        return 0
    try:
        write_tables(build(variants, args.out, args.jobs), args.out)
    except Refused as refused:
        print(f"kernels: refused {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
