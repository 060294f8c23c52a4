// The calls of products of rows by group, as training has them: with each group's matrix, with that transposed, both
// with SwiGLU or its gradient too, and of a group's rows with one another.
#pragma once

#include "expert_product_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct ExpertProduct {
  using Call = ExpertProductCall;
  using Shape = ExpertProductShape;
  using Kernels = std::array<Launcher*, 1>;

  // By their forms.
  static constexpr std::array<std::string_view, 5> kTargets = {"expert_product", "expert_product_gated",
                                                               "expert_product_turned", "expert_product_gated_back",
                                                               "expert_outer_product"};

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const auto name = std::ranges::find(kTargets, call.target->name);
    const auto form = ExpertProductForm(name - kTargets.begin());
    *shape = {.form = form,
              .rows = n.rows,
              .m = n.m,
              .n = form == kGated ? 2 * n.n : n.n,
              .groups = n.groups,
              .type = MapType(call.a.dtype),
              .tiles = std::max<int64_t>(n.n_tiles, 0)};
    if (form == kGatedBack && n.n_parts * kResultColumns != n.n) {
      return Refuse(call.of_weights, "shape " + Show(call.of_weights.dimensions),
                    "a column for " + Show(kResultColumns) + " of n");
    }
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    static constexpr std::string_view kForms[] = {"rows", "gated", "turned", "gated_back", "outer"};
    const ExpertProductChoices choices{.dtype = call.a.dtype, .form = kForms[shape->form]};
    return LookUp("expert_product", device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckExpertProductShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<ExpertProductAddresses>(call);
    auto plan = PlanExpertProduct(shape, kernels.front()->TilesOn(stream.device), call.limit, at);
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
