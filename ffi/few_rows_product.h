// The calls of products of few rows with a matrix: alone, of heads whose RoPE is turned back first, or with the norm and
// RoPE of the query heads that they make.
#pragma once

#include "few_rows_product_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct FewRowsProduct {
  using Call = FewRowsProductCall;
  using Shape = FewRowsProductShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const bool makes_heads = call.x.dimensions.size() == 3;
    *shape = {.rows = n.b * n.s_q,
              .groups = makes_heads ? 1 : n.g,
              .k = n.k,
              .n = makes_heads ? n.h * kHead : n.n,
              .type = MapType(call.x.dtype),
              .makes_heads = makes_heads,
              .takes_heads = !makes_heads && call.table.name != nullptr};
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const FewRowsProductChoices choices{.dtype = call.x.dtype,
                                        .to_float32 = call.y.dtype == ffi::F32,
                                        .parts = shape->makes_heads != 0 ? 1 : call.parts,
                                        .max_rows = shape->rows};
    return LookUp(call.target->name, device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckFewRowsProductShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<FewRowsProductAddresses>(call);
    auto plan = PlanFewRowsProduct(shape, call.eps, kernels.front()->TilesOn(stream.device), at);
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
