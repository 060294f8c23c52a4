// The launches of a layer's experts, as functions of shapes: no driver, no device.
#pragma once

#include <algorithm>
#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// x [tokens, k], of which each token chose some of the experts; matrices of these in tiles of 64 rows and slabs of 64
// columns, whether they lie so in memory or not.
struct FusedMoeShape {
  int64_t tokens, chosen, k, inner, experts;
  int64_t tiles13, slabs13, tiles2, slabs2;  // of a matrix
  int64_t tiles;                             // room for tiles of rows
  int64_t num_experts;                       // among which tokens chose: those of all devices
  int64_t rows() const { return tokens * chosen; }
};

constexpr int64_t kGroupedDepth = 256;                 // of k and inner: a stage, or two
constexpr int64_t kTileRows = 64, kTileChannels = 32;  // of a matrix; of gates, half of these

// Returns why it cannot be: empty if it can.
inline std::string CheckFusedMoeShape(const FusedMoeShape& x) {
  for (auto [name, extent] :
       {std::pair{"b * s_q", x.tokens}, {"n_chosen", x.chosen}, {"k", x.k}, {"n", x.inner}, {"groups", x.experts}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (x.experts > kMostGroups) return TooLarge("groups", x.experts, kMostGroups);
  for (auto [name, extent] : {std::pair{"k", x.k}, {"n", x.inner}}) {
    if (extent % kGroupedDepth != 0) {
      return std::string(name) + " is " + std::to_string(extent) + ", wanted a multiple of 256";
    }
  }
  for (auto [name, got, wanted] : {std::tuple{"tiles13", x.tiles13, x.inner / kTileChannels},
                                   {"slabs13", x.slabs13, x.k / kTileRows},
                                   {"tiles2", x.tiles2, x.k / kTileRows},
                                   {"slabs2", x.slabs2, x.inner / kTileRows}}) {
    if (got != wanted) return std::string(name) + " is " + std::to_string(got) + ", wanted " + std::to_string(wanted);
  }
  if (x.chosen > kMaxExtent / x.tokens) return TooLarge("b * s_q * n_chosen", x.tokens, kMaxExtent / x.chosen);
  return "";
}

// Twice as many rows as an expert has on average: so many are to fit into a tile.
inline int64_t RowsOfTile(const FusedMoeShape& x) {
  return 2 * CeilDiv(x.rows(), std::max({x.num_experts, x.experts, int64_t{1}}));
}

// Room for the tiles of rows, of tile_m rows at most.
inline int64_t MostTiles(const FusedMoeShape& x, int64_t tile_m) { return x.experts + x.rows() / tile_m; }

// A CTA has a thread for each group that there may be, and sorts a row a thread.
inline Plan<GroupRowsArguments> PlanGroupRows(const FusedMoeShape& x, int64_t tile_m, const FusedMoeAddresses& at) {
  return {.grid = U32(CeilDiv(x.rows(), int64_t{kMostGroups})),
          .arguments = {.group = at.group,
                        .chosen_weight = at.chosen_weight,
                        .list = at.list,
                        .weights = at.sorted_weights,
                        .places = at.places,
                        .tiles = at.tiles,
                        .count = at.count,
                        .rows = I32(x.rows()),
                        .groups = I32(x.experts),
                        .tile = I32(tile_m)}};
}

// The gated product of x, or the product of what that makes.
inline Plan<GroupedProductArguments> PlanGroupedProduct(const FusedMoeShape& x, bool gated, const Tiles& tiles,
                                                        float limit, const FusedMoeAddresses& at) {
  const int64_t of_matrix = gated ? x.tiles13 : x.tiles2;
  const int64_t most = MostTiles(x, tiles.tile_m) * CeilDiv(of_matrix * kTileRows, tiles.tile_n);
  return {.grid = U32(std::min<int64_t>(most, tiles.processors)),
          .arguments = {.x = gated ? at.x : at.inner,
                        .w = gated ? at.w13 : at.w2,
                        .factor = gated ? at.factor13 : at.factor2,
                        .y = gated ? at.inner : at.y,
                        .list = at.list,
                        .weights = at.sorted_weights,
                        .tiles = at.tiles,
                        .count = at.count,
                        .limit = limit,
                        .k = I32(gated ? x.k : x.inner),
                        .n = I32(gated ? x.inner : x.k),
                        .slabs = I32(gated ? x.slabs13 : x.slabs2),
                        .tiles_of_matrix = I32(of_matrix),
                        .per_row = I32(x.chosen)}};
}

}  // namespace dsv4_fmha
