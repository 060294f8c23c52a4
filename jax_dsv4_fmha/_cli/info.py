"""`python -m jax_dsv4_fmha info`: versions, devices, and the kernels that are built in."""

import importlib.metadata
import platform
from collections import Counter
from dataclasses import asdict
from typing import Any

import jax

from .. import __version__
from .._host import library
from . import plot
from .report import output, table, write_json


def machine() -> dict[str, Any]:
    """The versions and devices that a measurement depends on."""
    driver = _Driver()
    versions = {
        "jax_dsv4_fmha": __version__,
        **{name: _version(name) for name in ("jax", "jaxlib", "numpy")},
        "python": platform.python_version(),
        "cuda_driver": driver.version,
        "kernels": library.manifest()["toolchain"] if library.variants() else "none built",
    }
    devices = [] if no_devices() else [_device(device, driver) for device in jax.local_devices()]
    return {"versions": versions, "devices": devices}


def no_devices() -> str | None:
    """Why JAX has no devices, not even a CPU, for example because of JAX_PLATFORMS; None where it has some."""
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as e:
        platforms = getattr(jax.config, "jax_platforms", None)  # JAX's annotations do not know this
        return f"JAX finds no device (jax_platforms is {platforms!r}): {(str(e).splitlines() or [type(e).__name__])[0]}"
    return None


def info(json_path: str | None, plot_path: str | None = None) -> int:
    facts = {
        **machine(),
        "no_devices": no_devices(),
        "library": str(library.library_path()) if library.library_path() else None,
        "variants": [asdict(v) for v in library.variants()],
    }
    if json_path is not None:
        write_json(facts, json_path)
    if plot_path is not None:
        plot.draw_built(library.variants(), plot_path)
    if json_path != "-":
        print(_text(facts), file=output(json_path))
    return 0


def _text(facts: dict[str, Any]) -> str:
    versions = table(("version", ""), [(k, v or "not found") for k, v in facts["versions"].items()], left=2)
    devices = table(
        ("device", "platform", "capability", "SMs", "memory"),
        [
            (
                d["name"],
                d["platform"],
                d["compute_capability"] or "",
                str(d["sms"] or ""),
                f"{d['memory_bytes'] / 2**30:.0f} GiB" if d["memory_bytes"] else "",
            )
            for d in facts["devices"]
        ],
        left=2,
    )
    variants = table(
        (
            "op",
            "arch",
            "for",
            "threads",
            "registers",
            "SMEM KiB",
            "spills",
            "cubin KiB",
            "evidence",
        ),
        [
            (
                v["op"],
                v["arch"],
                _chosen(v["choices"]),
                str(v["threads"]),
                str(v["registers"]),
                f"{v['smem_bytes'] / 1024:.1f}",
                str(v["spill_bytes"]),
                f"{v['cubin_bytes'] / 1024:.1f}",
                v["evidence"],
            )
            for v in facts["variants"]
        ],
        left=3,
    )
    if not facts["variants"]:
        counts = Counter(v.arch for v in library.SHIPPED)
        shipped = ", ".join(f"{n} for {arch}" for arch, n in counts.items())
        some = f", but for {n} that `make test` interprets" if (n := len(library.held())) else ""
        variants = f"No kernels are built in{some}: everything runs on the reference. This version has {shipped}."
    devices = facts["no_devices"] or devices
    return f"{versions}\nlibrary: {facts['library'] or 'none'}\n\n{devices}\n\n{variants}"


def _chosen(choices: dict[str, Any]) -> str:
    """Like "bfloat16, d 512, heads <= 63"."""
    parts = []
    for name, value in sorted(choices.items(), key=lambda x: not isinstance(x[1], str)):
        if isinstance(value, bool):
            parts += [name] * value
        elif name.startswith("max_"):
            parts += [f"{name.removeprefix('max_')} <= {value}"] * (value != library.ANY)
        elif value != "":
            parts.append(value if isinstance(value, str) else f"{name} {value}")
    return ", ".join(parts)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: Any, driver: "_Driver") -> dict[str, Any]:
    sms, memory = driver.device(device.local_hardware_id) if device.platform == "gpu" else (None, None)
    return {
        "name": device.device_kind,
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "sms": sms,
        "memory_bytes": memory,
    }


class _Driver:
    """The facts that cuda-python knows of the devices; None unless it is installed and finds a driver."""

    def __init__(self) -> None:
        self.version: str | None = None
        try:
            from cuda.bindings import driver

            if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
                return
        except (ImportError, RuntimeError):  # no cuda-python, no libcuda
            return
        self.cuda = driver
        version = driver.cuDriverGetVersion()[1]
        self.version = f"{version // 1000}.{version % 1000 // 10}"

    def device(self, ordinal: int) -> tuple[int | None, int | None]:
        """(SMs, bytes of memory)"""
        if self.version is None:
            return None, None
        handle = self.cuda.cuDeviceGet(ordinal)[1]
        count = self.cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return self.cuda.cuDeviceGetAttribute(count, handle)[1], self.cuda.cuDeviceTotalMem(handle)[1]
