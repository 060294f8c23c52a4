"""Compiles a JAX function whose kernels are Mosaic GPU's, for a GPU that is not there, and records what it launches.

Mosaic GPU compiles in C++, in the plugin of JAX for CUDA: MLIR, then LLVM's NVPTX, then ptxas. It asks the driver which
chip there is; a stand-in (libcuda.c) answers. The host code that it makes encodes tensor maps, and the stand-in records
its launches.

What a function computes outside of kernels is computed on the CPU, and a kernel gets the result as an operand.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..cute.launches import Argument, Launch, Role
from ..cute.record import LAUNCHES, _Kernel, _Launch, allocated, placed
from ..machine.parser import parse
from ..machine.state import Array

STAND_IN = Path(__file__).with_name("libcuda.c")
KERNEL = "mpmd_map"  # the primitive of a kernel
CALLS = {"jit", "pjit", "closed_call", "custom_vmap_call", "custom_vjp_call", "custom_jvp_call"}  # of a function
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {processors}
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  fpus_per_core: 128 clock_rate_ghz: 1.8 memory_bandwidth: 7000000000000 l2_cache_size: 132120576
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  device_vendor: "NVIDIA Corporation" name: "{name}" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


@dataclass
class Recorded:
    """The launches that a function makes, and the memory of their operands and results."""

    launches: list[Launch] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    seconds: float = 0  # to compile
    memory: list[Array] = field(default_factory=list)  # theirs, which must last while the host code runs


@dataclass(frozen=True)
class Device:
    """The GPU that is not there, as kernels and their compiler ask about it."""

    core_count: int
    compute_capability: str


class Compiler:
    """Mosaic GPU's compiler, of a process that has loaded the stand-in before JAX's plugin asks for the driver."""

    def __init__(self, arch: str, processors: int):
        self.arch = divmod(int(re.sub(r"\D", "", arch)), 10)
        self.dump = tempfile.TemporaryDirectory()
        self.stand_in = stand_in(Path(self.dump.name))
        for name, value in {"processor_count": processors, "capability": self.arch[0] * 10 + self.arch[1]}.items():
            ctypes.c_int.in_dll(self.stand_in, name).value = value
        os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": self.dump.name}
        import jax
        import jax_plugins.xla_cuda12 as plugin
        from jax.experimental.mosaic.gpu import core
        from jax.extend import backend

        jax.devices()
        device = Device(processors, f"{self.arch[0]}.{self.arch[1]}")
        jax.local_devices = lambda *_, **__: [device]
        backend.get_default_device = lambda: device
        self.known = core.KNOWN_KERNELS
        self.register_target(processors)
        self.library = ctypes.CDLL(plugin._get_library_path())
        self.library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)

    def register_target(self, processors: int) -> None:
        """Has XLA compile a program ahead of time, which registers LLVM's target: jaxlib 0.10.2's MosaicGpuCompile
        forgets that."""
        import jax
        from jax.experimental import topologies

        major, minor = self.arch
        target = TARGET.format(processors=processors, major=major, minor=minor, name="a GPU that is not there")
        devices = topologies.get_topology_desc("1x1x1", "cuda", target_config=target, topology="1x1x1").devices
        device = jax.sharding.SingleDeviceSharding(devices[0])
        one = jax.ShapeDtypeStruct((1,), np.float32, sharding=device)
        jax.jit(lambda x: x + 1, out_shardings=device).lower(one).compile()

    def compiled(self, function: Callable[..., Any], operands: Sequence[Any]) -> tuple[str, Any]:
        """The PTX of a function that is one kernel, and what the plugin returns: a context and the host code."""
        import jax

        self.known.clear()
        ctypes.c_int.in_dll(self.stand_in, "kernel_count").value = 0  # they have the same name
        jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
        (module,) = self.known.values()
        for path in self.dumped():
            path.unlink()
        made = self.library.MosaicGpuCompile(ctypes.c_char_p(module), ctypes.c_int(len(module)))
        if not made:
            raise NotImplementedError(f"Mosaic GPU does not compile it: {self.failure or 'it does not say why'}")
        (path,) = self.dumped()
        return path.read_text(), made

    def dumped(self) -> list[Path]:
        return list(Path(self.dump.name).glob("*.ptx"))

    @property
    def failure(self) -> str:
        return (ctypes.c_char_p.in_dll(self.stand_in, "failure").value or b"").decode()

    def launches(self, ptx: str, made: Any, buffers: Sequence[int]) -> list[Launch]:
        """The launches that the host code makes of buffers at these addresses."""
        (name,) = re.findall(r"\.entry\s+([\w$]+)", ptx)
        sizes = [p.size for p in parse(ptx).params.values()]
        known = _Kernel.in_dll(self.stand_in, "kernels")
        assert known.name.decode() == name
        known.count = len(sizes)
        known.sizes[: len(sizes)] = sizes
        so_far = ctypes.c_int.in_dll(self.stand_in, "launch_count")
        so_far.value = 0
        host = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(made[1])
        addresses = (ctypes.c_void_p * len(buffers))(*buffers)
        host(made[0], None, ctypes.addressof(addresses))
        if self.failure:
            raise NotImplementedError(f"the host code asks for {self.failure}")
        found = (_Launch * LAUNCHES).in_dll(self.stand_in, "launches")[: so_far.value]
        made_launches = []
        for x in found:
            params = [ctypes.string_at(at, size) for at, size in zip(x.params, sizes, strict=False)]
            made_launches.append(Launch(name, ptx, list(x.grid), list(x.block), list(x.cluster), x.smem_bytes, params))
        return made_launches


def stand_in(folder: Path) -> ctypes.CDLL:
    """The stand-in, loaded under the driver's name, so that it is what the plugin finds."""
    path = folder / "libcuda.so.1"
    command = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path), str(STAND_IN)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)


