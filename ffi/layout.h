// What a kernel receives: arguments by name, and the order in which it takes them.  abi.h, generated from
// kernels/abi, has the arguments of each family of kernels and their orders.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "tensor_map.h"
#include "xla/ffi/api/ffi.h"

namespace dsv4_fmha {

// How keys are packed: the bytes of an entry, and what the size of a page is a multiple of.
struct Packing {
  const char* name;
  int64_t entry, multiple;
};

// How both pools of an op are packed: a value of its choice `packing`.
struct PackedSources {
  std::string_view name;
  Packing sources[2];
};

namespace ffi = xla::ffi;

// An array that kernels receive as a tensor map and the extents that are not constant, as an address, or as both.
struct TensorArgument {
  TensorMapSpec map;
  int32_t extents[4];
  void* address;
};

// One parameter, and where it is among the arguments: a value, or the TensorArgument that a map is made of.
struct Param {
  const char* name;
  uint32_t bytes;
  size_t offset;
  bool is_map;
};

struct Layout {
  const char* name;
  const Param* params;
  int count;
  bool gathers;  // keys differ from query to query: a tile of rows has one query's heads, and all keys are gathered

  const Param* begin() const { return params; }
  const Param* end() const { return params + count; }
};

// The most shared memory that a plan asks for: of CTAs that have so much, a processor takes four.
constexpr int32_t kSpreadSmemBytes = 48 << 10;

// One planned launch: how many CTAs, and what its kernel receives.
template <typename FamilyArguments>
struct Plan {
  uint32_t grid;
  FamilyArguments arguments;
  int32_t least_smem_bytes = 0;  // of shared memory, also where the kernel uses less
};

inline std::string Show(int64_t x) { return std::to_string(x); }

inline std::string Show(bool x) { return x ? "true" : "false"; }

inline std::string Show(std::string_view x) { return std::string(x); }

inline std::string Show(ffi::DataType dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

}  // namespace dsv4_fmha
