// The CUDA driver, found at run time: no CUDA headers, no cudart, and nothing to link against.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "once.h"

namespace dsv4_fmha {

// The driver's ABI, as cuda.h declares it.
using CUresult = int;  // 0 is success
using CUdevice = int;
using CUstream = struct CUstream_st*;
using CUcontext = struct CUctx_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;
struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
struct CUlaunchAttribute {
  int id;
  alignas(8) int value[16];
};
static_assert(sizeof(CUlaunchAttribute) == 72);
struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, dynamic_smem_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(CUlaunchConfig) == 56);

enum DeviceAttribute { kMultiprocessorCount = 16, kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76 };
enum KernelAttribute { kMaxDynamicSharedMemory = 8, kPreferredSharedMemoryCarveout = 9 };
enum LaunchAttribute { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };
enum TensorMapDataType : uint32_t { kUInt8 = 0, kFloat16 = 6, kFloat32 = 7, kBFloat16 = 9 };
enum TensorMapSwizzle : uint32_t { kNoSwizzle = 0, kSwizzle128B = 3 };
enum TensorMapOption { kNoInterleave = 0, kPromoteL2To256B = 3, kZeroFill = 0 };

struct Driver {
  CUresult (*Init)(unsigned);
  CUresult (*GetErrorName)(CUresult, const char**);
  CUresult (*DeviceGet)(CUdevice*, int);
  CUresult (*DeviceGetAttribute)(int*, int, CUdevice);
  CUresult (*DevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*CtxPushCurrent)(CUcontext);
  CUresult (*CtxPopCurrent)(CUcontext*);
  CUresult (*LibraryLoadData)(CUlibrary*, const void*, void*, void*, unsigned, void*, void*, unsigned);
  CUresult (*LibraryGetKernel)(CUkernel*, CUlibrary, const char*);
  CUresult (*KernelSetAttribute)(int, int, CUkernel, CUdevice);
  CUresult (*KernelGetFunction)(CUfunction*, CUkernel);
  CUresult (*TensorMapEncodeTiled)(CUtensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                                   const uint32_t*, const uint32_t*, int, int, int, int);
  CUresult (*LaunchKernelEx)(const CUlaunchConfig*, CUfunction, void**, void**);
  CUresult (*OccupancyMaxActiveClusters)(int*, CUfunction, const CUlaunchConfig*);
  CUresult (*MemsetD32Async)(void*, unsigned, size_t, CUstream);
  CUresult (*MemcpyDtoDAsync)(void*, const void*, size_t, CUstream);
  CUresult (*MemAlloc)(void**, size_t);
  CUresult (*MemFree)(void*);
  CUresult (*MemsetD32)(void*, unsigned, size_t);
  CUresult (*MemcpyHtoD)(void*, const void*, size_t);
  CUresult (*DeviceGetCount)(int*);
  CUresult (*DeviceCanAccessPeer)(int*, CUdevice, CUdevice);
  CUresult (*CtxEnablePeerAccess)(CUcontext, unsigned);

  // Why the driver cannot be used; empty when it can.
  std::string Load() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) return std::string("the CUDA driver cannot be loaded: ") + dlerror();
    std::string missing;
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr && missing.empty()) {
        missing = std::string("the CUDA driver is too old (12.0 or later is needed): it lacks ") + name;
      }
    };
    find(Init, "cuInit");
    find(GetErrorName, "cuGetErrorName");
    find(DeviceGet, "cuDeviceGet");
    find(DeviceGetAttribute, "cuDeviceGetAttribute");
    find(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(CtxPushCurrent, "cuCtxPushCurrent_v2");
    find(CtxPopCurrent, "cuCtxPopCurrent_v2");
    find(LibraryLoadData, "cuLibraryLoadData");
    find(LibraryGetKernel, "cuLibraryGetKernel");
    find(KernelSetAttribute, "cuKernelSetAttribute");
    find(KernelGetFunction, "cuKernelGetFunction");
    find(TensorMapEncodeTiled, "cuTensorMapEncodeTiled");
    find(LaunchKernelEx, "cuLaunchKernelEx");
    find(OccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters");
    find(MemsetD32Async, "cuMemsetD32Async");
    find(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
    find(MemAlloc, "cuMemAlloc_v2");
    find(MemFree, "cuMemFree_v2");
    find(MemsetD32, "cuMemsetD32_v2");
    find(MemcpyHtoD, "cuMemcpyHtoD_v2");
    find(DeviceGetCount, "cuDeviceGetCount");
    find(DeviceCanAccessPeer, "cuDeviceCanAccessPeer");
    find(CtxEnablePeerAccess, "cuCtxEnablePeerAccess");
    return missing.empty() ? Failure("cuInit", Init(0)) : missing;
  }

  // The message about `result`: empty on success.
  std::string Failure(const char* function, CUresult result) const {
    if (result == 0) return "";
    const char* name = nullptr;
    GetErrorName(result, &name);
    return std::string(function) + ": " + (name != nullptr ? name : std::to_string(result));
  }
};

inline Once<Driver>& TheDriver() {
  static Once<Driver> driver;
  return driver;
}

// Why there is no driver; empty when there is one.
inline std::string LoadDriver() {
  return TheDriver().Get([](Driver& driver) { return driver.Load(); });
}

// Only after `LoadDriver` has succeeded, which `GetDevice` calls.
inline const Driver& GetDriver() { return *TheDriver(); }

}  // namespace dsv4_fmha
