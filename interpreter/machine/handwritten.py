"""Programs written by hand: bodies of a kernel in a frame, run here, or on the chip that they are for."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import scheduler
from .copies import SPANS, TensorMap
from .decode import Code
from .parser import parse
from .rules import MANUAL, Rule
from .state import GENERIC_PARAM_BASE, Array, Machine, new_memory

SMEM_BYTES = 65536

FRAME = """
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel(
  .param .align 64 .b8 map[128],
  .param .u64 .ptr .global .align 4 source,
  .param .u64 .ptr .global .align 4 result
){directives}
{{
  .reg .pred %p<9>;
  .reg .b16 %rs<9>;
  .reg .b32 %r<199>;
  .reg .b64 %rd<19>;
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  mov.b32 %r3, smem;
  add.s32 %r4, %r3, %r2;
  mov.u32 %r5, %ctaid.x;
  mov.u32 %r6, %ntid.x;
  mad.lo.s32 %r7, %r5, %r6, %r1;
  mul.wide.s32 %rd1, %r7, 4;
  ld.param.b64 %rd2, [source];
  add.s64 %rd3, %rd2, %rd1;
  ld.param.b64 %rd4, [result];
  add.s64 %rd5, %rd4, %rd1;
  {body}
  ret;
}}
"""
"""%r1 is the thread, %r3 shared memory, %r4 the thread's word of it, %rd3 and %rd5 its words of source and result."""


SYNC = "barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;"


def wait(name: str, offset: int, parity: int | str = 0) -> str:
    """Returns PTX that waits for a phase of the mbarrier at an offset in shared memory; the name is a label."""
    return f"""
{name}:
  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p7, [%r3+{offset}], {parity};
  @!%p7 bra {name};
"""


@dataclass(frozen=True)
class Handwritten:
    body: str
    source: Array | None = None  # words; without it, their numbers
    threads: int = 32
    ctas: int = 1
    cluster: int = 1
    outputs: int = 1  # words a thread of the result: output n of thread t at word n * all threads + t
    tensor: Callable[[int], TensorMap] | None = None  # made from the source's address
    target: str = "sm_90a"

    @property
    def ptx(self) -> str:
        directives = f"\n.explicitcluster\n.reqnctapercluster {self.cluster}, 1, 1" if self.cluster > 1 else ""
        return FRAME.format(target=self.target, directives=directives, body=self.body)

    @property
    def total(self) -> int:
        return self.threads * self.ctas

    @property
    def given(self) -> Array:
        return np.arange(self.total, dtype=np.int32) if self.source is None else self.source

    def shaped(self, result: Array) -> Array:
        words32 = result.view(np.uint32)
        return words32 if self.outputs == 1 else words32.reshape(self.outputs, self.total)

    def interpret(self, seed: int = 0, rules: Collection[Rule] = MANUAL) -> Array:
        """The result; raises what is found."""
        machine = self.machine(seed, rules)
        scheduler.run(machine)
        result = machine.memory.named("result")
        return self.shaped(result.bytes[: result.size])

    def machine(self, seed: int = 0, rules: Collection[Rule] = MANUAL) -> Machine:
        """About to run it."""
        memory, size = new_memory(), 4 * self.total * self.outputs
        source, result = memory.add("source", self.given), memory.add("result", None, size)
        return Machine(
            Code.of(parse(self.ptx)),
            grid=self.ctas,
            threads=self.threads,
            smem_bytes=SMEM_BYTES,
            params=bytes(128) + struct.pack("<QQ", source, result),
            memory=memory,
            events=memory.events,
            tensor_maps={} if self.tensor is None else {GENERIC_PARAM_BASE: self.tensor(source)},
            seed=seed,
            rules=rules,
        )

    def on_device(self) -> Array:
        """The result of the first CUDA device, whose driver compiles the PTX."""
        given, result = np.ascontiguousarray(self.given), np.zeros(self.total * self.outputs, np.uint32)
        tensor = (ctypes.c_uint64 * 32)()  # its first 64-byte boundary holds a tensor map
        place = -(-ctypes.addressof(tensor) // 64) * 64
        with _Driver() as driver:
            addresses = [driver.allocate(array.nbytes) for array in (given, result)]
            driver("cuMemcpyHtoD_v2", addresses[0], given.ctypes, ctypes.c_size_t(given.nbytes))
            if self.tensor is not None:
                driver.encode(place, self.tensor(addresses[0].value or 0))
            driver.launch(self, [place, *map(ctypes.addressof, addresses)])
            driver("cuMemcpyDtoH_v2", result.ctypes, addresses[1], ctypes.c_size_t(result.nbytes))
        return self.shaped(result)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    )


class _Driver:
    """The CUDA driver, in a context of its own, which a program that fails takes along."""

    def __init__(self) -> None:
        self.library, self.context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()

    def __enter__(self) -> _Driver:
        self("cuInit", 0)
        self("cuCtxCreate_v2", ctypes.byref(self.context), 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self("cuCtxDestroy_v2", self.context)  # and what was allocated and loaded in it

    def __call__(self, name: str, *arguments: Any) -> None:
        if (status := self.library[name](*arguments)) != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()}")

    def allocate(self, size: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    def encode(self, place: int, x: TensorMap) -> None:
        rank = len(x.box)
        self(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(place),
            {1: 0, 2: 1, 4: 2}[x.element],  # uint8, uint16, uint32
            rank,
            ctypes.c_void_p(x.address),
            (ctypes.c_uint64 * rank)(*x.extents),
            (ctypes.c_uint64 * rank)(*x.strides),
            (ctypes.c_uint32 * rank)(*x.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *(0, 4 if x.atom == 32 else SPANS[x.swizzle], 0, 0),  # not interleaved; no promotion; zeros out of bounds
        )

    def launch(self, x: Handwritten, parameters: list[int]) -> None:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), x.ptx.encode())
        self("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
        self("cuFuncSetAttribute", function, 8, SMEM_BYTES)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        cluster = _Attribute(4, (ctypes.c_uint32 * 16)(x.cluster, 1, 1))  # CLUSTER_DIMENSION
        config = _Config((x.ctas, 1, 1), (x.threads, 1, 1), SMEM_BYTES, None, ctypes.pointer(cluster), 1)
        pointers = (ctypes.c_void_p * len(parameters))(*parameters)
        self("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
        self("cuCtxSynchronize")
