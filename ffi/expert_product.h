// The calls of products of rows by group, as training has them: with each group's matrix, with that transposed, and of
// a group's rows with one another.
#pragma once

#include "expert_product_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct ExpertProduct {
  using Call = ExpertProductCall;
  using Shape = ExpertProductShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const std::string_view name = call.target->name;
    *shape = {.form = name == "expert_product_turned"  ? kTurned
                      : name == "expert_outer_product" ? kOuter
                                                       : kOfRows,
              .rows = n.rows,
              .m = n.m,
              .n = n.n,
              .groups = n.groups,
              .type = MapType(call.a.dtype),
              .tiles = std::max<int64_t>(n.n_tiles, 0)};
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    static constexpr std::string_view kForms[] = {"rows", "turned", "outer"};
    const ExpertProductChoices choices{.dtype = call.a.dtype, .form = kForms[shape->form]};
    return LookUp("expert_product", device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckExpertProductShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<ExpertProductAddresses>(call);
    auto plan = PlanExpertProduct(shape, kernels.front()->TilesOn(stream.device), at);
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
