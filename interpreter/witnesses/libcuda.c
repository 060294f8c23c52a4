// A stand-in for libcuda.so.1, for host code that JAX's Mosaic GPU compiles: it loads nothing, and records launches.
#include "../cute/recorder.c"

typedef struct {
  unsigned grid[3], block[3], smem_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
} DriverLaunchConfig;

int cuInit(unsigned flags) { return flags ? Fail("flags of cuInit") : 0; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuCtxGetDevice(int* device) { return _cudaGetDevice(device); }

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return _cudaDeviceGetAttribute(value, attribute, device);
}

int cuGetErrorString(int error, const char** text) {
  (void)error;
  *text = failure ? failure : "nothing that the stand-in knows";
  return 0;
}

int cuModuleLoadData(void** module, const void* image) { return _cudaLibraryLoadData(module, image); }

int cuModuleUnload(void* module) { return _cudaLibraryUnload(module); }

// Makes the kernel known. The caller says what parameters it has before it is launched.
int cuModuleGetFunction(void** kernel, void* module, const char* name) {
  if (kernel_count == kKernels || strlen(name) >= kName) return Fail("too many kernels, or too long a name");
  strcpy(kernels[kernel_count++].name, name);
  return _cudaLibraryGetKernel(kernel, module, name);
}

int cuFuncSetAttribute(void* kernel, int attribute, int value) {
  return _cudaFuncSetAttribute(kernel, attribute, value);
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* extents,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  return _cuTensorMapEncodeTiled(map, type, rank, address, extents, strides, box, steps, interleave, swizzle, promotion,
                                 fill);
}

int cuLaunchKernelEx(const DriverLaunchConfig* config, void* kernel, void** arguments, void** extra) {
  if (extra) return Fail("a launch with extra arguments");
  LaunchConfig made = {{0}, {0}, config->smem_bytes, config->stream, config->attributes, config->attribute_count};
  memcpy(made.grid, config->grid, sizeof made.grid);
  memcpy(made.block, config->block, sizeof made.block);
  return _cudaLaunchKernelEx(&made, kernel, arguments);
}
