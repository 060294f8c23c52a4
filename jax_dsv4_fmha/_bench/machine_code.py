"""Digests of the machine code that a program ran, so that a record of its times says which kernels they are of."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._host import library

_CALL = re.compile(r'^.*custom_call_target="dsv4_fmha_(\w+)".*$', re.M)
_OF_XLA = {"bfloat16": "bf16", "float16": "f16"}


def machine_code(symbols: Collection[str], program: str) -> dict[str, str]:
    """The start of each cubin's SHA-256, by the kernel's key.

    Args:
      symbols: names of kernels that ran, as the profiler has them.
      program: the compiled program. Kernels for other ops, dtypes or layouts of keys may have the same name. Those that
        its custom calls cannot have launched are left out, and all others stay.
    """
    calls = defaultdict[str, str](str)
    for found in _CALL.finditer(program):
        calls[found[1]] += f"{found[0]}\n"
    local = library.local_architectures()
    rows = [row for row in library.manifest()["variants"] if row["arch"] in local and row["symbol"] in symbols]
    of_calls = {row["symbol"] for row in rows if row["op"] in calls}
    return {
        row["key"]: _start(row)
        for row in rows
        if row["symbol"] not in of_calls or (row["op"] in calls and _may_run(row["choices"], calls[row["op"]]))
    }


def _start(row: Mapping[str, Any]) -> str:
    return str(row["sha256"][:16])


def _may_run(choices: Mapping[str, Any], calls: str) -> bool:
    """True if one of the op's calls, as XLA prints them, can have chosen a kernel with these choices."""
    dtype, packings = _OF_XLA.get(choices.get("dtype", "")), re.findall(r'\bpacking = "(\w*)"', calls)
    is_typed = dtype is None or re.search(rf"\b{dtype}\[", calls) is not None
    is_wide = "max_heads" not in choices or re.search(rf"\b{choices['d']}\]", calls) is not None
    return is_typed and is_wide and (not packings or choices.get("packing", "") in packings)


def changed(recorded: Mapping[str, str], built: Sequence[Mapping[str, Any]], *, is_whole: bool) -> list[str]:
    """The keys of recorded kernels whose machine code no kernel has that is built now.

    is_whole: all kernels of this version are built. Otherwise nothing is known of a key that is missing.
    """
    now = {row["key"]: _start(row) for row in built}
    gone = [key for key, digest in recorded.items() if digest not in now.values()]
    return [key for key in gone if is_whole or key in now]
