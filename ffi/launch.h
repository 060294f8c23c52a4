// From arguments by name to a kernel that runs.
#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "operands.h"
#include "registry.h"

namespace dsv4_fmha {

// The kernel of a call, or why there is none.
template <typename FamilyChoices>
ffi::Error LookUp(std::string_view op, const Device& device, const FamilyChoices& call, Launcher** launcher) {
  if (!device.error.empty()) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, device.error);
  *launcher = Find(op, device.arch, call);
  if (*launcher != nullptr) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(op) + ": no kernel for " + call.Text() + " on " +
                                                        device.arch + "; built: " + Built(op));
}

// Where kernels are launched.
struct Stream {
  CUstream handle;
  int ordinal;
  Device device;
};

// Loads the kernels that a call will launch; it skips nullptr.
template <size_t count>
ffi::Error Load(int ordinal, const std::array<Launcher*, count>& launchers) {
  for (Launcher* launcher : launchers) {
    if (launcher == nullptr) continue;
    const std::string error = launcher->Load(ordinal).error;
    if (!error.empty()) return ffi::Error::Internal(error);
  }
  return ffi::Error::Success();
}

// Writes 0 to an array of 4-byte elements, in the order of the stream.
inline ffi::Error Zero(void* array, size_t elements, const Stream& stream) {
  if (elements == 0) return ffi::Error::Success();
  const Driver& driver = GetDriver();
  std::string error = driver.Failure("cuMemsetD32Async", driver.MemsetD32Async(array, 0, elements, stream.handle));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

// A kernel that works in place needs its operand where its result is. XLA may have put it elsewhere in spite of the
// alias, as it does with a slice of an array.
inline ffi::Error CopyUnlessThere(const Operand& operand, const Operand& result, const Stream& stream) {
  const size_t bytes = Elements(operand.dimensions) * ffi::ByteWidth(operand.dtype);
  if (operand.data == result.data || bytes == 0) return ffi::Error::Success();
  const Driver& driver = GetDriver();
  std::string error =
      driver.Failure("cuMemcpyDtoDAsync", driver.MemcpyDtoDAsync(result.data, operand.data, bytes, stream.handle));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

// `overlaps`: the kernel may begin before the previous one has ended, and waits for that itself.
template <typename FamilyArguments>
ffi::Error Launch(Launcher* launcher, const Stream& stream, Plan<FamilyArguments>& plan, bool overlaps = false) {
  const Launcher::Loaded loaded = launcher->Load(stream.ordinal);
  if (!loaded.error.empty()) return ffi::Error::Internal(loaded.error);
  CUtensorMap maps[kMaxMaps];
  void* pointers[kMaxParams];
  int map_count = 0, count = 0;
  for (const Param& param : *launcher->layout) {
    void* value = reinterpret_cast<char*>(&plan.arguments) + param.offset;
    if (param.is_map) {
      const auto& tensor = *static_cast<const TensorArgument*>(value);
      value = &maps[map_count++];
      std::string error = Encode(tensor.map, tensor.address, static_cast<CUtensorMap*>(value));
      if (!error.empty()) return ffi::Error::Internal(error);
    }
    pointers[count++] = value;
  }
  CUlaunchAttribute attributes[2];
  unsigned attribute_count = 0;
  if (overlaps) attributes[attribute_count++] = {.id = kProgrammaticStreamSerialization, .value = {1}};
  if (launcher->cluster > 1) {
    attributes[attribute_count++] = {.id = kClusterDimension, .value = {launcher->cluster, 1, 1}};
  }
  const int32_t smem_bytes = std::max(launcher->smem_bytes, plan.least_smem_bytes);
  const CUlaunchConfig config{.grid_x = plan.grid,
                              .grid_y = 1,
                              .grid_z = 1,
                              .block_x = static_cast<unsigned>(launcher->threads),
                              .block_y = 1,
                              .block_z = 1,
                              .dynamic_smem_bytes = static_cast<unsigned>(smem_bytes),
                              .stream = stream.handle,
                              .attributes = attributes,
                              .attribute_count = attribute_count};
  const Driver& driver = GetDriver();
  std::string error =
      driver.Failure("cuLaunchKernelEx", driver.LaunchKernelEx(&config, loaded.function, pointers, nullptr));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

}  // namespace dsv4_fmha
