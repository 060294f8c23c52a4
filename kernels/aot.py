"""Compile one variant in this process: `python -m kernels.aot KEY --out DIR`.

Needs nvidia-cutlass-dsl but neither a GPU nor a driver.  `kernels.compile_server` forks one such process per variant,
because `cute.compile` is not thread-safe and takes its architecture from the environment.
"""

import argparse
import importlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .abi import Variant
from .variants import VARIANTS


@dataclass(frozen=True)
class Compiled:
    """The result of a kernel module's `compile(variant, out_dir)`."""

    cubin: bytes
    symbol: str  # the kernel's name inside the cubin
    ptx: str
    facts: dict[str, int]  # facts that a caller must know and the cubin does not say: `build.FACTS`
    host_arguments: tuple[str, ...]  # names of the host stub's parameters, the stream last
    export: Callable[[str, str, str], None]  # export(dir, file name, function prefix): the host stub as .h and .o


def compile_ahead(
    entry: Any, kernel: Any, *args: Any, name: str, arch: str, out_dir: Path, facts: dict[str, int]
) -> Compiled:
    """Compile `entry(*args, stream)`, which launches `kernel` once, for `arch`.

    `kernel` is the `@cute.kernel` method as found on the class; `args` are fake pointers and example scalars.
    """
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    if os.environ.get("CUTE_DSL_ARCH") != arch:
        raise RuntimeError(
            f"CUTE_DSL_ARCH is {os.environ.get('CUTE_DSL_ARCH')!r}, wanted {arch!r} before the first import"
        )
    kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    out_dir.mkdir(parents=True, exist_ok=True)  # otherwise the DSL returns a path instead of the bytes
    options = f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {out_dir}"
    compiled = cute.compile(entry, *args, make_fake_stream(), options=options)
    (symbol,) = compiled.kernel_info
    host_arguments = tuple(inspect.signature(entry.__call__).parameters)
    return Compiled(compiled.__cubin__, symbol, compiled.__ptx__, facts, host_arguments, compiled.export_to_c)


def compile_variant(variant: Variant, out_dir: Path) -> Compiled:
    compiled: Compiled = importlib.import_module(variant.module).compile(variant, out_dir)
    return compiled


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.add_argument("key", choices=[v.key for v in VARIANTS], metavar="KEY")
    parser.add_argument("--out", type=Path, required=True, help="directory for KEY.cubin, KEY.ptx and KEY.launch.json")
    parser.add_argument("--export", action="store_true", help="also write the DSL's own host stub")
    args = parser.parse_args()
    variant = next(v for v in VARIANTS if v.key == args.key)
    os.environ["CUTE_DSL_ARCH"] = variant.arch
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as dump:
        compiled = compile_variant(variant, Path(dump))
    (args.out / f"{args.key}.cubin").write_bytes(compiled.cubin)
    (args.out / f"{args.key}.ptx").write_text(compiled.ptx)
    (args.out / f"{args.key}.launch.json").write_text(json.dumps({"symbol": compiled.symbol, **compiled.facts}))
    if args.export:
        compiled.export(str(args.out), args.key, args.key)  # KEY.h and KEY.o
        (args.out / f"{args.key}.host.json").write_text(json.dumps(compiled.host_arguments))


if __name__ == "__main__":
    main()
