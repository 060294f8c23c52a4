// TMA descriptors: the contents of a tensor map, and its encoding by the driver.
#pragma once

#include <cstdint>
#include <string>

#include "driver.h"

namespace dsv4_fmha {

// Zeros out of bounds.  Modes are listed fastest first.
struct TensorMapSpec {
  uint32_t rank;
  uint32_t type;        // a TensorMapDataType
  uint32_t swizzle;     // a TensorMapSwizzle
  uint32_t box[5];      // elements
  uint64_t extents[5];  // elements
  uint64_t strides[4];  // bytes, of modes 1 .. rank - 1
};

// Empty on success, else the driver's error.
inline std::string Encode(const TensorMapSpec& spec, void* data, CUtensorMap* map) {
  static constexpr uint32_t kElementStrides[5] = {1, 1, 1, 1, 1};
  const Driver& driver = GetDriver();
  return driver.Failure("cuTensorMapEncodeTiled",
                        driver.TensorMapEncodeTiled(map, static_cast<int>(spec.type), spec.rank, data, spec.extents,
                                                    spec.strides, spec.box, kElementStrides, kNoInterleave,
                                                    static_cast<int>(spec.swizzle), kPromoteL2To256B, kZeroFill));
}

}  // namespace dsv4_fmha
