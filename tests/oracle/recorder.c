// Stands in for the eight CUDA functions that an exported CuTe DSL host stub calls, and records what it launches.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { kParams = 64, kParamBytes = 128, kClusterDimension = 4 };

typedef struct {
  int id, padding;
  unsigned value[16];
} LaunchAttribute;

typedef struct {
  unsigned grid[3], block[3];
  size_t smem_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
} LaunchConfig;

// Set by the test before a launch: how many parameters the kernel has, and their sizes.
int param_count;
int param_sizes[kParams];

LaunchConfig launched;
unsigned cluster[3];
unsigned char params[kParams][kParamBytes];
char kernel_name[256];
int launches;

int _cudaLibraryLoadData(void** library, const void* image) {
  *library = (void*)image;
  return 0;
}

int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  (void)library;
  strncpy(kernel_name, name, sizeof kernel_name - 1);
  *kernel = kernel_name;
  return 0;
}

int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  *value = 1024;
  return 0;
}

int _cudaFuncSetAttribute(void* kernel, int attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return 0;
}

int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  return 0;
}

int _cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)attribute, (void)device;
  *value = 232448;  // the shared memory that a block may opt in to
  return 0;
}

int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int _cudaLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments) {
  (void)kernel;
  launched = *config;
  for (int i = 0; i < 3; ++i) cluster[i] = 1;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id == kClusterDimension) memcpy(cluster, config->attributes[i].value, sizeof cluster);
  }
  for (int i = 0; i < param_count; ++i) memcpy(params[i], arguments[i], param_sizes[i]);
  ++launches;
  return 0;
}