class Unknown:
    """Something that is computed outside of kernels from their results, when none has run."""


@dataclass(frozen=True)
class Output:
    """A kernel's result, before any kernel has run."""

    memory: Array


def record(
    function: Callable[..., Any], args: Sequence[Array], results: Sequence[str], arch: str, processors: int
) -> Recorded:
    """The launches that a function makes of these arrays. `results` names its kernels' results, in their order."""
    compiler, found = Compiler(arch, processors), Recorded()
    import jax

    start = time.monotonic()
    evaluate(jax.make_jaxpr(function)(*args), list(args), Calls(compiler, found))
    found.seconds = time.monotonic() - start
    made = [n for n, x in enumerate(found.arguments) if x.role is Role.RESULT]
    for n, name in zip(made, results, strict=True):
        found.arguments[n] = replace(found.arguments[n], name=name)
    return found


@dataclass
class Calls:
    """The calls of kernels that an evaluation meets."""

    compiler: Compiler
    found: Recorded

    def __call__(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        if any(isinstance(x, Unknown) for x in operands):
            raise NotImplementedError("a kernel that gets what comes of another's results outside of kernels")
        if equation.params["input_output_aliases"]:
            raise NotImplementedError("a kernel that writes its operands")
        ptx, made = self.compiler.compiled(
            lambda *xs: equation.primitive.bind(*xs, **equation.params), [x.aval for x in equation.invars]
        )
        arguments = self.found.arguments
        addresses = []
        for x in operands:
            if isinstance(x, Output):
                addresses.append(address(x.memory))
            else:
                arguments.append(Argument.of(f"operand {len(arguments)}", kept := placed(np.asarray(x)), Role.OPERAND))
                self.found.memory.append(kept)
                addresses.append(arguments[-1].address)
        outputs = [Output(allocated(x.aval.shape, x.aval.dtype)) for x in equation.outvars]
        for x in outputs:
            arguments.append(Argument.of(f"result {len(arguments)}", x.memory, Role.RESULT))
            self.found.memory.append(x.memory)
            addresses.append(arguments[-1].address)
        self.found.launches += self.compiler.launches(ptx, made, addresses)
        return list(outputs)


def address(x: Array) -> int:
    return int(x.__array_interface__["data"][0])


def evaluate(jaxpr: Any, args: Sequence[Any], kernel: Callable[[Any, Sequence[Any]], list[Any]]) -> list[Any]:
    """Evaluates a closed jaxpr on the CPU; `kernel` gets each call of a kernel, with its operands."""
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)) | dict(zip(jaxpr.jaxpr.invars, args, strict=True))

    def value(x: Any) -> Any:
        return x.val if hasattr(x, "val") else env[x]

    for equation in jaxpr.jaxpr.eqns:
        operands = [value(x) for x in equation.invars]
        primitive, params = equation.primitive, equation.params
        if primitive.name == KERNEL:
            outputs = kernel(equation, operands)
        elif primitive.name in CALLS:
            inner = next(params[name] for name in ("jaxpr", "call", "call_jaxpr") if name in params)
            outputs = evaluate(inner, operands, kernel)
        elif any(isinstance(x, (Output, Unknown)) for x in operands):
            outputs = [Unknown() for _ in equation.outvars]
        else:
            made = primitive.bind(*operands, **primitive.get_bind_params(params))
            outputs = list(made) if primitive.multiple_results else [made]
        env |= dict(zip(equation.outvars, outputs, strict=True))
    return [value(x) for x in jaxpr.jaxpr.outvars]
