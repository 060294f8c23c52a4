// The launch of a product of few rows with a matrix, as a function of shapes: no driver, no device.
#pragma once

#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// x [rows, groups, k], w [groups, k, n] and y [rows, groups, n], x and w of a TensorMapDataType.
struct FewRowsProductShape {
  int64_t rows, groups, k, n, type;
  int64_t makes_heads;  // whether columns are heads, each of a cluster's CTAs; else each CTA has a part of k
  int64_t takes_heads;  // whether rows are heads, whose RoPE is turned back
};

constexpr int64_t kHead = 512;

// Returns why it cannot be: empty if it can.
inline std::string CheckFewRowsProductShape(const FewRowsProductShape& shape) {
  const auto& [rows, groups, k, n, type, makes_heads, takes_heads] = shape;
  for (auto [name, extent] : {std::pair{"rows", rows}, {"groups", groups}, {"k", k}, {"n", n}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  for (auto [name, extent] : {std::pair{"k", k}, {"n", n}}) {
    if (extent % 8 != 0) return std::string(name) + " is " + std::to_string(extent) + ", wanted a multiple of 8";
  }
  if (takes_heads != 0 && k % kHead != 0) return "k is " + std::to_string(k) + ", wanted heads of 512";
  const int64_t limit = kMaxExtent / groups / 64;
  if (k > limit || n > limit) return "groups * k or groups * n is more than " + std::to_string(kMaxExtent / 64);
  return rows > limit ? TooLarge("rows * groups", rows * groups, kMaxExtent / 64) : "";
}

inline Plan<FewRowsProductArguments> PlanFewRowsProduct(const FewRowsProductShape& shape, float eps, const Tiles& tiles,
                                                        const FewRowsProductAddresses& at) {
  static constexpr uint32_t kSlab = 64;  // of k at a time, and columns of a box
  const auto& [rows, groups, k, n, type, makes_heads, takes_heads] = shape;
  const int64_t bytes = ElementBytes(type);
  const TensorMapSpec x{.rank = 3,
                        .type = U32(type),
                        .swizzle = kSwizzle128B,
                        .box = {kSlab, U32(tiles.tile_m), 1},
                        .extents = {U64(k), U64(rows), U64(groups)},
                        .strides = {U64(groups * k * bytes), U64(k * bytes)}};
  const TensorMapSpec w{.rank = 3,
                        .type = U32(type),
                        .swizzle = kSwizzle128B,
                        .box = {kSlab, kSlab, 1},
                        .extents = {U64(n), U64(k), U64(groups)},
                        .strides = {U64(n * bytes), U64(k * n * bytes)}};
  const int64_t count = CeilDiv(rows, tiles.tile_m) * CeilDiv(n, tiles.tile_n) * groups;
  return {.grid = U32(makes_heads != 0 ? count : count * tiles.cluster),
          .arguments = {.x = {.map = x, .extents = {I32(rows), I32(k), I32(groups)}, .address = at.x},
                        .w = {.map = w, .extents = {I32(k), I32(n), I32(groups)}, .address = at.w},
                        .y = at.y,
                        .rows = I32(rows),
                        .k = I32(k),
                        .n = I32(n),
                        .groups = I32(groups),
                        .table = at.table,
                        .eps = eps}};
}

}  // namespace dsv4_fmha
