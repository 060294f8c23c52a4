// The call that writes matrices in FP8 as arrays in bfloat16.
#pragma once

#include "target.h"
#include "unpack_matrix_plan.h"

namespace dsv4_fmha {

struct UnpackMatrix {
  using Call = UnpackMatrixCall;
  using Shape = UnpackMatrixShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.matrices = n.m,
              .rows = n.rows,
              .columns = n.columns,
              .tiles = n.tiles_of_w,
              .slabs = n.slabs_of_w,
              .slab_bytes = n.slab_bytes};
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape*, Kernels* kernels) {
    return LookUp(call.target->name, device, UnpackMatrixChoices{}, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckUnpackMatrixShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<UnpackMatrixAddresses>(call);
    const Launcher& kernel = *kernels.front();
    auto plan = PlanUnpackMatrix(shape, kernel.tile_m, kernel.tile_n, at);
    return Launch(kernels.front(), stream, plan, /*overlaps=*/true);
  }
};

}  // namespace dsv4_fmha
