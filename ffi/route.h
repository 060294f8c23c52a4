// The calls of a router after its product: experts of each row, by its logits or from a table, and their weights.
#pragma once

#include "route_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct Route {
  using Call = RouteCall;
  using Shape = RouteShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const bool has_table = call.table.dimensions.size() > 0;
    *shape = {.rows = n.b * n.s_q,
              .parts = n.n_parts,
              .experts = n.e,
              .chosen = n.n_chosen,
              .vocabulary = has_table ? n.vocabulary : 0,
              .is_sigmoid = call.score == "sigmoid"};
    if (has_table && n.vocabulary == 0) {
      return Refuse(call.table, "shape " + Show(call.table.dimensions), "at least 1 row");
    }
    if (shape->is_sigmoid || call.score == "sqrtsoftplus") return ffi::Error::Success();
    return ffi::Error::InvalidArgument(std::string(call.target->name) + ": score: got " + std::string(call.score) +
                                       ", wanted sqrtsoftplus or sigmoid");
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape*, Kernels* kernels) {
    return LookUp("route", device, RouteChoices{}, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckRouteShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<RouteAddresses>(call);
    auto plan = PlanRoute(shape, call.unit, call.scale, kernels.front()->tile_m, at);
    return Launch(kernels.front(), stream, plan, /*overlaps=*/true);
  }
};

}  // namespace dsv4_fmha
