// The launches of the lightning indexer's choice within listed blocks of keys as functions of shapes: no driver, no
// device.
//
// A launch takes as many queries as the workspace of scores has room for: it scores the keys of their blocks, and then
// chooses among these.
#pragma once

#include <algorithm>
#include <string>

#include "indexer_plan.h"

namespace dsv4_fmha {

// q, keys and their pages as `of_keys` says, whose topk and s_q count for both launches; each query has `count` blocks.
struct IndexerWithinShape {
  IndexerShape of_keys;
  int64_t count, from_start;

  int64_t listed() const { return count * kIndexBlock; }  // keys of a query's blocks
  int64_t queries() const { return of_keys.b * of_keys.s_q; }

  // The shape of a choice among the listed keys of each query, as if these were all its entries.
  IndexerShape choice() const {
    IndexerShape shape = of_keys;
    shape.s_c = shape.stride = listed(), shape.queries = 1, shape.width = 0, shape.keys_of_score = 1;
    return shape;
  }
};

// Returns why there is no such call: empty if there is.
inline std::string CheckIndexerWithinShape(const IndexerWithinShape& shape) {
  if (std::string error = CheckIndexerShape(shape.of_keys); !error.empty()) return error;
  if (shape.of_keys.paged() && shape.of_keys.page % kIndexBlock != 0) {
    return "page: got " + std::to_string(shape.of_keys.page) + " keys, wanted a multiple of a block's 8";
  }
  return shape.count > kMaxExtent / kIndexBlock ? TooLarge("n_blocks", shape.count, kMaxExtent / kIndexBlock) : "";
}

// The launch that scores `count` queries from `first` on. Where they are few, several CTAs share the list of each.
inline Plan<IndexerScoresWithinArguments> PlanIndexerScoresWithin(const IndexerWithinShape& shape, const Tiles& tiles,
                                                                  int64_t first, int64_t count,
                                                                  const IndexerWithinAddresses& at) {
  const int64_t most = CeilDiv(shape.listed(), tiles.tile_n), splits = CeilDiv(tiles.processors, count);
  const IndexerShape& keys = shape.of_keys;
  const int64_t taken = std::min(most, count < tiles.processors ? splits : 1);
  return {.grid = U32(count * taken),
          .arguments = {.q = at.q,
                        .k = at.k,
                        .weights = at.weights,
                        .blocks = at.blocks,
                        .start = at.start,
                        .scores = at.scores,
                        .s_q = I32(keys.s_q),
                        .s_c = I32(keys.s_c),
                        .first_query = I32(first),
                        .count = I32(shape.count),
                        .splits = I32(taken),
                        .from_start = I32(shape.from_start),
                        .k_scale = at.k_scale,
                        .table = at.table,
                        .width = I32(keys.width),
                        .pages = I32(keys.pages),
                        .page = I32(keys.page)}};
}

// The launch that chooses among their keys.
inline Plan<TopkArguments> PlanTopkWithin(const IndexerWithinShape& shape, int64_t ctas_of_row, int64_t first,
                                          int64_t count, const IndexerWithinAddresses& at) {
  IndexerAddresses of_choice{};
  of_choice.scores = at.scores, of_choice.start = at.first, of_choice.stop = at.last;
  of_choice.indices = at.indices, of_choice.values = at.values;
  return PlanTopk(shape.choice(), ctas_of_row, first, count, of_choice);
}

}  // namespace dsv4_fmha
