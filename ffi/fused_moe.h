// The call of a layer's experts: rows are sorted by expert, then come the gated product and the product after it, each
// of which may begin while the launch before it ends.
#pragma once

#include "fused_moe_plan.h"
#include "target.h"

namespace dsv4_fmha {

constexpr std::string_view kNotPacked = "bfloat16";

// The bytes of a slab of a packed matrix's tile, 64 by 64 codes and their scales.
constexpr int64_t SlabBytesOf(std::string_view format) { return format == "e4m3" ? kBytesOfSlabOfE4m3 : 2176; }

struct FusedMoe {
  using Call = FusedMoeCall;
  using Shape = FusedMoeShape;
  using Kernels = std::array<Launcher*, 3>;  // sort, gated product, product

  // Whether matrices are packed; others lie in rows, in x's dtype.
  static bool IsPacked(const Call& call) { return call.w13.dtype == ffi::U8; }

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const bool is_packed = IsPacked(call);
    *shape = {.tokens = n.b * n.s_q,
              .chosen = n.n_chosen,
              .k = n.k,
              .inner = n.n,
              .experts = n.groups,
              .tiles13 = is_packed ? n.tiles13 : n.n / kTileChannels,
              .slabs13 = is_packed ? n.slabs13 : n.k / kTileRows,
              .tiles2 = is_packed ? n.tiles2 : n.k / kTileRows,
              .slabs2 = is_packed ? n.slabs2 : n.n / kTileRows,
              .tiles = n.n_tiles,
              .num_experts = call.num_experts};
    if (call.w2.dtype != call.w13.dtype) return Refuse(call.w2, Show(call.w2.dtype), Show(call.w13.dtype));
    if (is_packed == (call.format == kNotPacked)) {
      return Refuse(call.w13, Show(call.w13.dtype), "matrices in " + std::string(call.format));
    }
    if (const int64_t bytes = SlabBytesOf(call.format); is_packed && n.slab_bytes != bytes) {
      return Refuse(call.w13, "shape " + Show(call.w13.dimensions), "slabs of " + Show(bytes) + " bytes");
    }
    if (const int64_t factors = is_packed ? n.groups : 0; n.n_factors != factors) {
      return Refuse(call.factor13, "shape " + Show(call.factor13.dimensions), Show(factors) + " numbers");
    }
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
