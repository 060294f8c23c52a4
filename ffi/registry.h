// Op, architecture and choices -> Launcher: the variants that this library holds, each loaded once per device.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "abi.h"
#include "driver.h"
#include "once.h"
#include "rows.h"

// Places a file's bytes into the read-only data of this library.
#define DSV4_FMHA_EMBED(name, path)                                                                   \
  asm(".pushsection .rodata,\"a\",@progbits\n.balign 64\n.globl " #name "\n.hidden " #name "\n" #name \
      ":\n"                                                                                           \
      ".incbin \"" path "\"\n.byte 0\n.popsection\n");                                                \
  extern "C" __attribute__((visibility("hidden"))) const unsigned char name[];

namespace dsv4_fmha {

constexpr int kMaxDevices = 64;

// The properties of a device that matter to a launch.
struct Device {
  std::string error{};  // why the rest is not known; else empty
  std::string arch{};   // "sm_90a"
  int processors = 0;
};

// What kernels for a compute capability are compiled for, as `architecture` of _host/split_kv.py has it.
inline std::string Architecture(int major, int minor) {
  if (major >= 10) return "sm_" + std::to_string(major) + "0f";  // a family
  return "sm_" + std::to_string(major) + std::to_string(minor) + (major == 9 ? "a" : "");
}

inline Device GetDevice(int ordinal) {
  static std::array<Once<Device>, kMaxDevices> devices;
  if (ordinal < 0 || ordinal >= kMaxDevices) {
    return {.error = "the device is beyond the " + std::to_string(kMaxDevices) + " that are served"};
  }
  std::string error = devices[ordinal].Get([&](Device& device) {
    if (std::string missing = LoadDriver(); !missing.empty()) return missing;
    const Driver& driver = GetDriver();
    std::string error;
    CUdevice id;
    int major = 0, minor = 0;
    auto step = [&](const char* function, auto call) {
      if (error.empty()) error = driver.Failure(function, call());
    };
    auto ask = [&](DeviceAttribute attribute, int* value) {
      step("cuDeviceGetAttribute", [&] { return driver.DeviceGetAttribute(value, attribute, id); });
    };
    step("cuDeviceGet", [&] { return driver.DeviceGet(&id, ordinal); });
    ask(kComputeCapabilityMajor, &major);
    ask(kComputeCapabilityMinor, &minor);
    ask(kMultiprocessorCount, &device.processors);
    device.arch = Architecture(major, minor);
    return error;
  });
  return error.empty() ? *devices[ordinal] : Device{.error = error};
}

// One variant.  Constant except for what `Load` makes once; safe to share between threads.
struct Launcher {
  std::string_view op, arch;
  Choices choices;
  const Layout* layout;
  const char* name;
  const char* symbol;
  const unsigned char* cubin;
  size_t cubin_bytes;
  int32_t threads, smem_bytes, tile_m, tile_n;
  int32_t ctas;     // CTAs that a processor runs at a time
  int32_t cluster;  // CTAs of a cluster
  bool splits;      // whether the keys of a tile of rows may be split over CTAs

  Tiles TilesOn(const Device& device) const {
    return {.tile_m = tile_m,
            .tile_n = tile_n,
            .processors = device.processors * ctas,
            .cluster = cluster,
            .gathers = layout->gathers};
  }

  struct Loaded {
    std::string error{};
    CUfunction function = nullptr;
    int clusters = 0;  // that the device runs at a time; 0 where CTAs run alone
  };
  Once<CUlibrary> library{};  // stays loaded as long as the process runs
  Once<CUkernel> kernel{};
  std::array<Once<Loaded>, kMaxDevices> functions{};

  // The function to launch on `device`, which `GetDevice` knows, ready to run: the driver has nothing left to load
  // during a launch.
  Loaded Load(int device) {
    const Driver& driver = GetDriver();
    std::string error = functions[device].Get([&](Loaded& loaded) {
      std::string error = library.Get([&](CUlibrary& library) {
        return driver.Failure("cuLibraryLoadData",
                              driver.LibraryLoadData(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0));
      });
      auto step = [&](const char* name, auto call) {
        if (error.empty()) error = driver.Failure(name, call());
      };
      if (!error.empty()) return error;
      error = kernel.Get([&](CUkernel& kernel) {
        return driver.Failure("cuLibraryGetKernel", driver.LibraryGetKernel(&kernel, *library, symbol));
      });
      CUdevice id;
      CUcontext context;
      step("cuDeviceGet", [&] { return driver.DeviceGet(&id, device); });
      step("cuDevicePrimaryCtxRetain", [&] { return driver.DevicePrimaryCtxRetain(&context, id); });
      const int32_t smem = std::max(smem_bytes, kSpreadSmemBytes);
      step("cuKernelSetAttribute",
           [&] { return driver.KernelSetAttribute(kMaxDynamicSharedMemory, smem, *kernel, id); });
      // A processor shares out its memory anew, between shared memory and a cache, only while it runs nothing. So
      // kernels run beside others only where all want the same share.
      step("cuKernelSetAttribute",
           [&] { return driver.KernelSetAttribute(kPreferredSharedMemoryCarveout, 100, *kernel, id); });
      step("cuCtxPushCurrent", [&] { return driver.CtxPushCurrent(context); });
      if (!error.empty()) return error;
      step("cuKernelGetFunction", [&] { return driver.KernelGetFunction(&loaded.function, *kernel); });
      if (cluster > 1) {
        CUlaunchAttribute size{.id = kClusterDimension, .value = {cluster, 1, 1}};
        const CUlaunchConfig config{.grid_x = static_cast<unsigned>(cluster),
                                    .grid_y = 1,
                                    .grid_z = 1,
                                    .block_x = static_cast<unsigned>(threads),
                                    .block_y = 1,
                                    .block_z = 1,
                                    .dynamic_smem_bytes = static_cast<unsigned>(smem_bytes),
                                    .stream = nullptr,
                                    .attributes = &size,
                                    .attribute_count = 1};
        step("cuOccupancyMaxActiveClusters",
             [&] { return driver.OccupancyMaxActiveClusters(&loaded.clusters, loaded.function, &config); });
      }
      driver.CtxPopCurrent(&context);
      return error;
    });
    return error.empty() ? *functions[device] : Loaded{.error = error};
  }
};

struct LauncherTable {
  Launcher* first;
  size_t count;
  Launcher* begin() const { return first; }
  Launcher* end() const { return first + count; }
};

// Both are in cubins.cc, which kernels/tables.py generates.
LauncherTable Launchers();
const char* Manifest();

// The keys of the variants that are built for `op`.
inline std::string Built(std::string_view op) {
  std::string list;
  for (const Launcher& launcher : Launchers()) {
    if (launcher.op != op) continue;
    if (!list.empty()) list += ", ";
    list += launcher.name;
  }
  return list.empty() ? "nothing (this package was built without CUDA kernels)" : list;
}

// Among the variants of an op that take a call, the one with the lowest limit.
template <typename FamilyChoices>
Launcher* Find(std::string_view op, std::string_view arch, const FamilyChoices& call) {
  Launcher* found = nullptr;
  const FamilyChoices* tightest = nullptr;
  for (Launcher& launcher : Launchers()) {
    if (launcher.op != op || launcher.arch != arch) continue;
    const auto* choices = std::get_if<FamilyChoices>(&launcher.choices);
    if (choices == nullptr || !choices->Takes(call)) continue;
    if (found == nullptr || choices->IsTighterThan(*tightest)) found = &launcher, tightest = choices;
  }
  return found;
}

}  // namespace dsv4_fmha
