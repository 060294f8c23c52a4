// The launches of attention to few queries as functions of shapes: no driver, no device.
#pragma once

#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

constexpr int64_t kKeysOfTile = 64;

// The tiles of keys that a query may see: each source begins with one of its own.
inline int64_t TilesOfKeys(const AttentionShape& shape) {
  int64_t tiles = 0;
  for (int i = 0; i < shape.source_count; ++i) {
    const SourceShape& source = shape.sources[i];
    tiles += CeilDiv(source.kind == kSpan ? source.s_kv : source.topk, kKeysOfTile);
  }
  return tiles;
}

// Scores of all keys: a CTA takes a pair of tiles of keys. Returns why it cannot plan the launch: empty on success.
inline std::string PlanRowScores(AttentionShape shape, int64_t room, const Tiles& tiles, const ByColumnsAddresses& at,
                                 Plan<RowScoresArguments>* plan) {
  const int64_t needed = TilesOfKeys(shape);
  if (needed > room)
    return "there is room for " + std::to_string(room) + " tiles of keys, " + std::to_string(needed) + " are needed";
  shape.rows.splits = CeilDiv(needed, 2);
  Tiling n;
  RowScoresArguments& x = plan->arguments;
  if (std::string error = CutRows(shape.rows, tiles, &n); !error.empty()) return error;
  for (int i = 0; i < shape.source_count; ++i) {
    std::string error = SetSource(shape.rows, tiles, shape.sources[i], at.sources[i], i == 0, &x.sources[i]);
    if (!error.empty()) return error;
  }
  plan->grid = n.grid;
  SetTiling(shape.rows, n, &x);
  x.q = Rows(shape.rows, n, shape.rows.d, at.q);
  x.scores = at.scores;
  x.tops = at.tops;
  x.counts = at.counts;
  x.tiles = I32(room);
  x.gathered = at.gathered;
  return "";
}

// Then o and lse: a CTA has tile_n columns of a tile of rows.
inline std::string PlanRowColumns(RowShape shape, int64_t room, float scale, const Tiles& tiles,
                                  const ByColumnsAddresses& at, Plan<RowColumnsArguments>* plan) {
  shape.splits = 1;
  Tiling n;
  RowColumnsArguments& x = plan->arguments;
  if (std::string error = CutRows(shape, tiles, &n); !error.empty()) return error;
  if (std::string error = BadScale(scale); !error.empty()) return error;
  const int64_t row_tiles = n.tiles_inner * n.tiles_outer * shape.b, columns = shape.d / tiles.tile_n;
  if (row_tiles > kMaxExtent / columns) return TooLarge("the number of CTAs", row_tiles * columns, kMaxExtent);
  plan->grid = U32(row_tiles * columns);
  SetTiling(shape, n, &x);
  RowShape queries = shape;
  queries.b = shape.b * shape.s_q, queries.s_q = 1;
  x.gathered = Keys(queries, room * kKeysOfTile, kKeysOfTile, at.gathered);
  x.scores = at.scores;
  x.tops = at.tops;
  x.counts = at.counts;
  x.tiles = I32(room);
  x.o = at.o;
  x.sink = at.sink;
  x.lse = at.lse;
  x.scale_log2 = static_cast<float>(scale * 1.4426950408889634);  // log2(e)
  return "";
}

}  // namespace dsv4_fmha
