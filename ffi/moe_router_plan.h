// The launch of a router, as a function of shapes: no driver, no device.
#pragma once

#include <string>
#include <utility>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// x [rows, k] and gate [k, experts]; each row gets `chosen` experts, which are given or have the greatest scores.
struct MoeRouterShape {
  int64_t rows, k, experts, chosen;
  int64_t is_given, is_sigmoid;
};

constexpr int64_t kRouterParts = 8;                         // of k, whose CTAs make up a cluster
constexpr int64_t kRouterUnit = 64, kRouterBlock = 16;      // of k, and experts, that a warp takes at once
constexpr int64_t kRoutedExperts = 512, kMostRouted = 32;   // at most; of the latter a lane of a warp has one
constexpr int64_t kRouterTile = 64, kRouterSmallTile = 16;  // rows of a cluster
constexpr int64_t kRouterMemory = 227 * 1024;               // bytes of a CTA

// Returns whether a CTA has memory for its part of so many rows of x, and for their sums.
inline bool RouterHolds(const MoeRouterShape& x, int64_t tile) {
  const int64_t of_x = CeilDiv(x.k / kRouterUnit, kRouterParts) * kRouterUnit * 2 + 32;
  return tile * (of_x + (x.experts + 4) * 4) <= kRouterMemory;
}

// Rows, by which a call finds its kernel: in small tiles more of k has room.
inline int64_t RowsOfRouter(const MoeRouterShape& x) { return RouterHolds(x, kRouterTile) ? x.rows : 1; }

// Returns why it cannot be: empty if it can.
inline std::string CheckMoeRouterShape(const MoeRouterShape& x) {
  for (auto [name, extent] : {std::pair{"b * s_q", x.rows}, {"k", x.k}, {"e", x.experts}, {"n_chosen", x.chosen}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (x.k % kRouterUnit != 0 || x.k < kRouterParts * kRouterUnit) {
    return "k is " + std::to_string(x.k) + ", wanted a multiple of 64, at least 512";
  }
  if (x.experts % kRouterBlock != 0 || x.experts > kRoutedExperts) {
    return "e is " + std::to_string(x.experts) + ", wanted a multiple of 16, at most 512";
  }
  if (x.chosen > kMostRouted || x.chosen > x.experts) {
    return "n_chosen is " + std::to_string(x.chosen) + ", wanted at most 32, and no more than e";
  }
  if (!RouterHolds(x, kRouterSmallTile)) return "k is " + std::to_string(x.k) + ", too large";
  return "";
}

// For clusters that take tile_m rows each.
inline Plan<MoeRouterArguments> PlanMoeRouter(const MoeRouterShape& x, float unit, float scale, int32_t tile_m,
                                              const MoeRouterAddresses& at) {
  return {.grid = U32(CeilDiv(x.rows, tile_m) * kRouterParts),
          .arguments = {.x = at.x,
                        .gate = at.gate,
                        .bias = at.bias,
                        .given = at.given,
                        .weights = at.weights,
                        .chosen = at.chosen,
                        .rows = I32(x.rows),
                        .k = I32(x.k),
                        .e = I32(x.experts),
                        .c = I32(x.chosen),
                        .is_given = I32(x.is_given),
                        .is_sigmoid = I32(x.is_sigmoid),
                        .unit = unit,
                        .scale = scale}};
}

}  // namespace dsv4_fmha
