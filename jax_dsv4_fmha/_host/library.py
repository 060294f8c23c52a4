"""The only loader of the native library, and what it holds.

Importing this module loads the library and registers its XLA custom calls.  It needs no GPU, initialises no backend,
and without a library it reports no kernels.  `SHIPPED` says which kernels there are, with or without a library.
"""

import ctypes
import functools
import importlib.util
import json
import struct
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax

from .call import TARGETS
from .split_kv import architecture

EXPORT_CHECKS = [jax.export.DisabledSafetyCheck.custom_call(f"dsv4_fmha_{target}") for target in TARGETS]
"""`disabled_checks` of `jax.export.export` for programs with this package's ops: an artefact may contain its custom
calls.
"""

ANY = 2**31 - 1
"""The value of a limit in `Variant.choices` that does not limit"""


@dataclass(frozen=True)
class Variant:
    """A kernel of this version: what it is compiled for."""

    key: str
    op: str
    family: str
    """ops whose kernels take the same arguments and differ by the same choices"""
    arch: str
    choices: dict[str, Any]
    """Compile-time choices that a call must match, by name. A choice that begins with `max_` is a limit: a call gets
    the variant with the lowest limit that it keeps."""
    splits: bool
    """whether the keys of a tile of rows may be split over CTAs"""
    evidence: str
    """how we know that it is right, in words"""


@dataclass(frozen=True)
class BuiltVariant(Variant):
    """A kernel in the library, and what the compiler made of it."""

    tile_m: int
    """rows of a tile: (query, head) pairs"""
    tile_n: int
    """keys of a tile"""
    unit: int
    """key tiles that split-KV shares out as one unit"""
    ctas: int
    """CTAs that run on an SM at a time"""
    cluster: int
    """CTAs that take tiles of rows together"""
    threads: int
    registers: int
    """registers per thread, at launch"""
    smem_bytes: int
    spill_bytes: int
    cubin_bytes: int


SHIPPED = tuple(Variant(**row) for row in json.loads(Path(__file__).with_name("variants.json").read_text()))
"""The kernels of this version, which `kernels/tables.py` writes of `kernels/variants.py`. A library has all kernels of
some architectures."""


def library_path() -> Path | None:
    """The path of the native library, or None: beside this file, or where an editable install keeps it."""
    spec = importlib.util.find_spec("jax_dsv4_fmha._native")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


@functools.cache
def native() -> ctypes.CDLL | None:
    """The native library. None where there is none, or only a damaged one, which a RuntimeWarning reports."""
    path = library_path()
    if path is None:
        return None
    try:
        return _load(path)
    except OSError as e:
        wanted = "everything runs on the reference until it is built again, or removed"
        warnings.warn(f"{path} cannot be loaded: {e}; {wanted}", RuntimeWarning, stacklevel=2)
        return None


def _load(path: Path) -> ctypes.CDLL:
    if not _is_whole(path):  # loading it would kill the process
        raise OSError("its end is missing")
    found = ctypes.CDLL(str(path))
    if not hasattr(found, "dsv4_fmha_manifest"):
        raise OSError("it is of another version, and lacks dsv4_fmha_manifest")
    found.dsv4_fmha_manifest.restype = ctypes.c_char_p
    contents = _read_manifest(found)
    if contents.get("targets") != TARGETS:
        raise OSError("it is of another version, and has other custom calls")
    rows = contents["variants"]
    for row in rows:
        if missing := [field.name for field in fields(BuiltVariant) if field.name not in row]:
            raise OSError(f"it is of another version, and does not say the {missing[0]} of its kernels")
    keys, archs = {row["key"] for row in rows}, {row["arch"] for row in rows}
    wanted = {v.key for v in SHIPPED if v.arch in archs}
    if not (keys <= wanted if contents.get("is_for_tests") else keys == wanted):
        raise OSError("it is of another version, and has other kernels")
    return found


def _read_manifest(found: ctypes.CDLL) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(found.dsv4_fmha_manifest())
    return contents


def _is_whole(path: Path) -> bool:
    """True if a 64-bit ELF file reaches to the end of its section table, which is last; True for any other file."""
    with open(path, "rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return True
    (table,), (size, count) = struct.unpack("<Q", head[40:48]), struct.unpack("<HH", head[58:62])
    return path.stat().st_size >= table + size * count


@functools.cache
def manifest() -> dict[str, Any]:
    """The facts that `kernels/build.py` wrote of this build: `toolchain`, `is_for_tests`, `targets` and `variants`."""
    found = native()
    if found is None:
        return {"toolchain": "", "is_for_tests": False, "targets": TARGETS, "variants": []}
    return _read_manifest(found)


@functools.cache
def variants() -> tuple[BuiltVariant, ...]:
    """The kernels that calls may run: () without a library, and where it has some for the interpreter alone."""
    return () if manifest().get("is_for_tests") else held()


@functools.cache
def held() -> tuple[BuiltVariant, ...]:
    """All kernels that are built in."""
    names = [field.name for field in fields(BuiltVariant)]
    return tuple(BuiltVariant(**{name: row[name] for name in names}) for row in manifest()["variants"])


def variants_for(op: str, **choices: Any) -> list[BuiltVariant]:
    """The kernels of `op` that are built in, with these compile-time choices and with any limits."""
    return [v for v in variants() if v.op == op and choices.items() <= v.choices.items()]


def architectures() -> tuple[str, ...]:
    """The architectures whose kernels are built in."""
    return tuple(dict.fromkeys(v.arch for v in variants()))


def shipped_for(op: str, **choices: Any) -> tuple[str, ...]:
    """The architectures that this version has a kernel of `op` for with these compile-time choices, built in or not."""
    return tuple(dict.fromkeys(v.arch for v in SHIPPED if v.op == op and choices.items() <= v.choices.items()))


def local_architectures() -> tuple[str, ...]:
    """The architectures of this process's CUDA devices, each once, as "sm_90a"; () without any."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no such backend here
        return ()
    return tuple(dict.fromkeys(architecture(device.compute_capability) for device in devices))


def _register() -> None:
    found = native()
    if found is None:
        return
    for state in dict.fromkeys(target["state"] for target in TARGETS.values() if "state" in target):
        kind: Any = {name: _pointer(found, f"dsv4_fmha_{state}_{name}") for name in ("type_id", "type_info")}
        jax.ffi.register_ffi_type(f"dsv4_fmha_{state}", kind, platform="CUDA")
    for target, described in TARGETS.items():
        symbol = f"dsv4_fmha_{target}"
        stages = {
            "initialize": jax.ffi.pycapsule(found[f"{symbol}_initialize"]),
            "execute": jax.ffi.pycapsule(found[symbol]),
        }
        if "state" in described:
            stages["instantiate"] = jax.ffi.pycapsule(found[f"{symbol}_instantiate"])
        jax.ffi.register_ffi_target(symbol, stages, platform="CUDA")


def _pointer(found: ctypes.CDLL, name: str) -> Any:
    """Returns a capsule of the address that a function of this name returns."""
    function = found[name]
    function.restype = ctypes.c_void_p
    return jax.ffi.pycapsule(function())


_register()
