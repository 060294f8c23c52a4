// The launches of RoPE, in place, after a norm or before quantization, as functions of shapes: no driver, no device.
#pragma once

#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

struct RopeShape {
  int64_t b, s, heads, d;
};

// Returns why it cannot be: empty if it can.
inline std::string CheckRopeShape(const RopeShape& shape) {
  const auto& [b, s, heads, d] = shape;
  for (auto [name, extent] : {std::pair{"b", b}, {"s", s}, {"h", heads}, {"d", d}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (b > kMaxExtent / s || b * s > kMaxExtent / heads) return "b * s * h is more than " + std::to_string(kMaxExtent);
  return "";
}

// For CTAs that take `tile_m` rows each.
inline Plan<RopeArguments> PlanRope(const RopeShape& shape, float direction, int32_t tile_m, const RopeAddresses& at) {
  const int64_t rows = shape.b * shape.s * shape.heads;
  return {.grid = U32(CeilDiv(rows, tile_m)),
          .arguments = {.x = at.x,
                        .table = at.table,
                        .rows = I32(rows),
                        .heads = I32(shape.heads),
                        .d = I32(shape.d),
                        .direction = direction}};
}

inline Plan<NormRopeArguments> PlanNormRope(const RopeShape& shape, float eps, int32_t tile_m,
                                            const RopeAddresses& at) {
  const int64_t rows = shape.b * shape.s * shape.heads;
  return {.grid = U32(CeilDiv(rows, tile_m)),
          .arguments = {.x = at.x,
                        .table = at.table,
                        .dy = at.dy,
                        .y = at.y,
                        .rows = I32(rows),
                        .heads = I32(shape.heads),
                        .eps = eps}};
}

inline Plan<IndexQueryArguments> PlanIndexQuery(const RopeShape& shape, int32_t tile_m, const RopeAddresses& at) {
  const int64_t rows = shape.b * shape.s * shape.heads;
  return {.grid = U32(CeilDiv(rows, tile_m)),
          .arguments = {.x = at.x,
                        .table = at.table,
                        .codes = at.codes,
                        .scales = at.scales,
                        .rows = I32(rows),
                        .heads = I32(shape.heads)}};
}

}  // namespace dsv4_fmha
