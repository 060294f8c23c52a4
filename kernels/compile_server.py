"""Compile variants of one architecture: `python -m kernels.compile_server ARCH`, then KEY, DIR, ROOT a line on stdin.

The DSL is imported once, and every variant compiled in a process forked after that, so that each finds it untouched.
The kernels' sources are those below ROOT. Answers each line with an exit status and the seconds that it took of a core.
Needs nvidia-cutlass-dsl, but no GPU
and no driver.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

from .variants import VARIANTS

HERE = Path(__file__).resolve().parent.parent


def compile_here(key: str, out: str, root: str) -> None:
    """Does what `python -m kernels.aot` does, with the host stub beside the cubin; its output goes to KEY.log."""
    log = os.open(Path(out) / f"{key}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.argv = ["kernels.aot", key, "--out", out, "--export"]
    if Path(root) != HERE:
        sys.path.insert(0, root)
        for name in [name for name in sys.modules if name.split(".")[0] == "kernels"]:
            del sys.modules[name]
    status = 1
    try:
        importlib.import_module("kernels.aot").main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def main(arch: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for all other output
    os.environ["CUTE_DSL_ARCH"] = arch
    for module in {v.module for v in VARIANTS if v.arch == arch}:
        importlib.import_module(module)
    for line in sys.stdin:
        key, out, root = line.rstrip("\n").split("\t")
        if (child := os.fork()) == 0:
            compile_here(key, out, root)
        _, status, used = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
