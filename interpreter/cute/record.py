"""Compiles a CuTe DSL function for a GPU that is not there, and records what its own host code launches.

    x, y = allocated((128,), np.float32), allocated((128,), np.float32)
    launches = record(compiled(function, tensor(x), tensor(y), 2.0), tensor(x), tensor(y), 2.0)

Arrays are NumPy's (or torch's, on the CPU); the host code gets their own addresses, and calls a stand-in for CUDA. The
stand-in is compiled by `cc`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..machine.parser import parse
from ..machine.state import Array
from .launches import Launch

PARAMS, KERNELS, LAUNCHES, NAME = 256, 64, 64, 1024  # as in recorder.c
RECORDER = Path(__file__).with_name("recorder.c")
ALIGNMENT = 128


ELEMENTS = {  # names of the DSL's types, for what DLPack does not know
    np.dtype(ml_dtypes.bfloat16): "BFloat16",
    np.dtype(ml_dtypes.float8_e4m3fn): "Float8E4M3FN",
    np.dtype(ml_dtypes.float8_e5m2): "Float8E5M2",
}


class _Kernel(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * NAME), ("count", ctypes.c_int), ("sizes", ctypes.c_int * PARAMS))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("params", ctypes.c_void_p * PARAMS),
    )


class _DLTensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2))


class AsCuda:
    """An array of the CPU that DLPack calls one of CUDA: its address is what a kernel gets.

    DLPack knows no 16-bit or 8-bit float of ml_dtypes; they go as integers of their size.
    """

    def __init__(self, array: Array):
        self.array = array.view(f"u{array.itemsize}") if array.dtype in ELEMENTS else array

    def __dlpack__(self, stream: object = None, **_: object) -> Any:
        capsule = self.array.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        found = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(_DLTensor))
        found[0].device[0] = self.__dlpack_device__()[0]
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def allocated(shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Zeros at an address that suits TMA."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def placed(array: Array) -> Array:
    """A copy at such an address; strides are those of C."""
    copy = allocated(array.shape, array.dtype)
    copy[...] = array
    return copy


def as_numpy(x: Any) -> Array:
    """The same memory as a NumPy array: of torch's tensors too."""
    if isinstance(x, np.ndarray):
        return x
    names = {
        "bfloat16": ml_dtypes.bfloat16,
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e5m2": ml_dtypes.float8_e5m2,
    }
    name = str(x.dtype).removeprefix("torch.")
    if name not in names:
        return x.detach().numpy()
    import torch

    bits = torch.uint16 if name == "bfloat16" else torch.uint8
    return x.detach().view(bits).numpy().view(names[name])


def tensor(x: Any, *, align: int = 16, leading: int | None = None, dynamic: bool = True) -> Any:
    """A tensor of the DSL over an array's memory; with a dynamic layout, whose contiguous mode is `leading`."""
    from cutlass.cute.runtime import from_dlpack

    array = as_numpy(x)
    made = typed(from_dlpack(AsCuda(array), assumed_align=align), array)
    return made.mark_layout_dynamic(leading_dim=leading) if dynamic else made


def typed(made: Any, array: Array) -> Any:
    """A tensor of the DSL with the element type of the array that it was made from."""
    import cutlass

    if array.dtype in ELEMENTS:
        made.element_type = getattr(cutlass, ELEMENTS[array.dtype])
    return made


