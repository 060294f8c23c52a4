// Stands in for the CUDA functions that the host code of a CuTe DSL function calls, and records every launch.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kLaunches = 64, kParams = 256, kKernels = 64, kName = 1024 };
enum { kClusterDimension = 4, kMultiProcessors = 16, kMajor = 75, kMinor = 76 };  // attributes of a launch, of a device
enum { kNotSupported = 801 };

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

// What is recorded; `params` are copies of as many bytes as `kernels` says.
typedef struct {
  const char* kernel;
  unsigned grid[3], block[3], cluster[3];
  size_t smem_bytes;
  void* params[kParams];
} Launch;

typedef struct {
  char name[kName];
  int param_count, param_sizes[kParams];
} Kernel;

// Set by the caller before anything runs.
Kernel kernels[kKernels];
int kernel_count, processor_count = 148, capability = 100;

Launch launches[kLaunches];
int launch_count;
const char* failure;  // the first thing that this stand-in does not know

static int Fail(const char* what) {
  if (!failure) failure = what;
  return kNotSupported;
}

int _cudaLibraryLoadData(void** library, const void* image) {
  *library = (void*)image;
  return 0;
}

int _cudaLibraryUnload(void* library) {
  (void)library;
  return 0;
}

int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  (void)library;
  for (int i = 0; i < kernel_count; ++i) {
    if (!strcmp(kernels[i].name, name)) {
      *kernel = &kernels[i];
      return 0;
    }
  }
  return Fail("a kernel that the PTX does not have");
}

int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  *value = 1024;  // threads that a CTA may have
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
  (void)device;
  switch (attribute) {
    case kMultiProcessors: *value = processor_count; break;
    case kMajor: *value = capability / 10; break;
    case kMinor: *value = capability % 10; break;
    default: *value = 232448;  // the shared memory that a block may opt in to
  }
  return 0;
}

int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int _cudaMemsetAsync(void* data, int value, size_t size, void* stream) {
  (void)stream;
  memset(data, value, size);
  return 0;
}

int _cudaLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments) {
  if (launch_count == kLaunches) return Fail("too many launches");
  const Kernel* k = kernel;
  Launch* l = &launches[launch_count++];
  l->kernel = k->name;
  memcpy(l->grid, config->grid, sizeof l->grid);
  memcpy(l->block, config->block, sizeof l->block);
  l->smem_bytes = config->smem_bytes;
  for (int i = 0; i < 3; ++i) l->cluster[i] = 1;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id == kClusterDimension) memcpy(l->cluster, config->attributes[i].value, sizeof l->cluster);
  }
  for (int i = 0; i < k->param_count; ++i) {
    l->params[i] = malloc(k->param_sizes[i]);
    memcpy(l->params[i], arguments[i], k->param_sizes[i]);
  }
  return 0;
}

// As the DSL's own host code encodes one; interpreter/machine/copies.py decodes it.
int _cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* extents,
                            const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                            int swizzle, int promotion, int fill) {
  static const unsigned kTypes[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10};  // of the driver's numbers
  enum { kAtom32 = 4 };                                              // the last swizzle that is known
  if (type < 0 || type >= (int)(sizeof kTypes / sizeof *kTypes) || interleave || fill || swizzle > kAtom32) {
    return Fail("a tensor map that is interleaved, filled with NaN, or of another type or swizzle");
  }
  unsigned char* m = map;
  memset(m, 0, 128);
  const uint64_t start = (uint64_t)address;
  const unsigned span = swizzle == kAtom32 ? 3 : (unsigned)swizzle;
  const unsigned flags = 1u << 1 | 1u << 18 | (rank - 1) << 4 | kTypes[type] << 7 | span << 13 |
                         (swizzle == kAtom32 ? 1u << 19 : 0) | (unsigned)promotion << 21;
  memcpy(m, &start, sizeof start);
  memcpy(m + 8, &flags, sizeof flags);
  for (unsigned i = 0; i < rank; ++i) {
    if (steps[i] != 1) return Fail("a tensor map that skips elements");
    const unsigned last = (unsigned)(extents[i] - 1);
    memcpy(m + 32 + 4 * i, &last, sizeof last);
    m[55 + i] = (unsigned char)(box[i] - 1);
    if (i) {
      const uint64_t stride = strides[i - 1] / 16;
      const unsigned low = (unsigned)stride, high = (unsigned)(stride >> 32);
      memcpy(m + 12 + 4 * (i - 1), &low, sizeof low);
      m[28 + (i - 1) / 2] |= (unsigned char)((high & 15) << 4 * ((i - 1) % 2));
    }
  }
  return 0;
}

void cuda_dialect_assert_success(int status) {
  if (status) Fail("a call that failed");
}
