// The calls of RoPE: in place, where y is where x is, alone or before the Hadamard transform; before that and
// quantization; after the norm of rows; and the gradient of both.
#pragma once

#include "rope_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct Rope {
  using Call = RopeCall;
  using Shape = RopeShape;
  using Kernels = std::array<Launcher*, 1>;

  static bool Quantizes(const Call& call) { return call.codes.dimensions.size() > 0; }

  static bool HasNorm(const Call& call) { return call.direction == 0 && !Quantizes(call); }

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const int64_t d = call.x.dimensions[3];
    if (n.dims > d) return Refuse(call.table, "shape " + Show(call.table.dimensions), "no more than d last");
    if (d * 2 % 16 != 0) return Refuse(call.x, "shape " + Show(call.x.dimensions), "a multiple of 8 last");
    *shape = {.b = n.b, .s = n.s_q, .heads = n.h, .d = d};
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const int64_t dims = call.table.dimensions[2];
    if (Quantizes(call)) {
      const IndexQueryChoices choices{.dims = dims, .dtype = call.x.dtype};
      return LookUp(call.target->name, device, choices, &kernels->front());
    }
    if (!HasNorm(call)) {
      return LookUp(call.target->name, device, RopeChoices{.dims = dims, .dtype = call.x.dtype}, &kernels->front());
    }
    const NormRopeChoices choices{.d = shape->d, .dims = dims, .dtype = call.x.dtype};
    return LookUp(call.target->name, device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (shape.heads == 0) return ffi::Error::Success();
    if (std::string error = CheckRopeShape(shape); !error.empty()) return ffi::Error::InvalidArgument(error);
    Launcher* launcher = kernels.front();
    auto at = AddressesOf<RopeAddresses>(call);
    if (Quantizes(call)) {
      auto plan = PlanIndexQuery(shape, launcher->tile_m, at);
      return Launch(launcher, stream, plan);
    }
    if (HasNorm(call)) {
      auto plan = PlanNormRope(shape, call.eps, launcher->tile_m, at);
      return Launch(launcher, stream, plan);
    }
    if (ffi::Error error = CopyUnlessThere(call.x, call.y, stream); error.failure()) return error;
    at.x = at.y;
    auto plan = PlanRope(shape, call.direction, launcher->tile_m, at);
    return Launch(launcher, stream, plan);
  }
};

}  // namespace dsv4_fmha
