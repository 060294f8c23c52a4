// The calls of products of few rows with a matrix: alone, with a low-rank query that is left to be normed, of heads
// whose RoPE is turned back first, or with what comes after the query heads that they make.
#pragma once

#include "few_rows_product_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct FewRowsProduct {
  using Call = FewRowsProductCall;
  using Shape = FewRowsProductShape;
  using Kernels = std::array<Launcher*, 1>;

  static bool Indexes(const Call& call) { return call.weights.name != nullptr; }

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const bool of_heads = call.x.dimensions.size() == 3;  // which w makes
    const int64_t head = of_heads ? call.y.dimensions[3] : 0;
    *shape = {.rows = n.b * n.s_q,
              .groups = of_heads ? 1 : n.g,
              .k = n.k,
              .n = of_heads ? n.h * head : n.n,
              .type = MapType(call.x.dtype),
              .makes_heads = of_heads && !Indexes(call),
              .takes_heads = !of_heads && call.table.name != nullptr,
              .indexes = Indexes(call),
              .low_columns = std::max<int64_t>(n.low_columns, 0),
              .square_tiles = std::max<int64_t>(n.n_squares, 0),
              .columns = std::max<int64_t>(n.columns, 0),
              .column = call.column,
              .parts = of_heads && !Indexes(call) ? 1 : call.parts,
              .is_packed = call.w.dtype == ffi::U8,
              .tiles = n.tiles_of_w,
              .slabs = n.slabs_of_w,
              .slab_bytes = n.slab_bytes};
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const FewRowsProductChoices choices{.dtype = call.x.dtype,
                                        .to_float32 = call.y.dtype == ffi::F32,
                                        .parts = shape->parts,
                                        .to_fp8 = call.y.dtype == ffi::F8E4M3FN,
                                        .weights = shape->is_packed != 0 ? "e4m3" : "",
                                        .max_rows = shape->rows};
    const bool has_low_rank = call.gain.name != nullptr;
    return LookUp(has_low_rank ? "few_rows_product" : call.target->name, device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckFewRowsProductShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<FewRowsProductAddresses>(call);
    auto plan = PlanFewRowsProduct(shape, call.eps, call.scale, kernels.front()->TilesOn(stream.device), at);
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
