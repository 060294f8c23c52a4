// The call of a layer's experts: rows are sorted by expert, then come the gated product and the product after it, each
// of which may begin while the launch before it ends.
#pragma once

#include "fused_moe_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct FusedMoe {
  using Call = FusedMoeCall;
  using Shape = FusedMoeShape;
  using Kernels = std::array<Launcher*, 3>;  // sort, gated product, product

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.tokens = n.b * n.s_q,
              .chosen = n.n_chosen,
              .k = n.k,
              .inner = n.n,
              .experts = n.groups,
              .tiles13 = n.tiles13,
              .slabs13 = n.slabs13,
              .tiles2 = n.tiles2,
              .slabs2 = n.slabs2,
              .tiles = n.n_tiles};
    if (n.rows == shape->rows()) return ffi::Error::Success();
    return Refuse(call.y, "shape " + Show(call.y.dimensions), Show(shape->rows()) + " rows");
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    if (ffi::Error error = LookUp("group_rows", device, GroupRowsChoices{}, &(*kernels)[0]); error.failure()) {
      return error;
    }
    for (bool gated : {true, false}) {
      const GroupedProductChoices choices{
          .dtype = call.x.dtype, .weights = call.format, .gated = gated, .max_rows = RowsOfTile(*shape)};
      ffi::Error error = LookUp("grouped_product", device, choices, &(*kernels)[gated ? 1 : 2]);
      if (error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    const auto& [sort, gated, plain] = kernels;
    std::string error = CheckFusedMoeShape(shape);
    if (error.empty() && shape.tiles < MostTiles(shape, gated->tile_m)) {
      error = "n_tiles is " + Show(shape.tiles) + ", wanted " + Show(MostTiles(shape, gated->tile_m));
    }
    if (!error.empty()) return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    const auto at = AddressesOf<FusedMoeAddresses>(call);
    auto sorting = PlanGroupRows(shape, gated->tile_m, at);
    if (ffi::Error failed = Launch(sort, stream, sorting); failed.failure()) return failed;
    for (Launcher* product : {gated, plain}) {
      auto plan = PlanGroupedProduct(shape, product == gated, product->TilesOn(stream.device), call.limit, at);
      if (ffi::Error failed = Launch(product, stream, plan, /*overlaps=*/true); failed.failure()) return failed;
    }
    return ffi::Error::Success();
  }
};

}  // namespace dsv4_fmha
