"""Launches a cubin by the driver alone, without XLA, to tell a kernel's fault from the custom call's."""

import ctypes

import numpy as np
import pytest

from interpreter.kernels.attention import operands
from interpreter.kernels.launch import outputs_of
from interpreter.kernels.native import cubin, plan, variant_of
from jax_dsv4_fmha._host import library, split_kv
from tests.hopper_e4m3 import assert_right

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


def encode(spec: ctypes.Structure, address: int) -> bytes:
    rank = spec.rank
    tensor_map = call(
        driver.cuTensorMapEncodeTiled,
        driver.CUtensorMapDataType(spec.type),
        rank,
        address,
        [driver.cuuint64_t(x) for x in spec.extents[:rank]],
        [driver.cuuint64_t(x) for x in spec.strides[: rank - 1]],
        [driver.cuuint32_t(x) for x in spec.box[:rank]],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(spec.swizzle),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(tensor_map.getPtr(), 128)


def cluster_of(ctas: int):
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = ctas, 1, 1
    return attribute


CASES = [
    (row, h_q, extents)
    for row in library.manifest()["variants"]
    if row["family"] == "forward"
    for h_q, extents in (
        (8, {}),
        (128, {"s_q": 9}),
        (5, {"s_q": 2, "b": 1, "topk": 3}),
        *([(8, {"h_kv": 2})] if row["op"] in ("mha_fwd", "mla_span_fwd") else []),
    )
]


@pytest.mark.parametrize(
    ("row", "h_q", "extents"),
    CASES,
    ids=lambda x: x if isinstance(x, int) else x.get("key", "-".join(f"{k}{v}" for k, v in x.items())),
)
def test_launch(row, h_q, extents, device):
    attribute = driver.CUdevice_attribute
    major = call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    if (arch := split_kv.architecture(f"{major}.{minor}")) != row["arch"]:
        pytest.skip(f"device 0 is {arch}")
    variant = variant_of(row["key"])
    x, scale = operands(variant, **extents, h_q=min(h_q, variant.max_heads)), variant.d**-0.5
    if x.mode.is_e4m3:  # keys are up to 2**12 times as great as q
        scale *= 2.0**-9
    results = {name: np.full(like.shape, np.nan, like.dtype) for name, like in outputs_of(x).items()}
    arrays = x.named() | results
    addresses = {name: upload(array) for name, array in arrays.items()}

    tiles = {name: row[name] for name in ("tile_m", "tile_n", "cluster")}
    launch = plan(variant, x.shape, scale, **tiles, processors=7, addresses=addresses)
    blobs = [
        encode(launch.maps[name], launch[name]) if name in launch.maps else blob for name, blob in launch.params.items()
    ]
    buffers = [ctypes.create_string_buffer(blob, len(blob)) for blob in blobs]
    params = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))

    module = call(driver.cuModuleLoadData, cubin(row["key"]))
    function = call(driver.cuModuleGetFunction, module, row["symbol"].encode())
    smem = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call(driver.cuFuncSetAttribute, function, smem, row["smem_bytes"])
    config = driver.CUlaunchConfig()
    config.gridDimX, config.blockDimX, config.sharedMemBytes = launch.grid, row["threads"], row["smem_bytes"]
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.attrs, config.numAttrs = [cluster_of(row["cluster"])], 1
    call(driver.cuLaunchKernelEx, config, function, ctypes.addressof(params), 0)
    call(driver.cuCtxSynchronize)

    got = tuple(download(addresses[name], like.shape, like.dtype) for name, like in results.items())
    for address in addresses.values():
        call(driver.cuMemFree, address)
    call(driver.cuModuleUnload, module)
    assert_right(got, x, scale)
