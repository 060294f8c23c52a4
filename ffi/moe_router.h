// The call of a router: experts of each row by their scores, or those that are given, and the weights of these.
#pragma once

#include "moe_router_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct MoeRouter {
  using Call = MoeRouterCall;
  using Shape = MoeRouterShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.rows = n.b * n.s_q,
              .k = n.k,
              .experts = n.e,
              .chosen = n.n_chosen,
              .is_given = call.given.dimensions.size() > 0,
              .is_sigmoid = call.score == "sigmoid"};
    if (shape->is_sigmoid || call.score == "sqrtsoftplus") return ffi::Error::Success();
    return ffi::Error::InvalidArgument(std::string(call.target->name) + ": score: got " + std::string(call.score) +
                                       ", wanted sqrtsoftplus or sigmoid");
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const MoeRouterChoices choices{.dtype = call.x.dtype, .max_rows = RowsOfRouter(*shape)};
    return LookUp("moe_router", device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckMoeRouterShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    Launcher* launcher = kernels.front();
    auto at = AddressesOf<MoeRouterAddresses>(call);
    auto plan = PlanMoeRouter(shape, call.unit, call.scale, launcher->tile_m, at);
    return Launch(launcher, stream, plan);
  }
};

}  // namespace dsv4_fmha