@contextlib.contextmanager
def pretend(processors: int) -> Iterator[None]:
    """While this lasts the DSL finds a GPU of so many processors where it asks for one."""
    import cutlass.utils

    class Hardware:
        def __init__(self, *_: object, **__: object):
            pass

        def get_max_active_clusters(self, cluster_size: int = 1, *_: object, **__: object) -> int:
            return max(1, processors // cluster_size)

        def get_device_multiprocessor_count(self, *_: object, **__: object) -> int:
            return processors

        def get_l2_cache_size_in_bytes(self, *_: object, **__: object) -> int:
            return 126 << 20

    places = (cutlass.utils, cutlass.utils.hardware_info)
    before = [place.HardwareInfo for place in places]
    for place in places:
        place.HardwareInfo = Hardware
    try:
        yield
    finally:
        for place, was in zip(places, before, strict=True):
            place.HardwareInfo = was


def compiled(
    function: Any, *args: Any, arch: str = "sm_100a", options: str = "", compiler: Any = None, **kwargs: Any
) -> Any:
    """Compiles a function by `cute.compile`, or by `compiler`, another of its forms, and keeps its PTX.

    Raises NotImplementedError if there is none.
    """
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    from cutlass import cute

    with tempfile.TemporaryDirectory() as dump:
        options = f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {dump} {options}"
        made = (compiler or cute.compile)(function, *args, **kwargs, options=options)
        if not made.__ptx__:  # which is read while the files are there
            raise NotImplementedError(f"{function} has no PTX")
        return made


def record(compiled: Any, *args: Any, arch: str = "sm_100a", processors: int = 148, **kwargs: Any) -> list[Launch]:
    """The launches that a compiled function makes of these arguments."""
    arguments = compiled.generate_execution_args(*args, **kwargs)[0]
    return record_arguments(compiled, arguments, arch=arch, processors=processors)


def record_arguments(compiled: Any, arguments: Sequence[Any], *, arch: str, processors: int) -> list[Launch]:
    """The same, of arguments as the DSL gives them to the host code."""
    ptx = modules(compiled.__ptx__)
    kernels = {name: [p.size for p in parse(text).params.values()] for name, text in ptx.items()}
    nothing = (ctypes.c_uint64 * 8)()  # a stream that is null
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "host.o"
        made.write_bytes(compiled.dump_to_object(prefix := "recorded"))
        host = HostCode(made, prefix, Path(folder) / "host.so")
        host.load(kernels, arch, processors)
        found = host.run([address_of(x) or ctypes.addressof(nothing) for x in arguments])
    return [
        Launch(x.kernel, ptx[x.kernel], list(x.grid), list(x.block), list(x.cluster), x.smem_bytes, list(x.params))
        for x in found
    ]


def modules(ptx: str | None) -> dict[str, str]:
    """Splits PTX into a module for each kernel, by name, with that kernel alone."""
    if ptx is None:
        raise ValueError("a function that was compiled before, without its PTX")
    starts = [m.start() for m in re.finditer(r"^\s*(?:\.visible\s+)?\.entry", ptx, re.M)]
    texts = [ptx[: starts[0]] + ptx[a:b] for a, b in zip(starts, [*starts[1:], len(ptx)], strict=True)]
    return {re.findall(r"\.entry\s+([\w$]+)", text)[0]: text for text in texts}


class Recorded(NamedTuple):
    """A launch, as the stand-in for CUDA was asked for it."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    smem_bytes: int
    params: tuple[bytes, ...]


class HostCode:
    """The host code of a compiled function, an object file with a prefix of its symbols, linked with the stand-in."""

    def __init__(self, made: Path, prefix: str, library: Path):
        # -Bsymbolic: the stand-in's functions, not those of the DSL's runtime, which may be loaded already
        link = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", str(library), str(RECORDER), str(made)]
        subprocess.run(link, check=True)
        symbols = subprocess.run(["nm", made], check=True, capture_output=True, text=True).stdout
        self.prefix = prefix
        (self.entry,) = re.findall(rf"T (_mlir_{prefix}__mlir_ciface_\S+)", symbols)
        self.library = ctypes.CDLL(str(library))

    def call(self, name: str, *pointers: int) -> None:
        result = ctypes.c_int()
        self.library[name](
            (ctypes.c_void_p * (len(pointers) + 1))(*pointers, ctypes.addressof(result)), len(pointers) + 1
        )
        failure = ctypes.c_char_p.in_dll(self.library, "failure").value
        if failure or result.value:
            raise NotImplementedError(
                f"the host code asks for {(failure or b'what is not known').decode()}: {result.value}"
            )

    def load(self, kernels: Mapping[str, Sequence[int]], arch: str, processors: int = 148) -> None:
        """Says which kernels there are, with the sizes of their parameters, and has the host code load them."""
        self.kernels = kernels
        known = (_Kernel * KERNELS).in_dll(self.library, "kernels")
        for n, (name, sizes) in enumerate(kernels.items()):
            known[n].name, known[n].count = name.encode(), len(sizes)
            known[n].sizes[: len(sizes)] = sizes
        numbers = {"kernel_count": len(kernels), "processor_count": processors}
        for name, value in (numbers | {"capability": int(re.sub(r"\D", "", arch))}).items():
            ctypes.c_int.in_dll(self.library, name).value = value
        handle, device = (ctypes.c_void_p * 64)(), ctypes.c_int()
        where = ctypes.c_void_p(ctypes.addressof(handle))
        self.handle = handle, where
        self.call(f"_mlir_{self.prefix}_cuda_init", ctypes.addressof(where))
        self.call(f"_mlir_{self.prefix}_cuda_load_to_device", ctypes.addressof(where), ctypes.addressof(device))

    def run(self, arguments: Sequence[int]) -> list[Recorded]:
        """Calls the host code with arguments at these addresses, and returns the launches that it makes."""
        count = ctypes.c_int.in_dll(self.library, "launch_count")
        count.value = 0
        self.call(self.entry, *arguments)
        found = []
        for x in (_Launch * LAUNCHES).in_dll(self.library, "launches")[: count.value]:
            name = x.kernel.decode()
            params = (ctypes.string_at(at, size) for at, size in zip(x.params, self.kernels[name], strict=False))
            shape = (tuple(x.grid), tuple(x.block), tuple(x.cluster))
            found.append(Recorded(name, *shape, x.smem_bytes, tuple(params)))
        return found


def address_of(x: Any) -> int | None:
    """Returns the address of an argument of the host code; None for a null pointer."""
    if isinstance(x, int):
        return x
    return x.value if isinstance(x, ctypes.c_void_p) else ctypes.addressof(x)
