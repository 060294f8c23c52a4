"""Compile the variants to cubins, and write the manifest and the C++ table that describe them.

A cubin is compiled again only when something that it depends on has changed: the code of its kernel (comments and
docstrings do not count), the variant, the compiler's version, the Python that runs it.  What any clone on this machine
has compiled is copied from a cache (`kernels/cache.py`).  Needs nvidia-cutlass-dsl, but no GPU and no driver.

Writes into the output directory: KEY.cubin, KEY.ptx and KEY.json for every variant, and, by
`kernels/tables.py`, manifest.json (what is shipped), and abi.h, calls.h, targets.cc and cubins.cc (the same for the C++
compiler).
"""

import argparse
import ast
import contextlib
import fnmatch
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from . import tables
from .abi import Variant
from .cache import KernelCache, default_folder
from .cubin import KernelInfo, read_kernel
from .tables import FACTS, Record
from .variants import KERNELS, VARIANTS

ROOT = Path(__file__).resolve().parent.parent
DATA = ("kernels.abi", "kernels.params", "kernels.variants")  # a cubin depends only on its own variant in these


class Refused(Exception):
    """A cubin that must not be shipped."""


def check(variant: Variant, facts: Record, kernel: KernelInfo) -> None:
    """Refuse a cubin that would be slow, that ptxas got wrong, or that the launcher would call wrongly."""
    if kernel.local_bytes:
        raise Refused(f"{variant.key}: uses {kernel.local_bytes} bytes of local memory a thread, wanted none (spills)")
    if kernel.wild_copies:
        raise Refused(
            f"{variant.key}: {kernel.wild_copies} cp.async name uniform registers that hold no address and no policy;"
            " `in_a_register` of kernels/lib/ptx.py gives them an address that ptxas does not take apart"
        )
    if kernel.params != (wanted := tuple(p.bytes for p in variant.params)):
        names = ", ".join(p.name for p in variant.params)
        raise Refused(f"{variant.key}: got parameters of {kernel.params} bytes, wanted {wanted}: {names}")
    if kernel.threads != facts["threads"]:
        raise Refused(f"{variant.key}: cubin requires {kernel.threads} threads, its module says {facts['threads']}")
    if missing := [name for name in FACTS if name not in facts]:
        raise Refused(f"{variant.key}: its module does not say {', '.join(missing)}")


@functools.cache
def toolchain() -> str:
    """Everything that compiles: the DSL with its flavour, and the Python it runs on."""
    parts = sorted(
        f"{dist.name.lower()} {dist.version}"
        for dist in importlib.metadata.distributions()
        if dist.name and dist.name.lower().replace("_", "-").startswith("nvidia-cutlass-dsl")
    )
    return ", ".join([*parts, "python " + ".".join(platform.python_version_tuple()[:2])])


def modules(name: str, root: Path) -> set[Path]:
    """The files of a module, and of the modules here that it imports, recursively; it finds them without importing
    any.
    """
    wanted, found = {name}, set()
    while wanted:
        module = wanted.pop()
        base = root / module.replace(".", "/")
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if module not in DATA and path.exists() and path not in found:
                found.add(path)
                wanted |= imports(module, path.read_text())
    return found


@functools.cache
def imports(module: str, text: str) -> frozenset[str]:
    """The imports of a module with this text, and names that may be modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*package, *filter(None, [node.module])])
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@functools.cache
def code(text: str) -> str:
    """Returns a digest of what a compiler sees of a module: no comments, no docstrings, no layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[:1] = []
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def digest(variant: Variant, root: Path = ROOT) -> str:
    """Names everything that a variant's cubin depends on, of the sources below `root`."""
    content = hashlib.sha256(f"{variant.identity} {variant.layout}\n{toolchain()}\n".encode())
    for source in sorted(modules(variant.module, root) | modules("kernels.aot", root)):
        content.update(f"{source.relative_to(root)} {code(source.read_text())}\n".encode())
    return content.hexdigest()


def cached(variant: Variant, out: Path) -> Record | None:
    """The record of a cubin that exists and is still right."""
    try:
        record: Record = json.loads((out / f"{variant.key}.json").read_text())
        cubin = (out / f"{variant.key}.cubin").read_bytes()
    except (OSError, ValueError):
        return None
    if record["digest"] != digest(variant) or record["sha256"] != hashlib.sha256(cubin).hexdigest():
        return None
    check(variant, record, read_kernel(cubin))
    return record


class Compiler:
    """A process of `kernels.compile_server`, which compiles variants of one architecture from sources below `root`."""

    def __init__(self) -> None:
        self.arch = ""
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, variant: Variant, out: Path, root: Path = ROOT) -> float:
        """Compiles into `out`; the seconds that it took of a core."""
        if self.process is None or self.arch != variant.arch:
            self.close()
            self.arch, command = variant.arch, [sys.executable, "-m", "kernels.compile_server", variant.arch]
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(variant.key, out.resolve(), root.resolve(), sep="\t", file=self.process.stdin, flush=True)
        answer, log = self.process.stdout.readline().strip(), out / f"{variant.key}.log"
        said = log.read_text(errors="replace") if log.exists() else ""
        log.unlink(missing_ok=True)
        status, _, seconds = answer.partition(" ")
        if status != "0":
            raise Refused(f"{variant.key}: did not compile\n{said}")
        return float(seconds)

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.communicate()


