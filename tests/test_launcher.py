"""Launch a cubin by the driver alone, without XLA: tells a kernel's fault from the custom call's."""

import ctypes
import itertools

import numpy as np
import pytest
from native import FwdShape, TensorMapSpec, assert_right, cubin, fwd_operands, plan_fwd

from jax_dsv4_fmha import _ffi

driver = pytest.importorskip("cuda.bindings.driver")
pytestmark = pytest.mark.gpu


def call(function, *arguments):
    error, *results = function(*arguments)
    assert error == driver.CUresult.CUDA_SUCCESS, (function.__name__, error)
    return results[0] if len(results) == 1 else results


@pytest.fixture(scope="module")
def device():
    try:
        call(driver.cuInit, 0)
    except RuntimeError as error:
        pytest.skip(f"needs a CUDA driver: {error}")
    device = call(driver.cuDeviceGet, 0)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, device))
    yield device
    call(driver.cuDevicePrimaryCtxRelease, device)


def upload(array) -> int:
    address = call(driver.cuMemAlloc, max(array.nbytes, 1))
    call(driver.cuMemcpyHtoD, address, array.ctypes.data, array.nbytes)
    return int(address)


def download(address: int, shape, dtype):
    array = np.empty(shape, dtype)
    call(driver.cuMemcpyDtoH, array.ctypes.data, address, array.nbytes)
    return array


def encode(spec: TensorMapSpec, dtype: str, address: int) -> bytes:
    rank, types = spec.rank, driver.CUtensorMapDataType
    tensor_map = call(
        driver.cuTensorMapEncodeTiled,
        {"bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16}[dtype],
        rank,
        address,
        [driver.cuuint64_t(x) for x in spec.extents[:rank]],
        [driver.cuuint64_t(x) for x in spec.strides[: rank - 1]],
        [driver.cuuint32_t(x) for x in spec.box[:rank]],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(tensor_map.getPtr(), 128)


@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize("row", _ffi.manifest()["variants"], ids=lambda row: row["key"])
def test_launch(row, h_kv, device):
    attribute = driver.CUdevice_attribute
    major = call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    if (arch := _ffi._architecture(f"{major}.{minor}")) != row["arch"]:
        pytest.skip(f"device 0 is {arch}")
    shape = FwdShape(2, 70, 150, 8, h_kv, row["d"])
    scale = shape.d**-0.5
    q, k, v, start, stop, sink = fwd_operands(shape, row["dtype"])

    addresses = {"q": upload(q), "k": upload(k), "v": upload(v), "o": upload(np.full_like(q, np.nan))}
    lse = np.full(q.shape[:-1], np.nan, np.float32)
    pointers = {"start": upload(start), "stop": upload(stop), "sink": upload(sink), "lse": upload(lse)}
    tiles = {name: row[name] for name in ("tile_m", "tile_n", "shared_kv")}
    plan = plan_fwd(shape, scale, **tiles, **pointers)
    tensors = [("q", plan.rows), ("o", plan.rows), ("k", plan.keys), ("v", plan.keys)]
    maps = [encode(spec, row["dtype"], addresses[name]) for name, spec in tensors[: 3 if row["shared_kv"] else 4]]
    ordered = iter(maps)
    blobs = [next(ordered) if len(blob) == 128 else blob for blob in plan.params]
    buffers = [ctypes.create_string_buffer(blob, len(blob)) for blob in blobs]
    params = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))

    module = call(driver.cuModuleLoadData, cubin(row["key"]))
    function = call(driver.cuModuleGetFunction, module, row["symbol"].encode())
    smem = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call(driver.cuFuncSetAttribute, function, smem, row["smem_bytes"])
    grid_and_block = (plan.grid, 1, 1, row["threads"], 1, 1)
    call(driver.cuLaunchKernel, function, *grid_and_block, row["smem_bytes"], 0, ctypes.addressof(params), 0)
    call(driver.cuCtxSynchronize)

    o, lse = download(addresses["o"], q.shape, q.dtype), download(pointers["lse"], lse.shape, lse.dtype)
    for address in itertools.chain(addresses.values(), pointers.values()):
        call(driver.cuMemFree, address)
    call(driver.cuModuleUnload, module)
    assert_right((o, lse), q, k, None if row["shared_kv"] else v, start, stop, sink, scale)
