// The launches of the lightning indexer as functions of shapes: no driver, no device.
//
// Queries are taken in blocks, of one batch entry each, and of a call so many blocks at a time as its workspace of scores
// has room for: first they are scored, then their entries are chosen.
#pragma once

#include <algorithm>
#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// q [b, s_q, heads, 128] and k [b, s_c, 128] of a TensorMapDataType.
struct IndexShape {
  int64_t b, s_q, s_c, heads, topk, type;
  int64_t queries;  // of a block
  int64_t stride;   // from query to query of scores
  int64_t wants_values;

  int64_t blocks_of_entry() const { return CeilDiv(s_q, queries); }
  int64_t blocks() const { return b * blocks_of_entry(); }
};

struct IndexAddresses {
  void *q, *k, *weights, *k_scale, *start, *stop;
  void* scores;  // f32 [blocks of a launch * queries, stride]
  void *indices, *values;
};

constexpr int64_t kIndexDim = 128;

// Returns why it cannot be: empty if it can.
inline std::string CheckIndexShape(const IndexShape& shape) {
  const auto& [b, s_q, s_c, heads, topk, type, queries, stride, wants_values] = shape;
  for (auto [name, extent] : {std::pair{"b", b}, {"s_q", s_q}, {"s_c", s_c}, {"topk", topk}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  const int64_t limit = kMaxExtent / heads / s_q;
  return b > limit ? TooLarge("b * s_q * heads", b * s_q * heads, kMaxExtent) : "";
}

// How many parts the key tiles of each block are shared out in, so that all CTAs have about the same to do.  A part costs
// some tiles more, for its queries and weights.
inline int64_t IndexSplits(int64_t blocks, int64_t tiles, int64_t processors) {
  static constexpr int64_t kMost = 64, kBegin = 3;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t splits = 1; splits <= std::min(tiles, kMost); ++splits) {
    const int64_t cost = CeilDiv(blocks * splits, processors) * (CeilDiv(tiles, splits) + kBegin);
    if (cost < least) best = splits, least = cost;
  }
  return best;
}

// Scores of `count` blocks from `first` on.
inline Plan<IndexScoresArguments> PlanIndexScores(const IndexShape& shape, const Tiles& tiles, int64_t first,
                                                  int64_t count, const IndexAddresses& at) {
  const int64_t row = kIndexDim * ElementBytes(shape.type), columns = U32(128 / ElementBytes(shape.type));
  const int64_t rows = shape.b * shape.s_q * shape.heads;
  const int64_t splits = IndexSplits(count, CeilDiv(shape.s_c, tiles.tile_n), tiles.processors);
  const TensorMapSpec q{.rank = 2,
                        .type = U32(shape.type),
                        .swizzle = kSwizzle128B,
                        .box = {U32(columns), U32(tiles.tile_m)},
                        .extents = {U64(kIndexDim), U64(rows)},
                        .strides = {U64(row)}};
  const TensorMapSpec k{.rank = 3,
                        .type = U32(shape.type),
                        .swizzle = kSwizzle128B,
                        .box = {U32(columns), U32(tiles.tile_n), 1},
                        .extents = {U64(kIndexDim), U64(shape.s_c), U64(shape.b)},
                        .strides = {U64(row), U64(shape.s_c * row)}};
  return {.grid = U32(std::min<int64_t>(count * splits, tiles.processors)),
          .arguments = {.q = {.map = q, .extents = {I32(rows)}, .address = at.q},
                        .k = {.map = k, .extents = {I32(shape.s_c), I32(shape.b)}, .address = at.k},
                        .weights = at.weights,
                        .k_scale = at.k_scale,
                        .start = at.start,
                        .stop = at.stop,
                        .scores = at.scores,
                        .s_q = I32(shape.s_q),
                        .s_c = I32(shape.s_c),
                        .blocks_of_entry = I32(shape.blocks_of_entry()),
                        .first_block = I32(first),
                        .blocks = I32(count),
                        .splits = I32(splits),
                        .stride = I32(shape.stride),
                        .skip = shape.wants_values ? 0 : I32(shape.topk)}};
}

// Their entries.
inline Plan<TopkArguments> PlanTopk(const IndexShape& shape, int64_t first, int64_t count, const IndexAddresses& at) {
  return {.grid = U32(count * shape.queries),
          .arguments = {.scores = at.scores,
                        .start = at.start,
                        .stop = at.stop,
                        .indices = at.indices,
                        .values = at.values,
                        .s_q = I32(shape.s_q),
                        .queries = I32(shape.queries),
                        .blocks_of_entry = I32(shape.blocks_of_entry()),
                        .first_block = I32(first),
                        .stride = I32(shape.stride),
                        .topk = I32(shape.topk),
                        .wants_values = I32(shape.wants_values)}};
}

}  // namespace dsv4_fmha