def compile_one(variant: Variant, out: Path, compiler: Compiler | None = None) -> tuple[Record, float]:
    """Compile in a fresh process, check the cubin, and leave its record and its host stub beside it: the record, and
    the seconds that it took of a core.
    """
    (out / f"{variant.key}.json").unlink(missing_ok=True)
    if compiler is None:
        with contextlib.closing(Compiler()) as compiler:
            seconds = compiler(variant, out)
    else:
        seconds = compiler(variant, out)
    cubin = (out / f"{variant.key}.cubin").read_bytes()
    launch = out / f"{variant.key}.launch.json"
    facts = json.loads(launch.read_text())
    launch.unlink()
    kernel = read_kernel(cubin)
    check(variant, facts, kernel)
    record = {
        "key": variant.key,
        **{name: facts[name] for name in (*FACTS, "symbol")},
        "registers": kernel.registers,
        "spill_bytes": kernel.local_bytes,
        "cubin_bytes": len(cubin),
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "digest": digest(variant),
    }
    (out / f"{variant.key}.json").write_text(json.dumps(record, indent=1))
    return record, seconds


def taken(variant: Variant, out: Path, cache: KernelCache) -> Record | None:
    """The record of a cubin that was compiled into some other directory, and is now in `out`."""
    return cached(variant, out) if cache.take(digest(variant), out) else None


def keep(record: Record, out: Path, cache: KernelCache) -> None:
    """Puts what a compilation left into the cache: the record last, without which the rest does not count."""
    files = sorted(out.glob(f"{record['key']}.*"), key=lambda path: path.name == f"{record['key']}.json")
    try:
        cache.keep(record["digest"], files)
    except OSError as error:
        print(f"kernels: {record['key']} is not in the cache: {error}", flush=True)


def longest_first(variants: Iterable[Variant]) -> list[Variant]:
    """An order in which no core waits long for the last kernel: by architecture, which a compiler keeps, and then what
    has most code first.
    """
    code = {
        module: sum(len(path.read_text()) for path in modules(module, ROOT)) for module in {v.module for v in variants}
    }
    return sorted(variants, key=lambda v: (v.arch, -code[v.module]))


def build(variants: Sequence[Variant], out: Path, jobs: int, cache: KernelCache | None = None) -> dict[str, Record]:
    """Bring cubins up to date; their records, by key.  Raises Refused for the first variant that fails."""
    out.mkdir(parents=True, exist_ok=True)
    digests = {v.key: digest(v) for v in variants}  # before the compilers read the sources
    records = {v.key: record for v in variants if (record := cached(v, out))}
    up_to_date = len(records)
    if cache is not None:
        missing = [v for v in variants if v.key not in records]
        records |= {v.key: record for v in missing if (record := taken(v, out, cache))}
    stale = [v for v in variants if v.key not in records]
    from_cache = f"{len(records) - up_to_date} from {cache.folder}" if cache is not None else "no cache"
    print(f"kernels: {up_to_date} up to date, {from_cache}, {len(stale)} to compile ({toolchain()})", flush=True)

    here = threading.local()

    def start() -> None:
        here.compiler = closing.enter_context(contextlib.closing(Compiler()))

    with contextlib.ExitStack() as closing, ThreadPoolExecutor(jobs, initializer=start) as pool:
        futures = [pool.submit(lambda v: compile_one(v, out, here.compiler), v) for v in longest_first(stale)]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                record, seconds = future.result()
                records[record["key"]] = record
                if cache is not None and record["digest"] == digests[record["key"]]:  # no source has changed meanwhile
                    keep(record, out, cache)
                print(
                    f"kernels: [{done}/{len(stale)}] {record['key']}: {seconds:.1f} s of a core,"
                    f" {record['registers']} registers,"
                    f" {record['smem_bytes'] / 1024:.0f} KiB shared memory, {record['cubin_bytes'] / 1024:.0f} KiB",
                    flush=True,
                )
        except Refused:
            pool.shutdown(cancel_futures=True)
            raise
    if cache is not None:
        cache.evict()
    return records


_BANNER = """\
===========================================================================================
  jax_dsv4_fmha: building WITHOUT GPU KERNELS.
  nvidia-cutlass-dsl cannot be imported here, so there is nothing to compile them with:
    {reason}
  The package works on CPU through its reference; on a GPU, implementation="cubin" fails.
==========================================================================================="""


def why_no_dsl() -> str | None:
    """The reason why the DSL cannot be imported, found in a separate process; None when it can."""
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
    parser.add_argument(
        "--kernels",
        default="all",
        choices=KERNELS,
        help="all (the default), those of one architecture, or those that `make test` interprets: the library that is"
        " made of these has them for the interpreter alone",
    )
    parser.add_argument("--list", action="store_true", help="print the keys and stop")
    parser.add_argument("--digest", action="store_true", help="print what all of them depend on, as one word, and stop")
    parser.add_argument(
        "--optional", action="store_true", help="without the DSL, write empty tables instead of failing"
    )
    parser.add_argument("--no-cache", action="store_true", help="compile what is not in --out, and keep it there alone")
    args = parser.parse_args(argv)
    variants = [v for v in KERNELS[args.kernels] if fnmatch.fnmatch(v.key, args.only) or args.only in v.key]
    is_for_tests = args.kernels == "tested"
    if args.list:
        print("\n".join(v.key for v in variants))
        return 0
    if args.digest:
        print(hashlib.sha256("".join(map(digest, variants)).encode()).hexdigest())
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
        tables.write(VARIANTS, {}, toolchain(), args.out, is_for_tests)
        return 0
    try:
        cache = None if args.no_cache else KernelCache(default_folder())
        tables.write(VARIANTS, build(variants, args.out, args.jobs, cache), toolchain(), args.out, is_for_tests)
    except Refused as refused:
        print(f"kernels: refused {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
