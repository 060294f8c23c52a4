// The calls that move rows of tokens to a layer's experts, and sum what experts make of them.
#pragma once

#include "expert_rows_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct ExpertRows {
  using Call = ExpertRowsCall;
  using Shape = ExpertRowsShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const bool summed = call.target->name == std::string_view("expert_rows_summed");
    const int64_t choices = summed ? n.c : n.rows / std::max<int64_t>(n.tokens, 1);
    *shape = {.tokens = n.tokens, .choices = choices, .k = n.k, .experts = summed ? call.experts : 1, .summed = summed};
    if (choices * n.tokens != n.rows) {
      return Refuse(summed ? call.x : call.which, Show(n.rows) + " rows", "as many for each of the tokens");
    }
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const ExpertRowsChoices choices{.dtype = call.x.dtype, .form = shape->summed ? "summed" : "taken"};
    return LookUp("expert_rows", device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckExpertRowsShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<ExpertRowsAddresses>(call);
    auto plan = PlanExpertRows(shape, kernels.front()->tile_m, at);
    return Launch(kernels.front(), stream, plan, /*overlaps=*/true);
  }
};

}  // namespace dsv4_fmha
