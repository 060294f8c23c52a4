// A stand-in for libcuda.so.1: eight devices, four of sm_90, two of sm_100 and two of sm_103, whose functions count
// their calls, check what they are given, and fail when told to. For ffi_test.cc.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "driver.h"

namespace {

constexpr int kDevices = 8, kMostKernels = 16, kOutOfMemory = 2, kInvalidValue = 1, kInvalidContext = 201;
constexpr intptr_t kContexts = 100, kLibraries = 200, kKernels = 300;  // handles count from here on

std::mutex mutex;
std::map<std::string, int> calls, failures;  // for each function: how often it was called, and how often it must fail
std::map<const void*, int> smem_limits;      // bytes of a kernel
thread_local int pushed = 0;                 // contexts on this thread's stack

int Call(const char* name, bool valid = true) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    ++calls[name];
    if (int& left = failures[name]; left > 0) {
      --left;
      return kOutOfMemory;
    }
  }
  return valid ? 0 : kInvalidValue;
}

template <typename T>
T Handle(intptr_t value) {
  return reinterpret_cast<T>(value);
}

bool Is(const void* handle, intptr_t first, int count) {
  const auto value = reinterpret_cast<intptr_t>(handle);
  return first <= value && value < first + count;
}

}  // namespace

extern "C" {

void stand_in_fail(const char* name, int times) {
  std::lock_guard<std::mutex> lock(mutex);
  failures[name] = times;
}

int stand_in_calls(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  return calls[name];
}

int stand_in_pushed() { return pushed; }

int cuInit(unsigned) { return Call("cuInit"); }

int cuGetErrorName(int result, const char** name) {
  *name = result == kOutOfMemory    ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE"
                                    : nullptr;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return Call("cuDeviceGet", 0 <= ordinal && ordinal < kDevices);
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 16 ? 132 : attribute == 75 ? (device < 4 ? 9 : 10) : device < 6 ? 0 : 3;
  return Call("cuDeviceGetAttribute");
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = Handle<void*>(kContexts + device);
  return Call("cuDevicePrimaryCtxRetain");
}

int cuCtxPushCurrent_v2(void* context) {
  const int result = Call("cuCtxPushCurrent", Is(context, kContexts, kDevices));
  pushed += result == 0;
  return result;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = nullptr;
  --pushed;
  return Call("cuCtxPopCurrent", pushed >= 0);
}

int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  std::this_thread::sleep_for(std::chrono::milliseconds(2));                          // long enough for others to come
  *library = Handle<void*>(kLibraries + static_cast<const unsigned char*>(code)[0]);  // a cubin here is its number
  return Call("cuLibraryLoadData");
}

int cuLibraryGetKernel(void** kernel, void* library, const char* symbol) {
  *kernel = Handle<void*>(kKernels + (reinterpret_cast<intptr_t>(library) - kLibraries));
  return Call("cuLibraryGetKernel", Is(library, kLibraries, kMostKernels) && std::strncmp(symbol, "kernel_", 7) == 0);
}

int cuKernelSetAttribute(int attribute, int value, void* kernel, int) {
  if (attribute == dsv4_fmha::kMaxDynamicSharedMemory) {
    std::lock_guard<std::mutex> lock(mutex);
    smem_limits[kernel] = value;
  }
  return Call("cuKernelSetAttribute", Is(kernel, kKernels, kMostKernels));
}

int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  if (pushed != 1) return kInvalidContext;
  return Call("cuKernelGetFunction", Is(kernel, kKernels, kMostKernels));
}

int cuOccupancyMaxActiveClusters(int* clusters, void* function, const dsv4_fmha::CUlaunchConfig* config) {
  *clusters = 14;
  const bool has_size = config->attribute_count == 1 && config->attributes[0].id == dsv4_fmha::kClusterDimension;
  return Call("cuOccupancyMaxActiveClusters", Is(function, kKernels, kMostKernels) && pushed == 1 && has_size);
}

int cuTensorMapEncodeTiled(void* map, int, uint32_t rank, void* address, const uint64_t*, const uint64_t*,
                           const uint32_t*, const uint32_t*, int, int, int, int) {
  std::memset(map, 0, 128);
  return Call("cuTensorMapEncodeTiled", rank >= 3 && reinterpret_cast<uintptr_t>(address) % 16 == 0);
}

int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void*) {
  return Call("cuMemcpyDtoDAsync", to != nullptr && from != nullptr && to != from && bytes > 0);
}

int cuMemAlloc_v2(void** memory, size_t bytes) {
  const int result = Call("cuMemAlloc", bytes > 0 && pushed == 1);
  if (result == 0) *memory = std::malloc(bytes);
  return result;
}

int cuMemFree_v2(void* memory) {
  std::free(memory);
  return Call("cuMemFree", pushed == 1);
}

int cuMemsetD32_v2(void* memory, unsigned value, size_t elements) {
  std::fill_n(static_cast<unsigned*>(memory), elements, value);
  return Call("cuMemsetD32", pushed == 1);
}

int cuMemcpyHtoD_v2(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return Call("cuMemcpyHtoD", pushed == 1);
}

int cuDeviceGetCount(int* count) {
  *count = kDevices;
  return Call("cuDeviceGetCount");
}

int cuDeviceCanAccessPeer(int* can, int from, int to) {
  *can = from != to;
  return Call("cuDeviceCanAccessPeer");
}

int cuCtxEnablePeerAccess(void* context, unsigned flags) {  // twice is an error, which says so
  constexpr int kAlreadyEnabled = 704;
  const int result = Call("cuCtxEnablePeerAccess", Is(context, kContexts, kDevices) && flags == 0 && pushed == 1);
  return result == 0 && stand_in_calls("cuCtxEnablePeerAccess") > 2 ? kAlreadyEnabled : result;
}

int cuMemsetD32Async(void* array, unsigned, size_t elements, void*) {
  return Call("cuMemsetD32Async", array != nullptr && elements > 0);
}

int cuLaunchKernelEx(const dsv4_fmha::CUlaunchConfig* config, void* function, void** parameters, void**) {
  // the stream on which a test launches is the device's number
  bool valid = Is(function, kKernels, kMostKernels) && parameters[0] != nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    valid = valid && config->dynamic_smem_bytes <= static_cast<unsigned>(smem_limits[function]);
  }
  const std::string name = "cuLaunchKernelEx " + std::to_string(reinterpret_cast<intptr_t>(function) - kKernels);
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id == dsv4_fmha::kProgrammaticStreamSerialization) Call((name + " early").c_str());
  }
  return Call(name.c_str()) | Call("cuLaunchKernelEx", valid);
}

}  // extern "C"
