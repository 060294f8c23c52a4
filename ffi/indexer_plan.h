// The launches of the lightning indexer as functions of shapes: no driver, no device.
//
// A block holds queries of one batch entry. A launch takes as many blocks as the workspace of scores has room for: it
// scores them, and then chooses their entries.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

constexpr int64_t kIndexDim = 128;
constexpr int64_t kScaleBytes = 4;  // of a key of 8 or 4 bits
constexpr int64_t kIndexBlock = 8;  // keys of a block that is chosen as a whole

// q [b, s_q, heads, 128] and k [b, s_c, 128] of a TensorMapDataType; or keys in pages with a table [b, width], where
// s_c is width * page: keys of 8 or 4 bits with their scales [pages, page * 132 or 68 bytes], other keys
// [pages, page, 128].
struct IndexerShape {
  int64_t b, s_q, s_c, heads, topk, type;
  int64_t of_4_bits;  // whether keys are; else their numbers are like q's
  int64_t queries;    // of a block
  int64_t stride;     // between the scores of two queries
  int64_t wants_values;
  int64_t keys_of_score;       // 1; or of a block, whose greatest score stands for it
  int64_t pages, page, width;  // width is 0 where keys are not in pages

  bool paged() const { return width != 0; }
  bool scaled_pages() const { return paged() && (of_4_bits != 0 || ElementBytes(type) == 1); }
  int64_t key_bytes() const { return of_4_bits != 0 ? kIndexDim / 2 : kIndexDim * ElementBytes(type); }
  int64_t blocks_of_entry() const { return CeilDiv(s_q, queries); }
  int64_t blocks() const { return b * blocks_of_entry(); }
};

// Keys of a page come in multiples of this: TMA wants strides of 16 bytes, and a box on part of a page needs 128 bytes
// of scales, or 8 keys, which are swizzled alike.
inline int64_t IndexPageUnit(int64_t width, bool scaled) { return width > 1 ? (scaled ? 32 : 8) : (scaled ? 4 : 1); }

// Keys of a page in one load: they divide a tile and a page; if a sequence has only one page, a tile.
inline int64_t IndexBox(int64_t page, int64_t width, int64_t tile_n) {
  return width > 1 ? std::gcd(page, tile_n) : tile_n;
}

// Returns why there is no such call: empty if there is.
inline std::string CheckIndexerShape(const IndexerShape& shape) {
  const int64_t b = shape.b, s_q = shape.s_q, heads = shape.heads, page = shape.page, width = shape.width;
  for (auto [name, extent] : {std::pair{"b", b}, {"s_q", s_q}, {"s_c", shape.s_c}, {"topk", shape.topk}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (shape.paged()) {
    const int64_t unit = IndexPageUnit(width, shape.scaled_pages());
    if (page % unit != 0) {
      return "page: got " + std::to_string(page) + " keys, wanted a multiple of " + std::to_string(unit);
    }
    for (auto [name, extent] : {std::pair{"pages", shape.pages}, {"b * width", b * width}}) {
      if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
    }
  }
  const int64_t limit = kMaxExtent / heads / s_q;
  return b > limit ? TooLarge("b * s_q * heads", b * s_q * heads, kMaxExtent) : "";
}

// How many parts share the key tiles of each block, so that all CTAs have about the same work.  A part costs some tiles
// more, for its queries and weights.
inline int64_t IndexSplits(int64_t blocks, int64_t tiles, int64_t processors) {
  static constexpr int64_t kMost = 64, kBegin = 3;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t splits = 1; splits <= std::min(tiles, kMost); ++splits) {
    const int64_t cost = CeilDiv(blocks * splits, processors) * (CeilDiv(tiles, splits) + kBegin);
    if (cost < least) best = splits, least = cost;
  }
  return best;
}

// The launch that scores `count` blocks from `first` on.
inline Plan<IndexerScoresArguments> PlanIndexerScores(const IndexerShape& shape, const Tiles& tiles, int64_t first,
                                                      int64_t count, const IndexerAddresses& at) {
  const int64_t row = kIndexDim * ElementBytes(shape.type), columns = U32(128 / ElementBytes(shape.type));
  const int64_t rows = shape.b * shape.s_q * shape.heads, key = shape.key_bytes();
  const bool of_4_bits = shape.of_4_bits != 0;  // these no product reads: they lie as in memory
  const int64_t splits = IndexSplits(count, CeilDiv(shape.s_c, tiles.tile_n), tiles.processors);
  const TensorMapSpec q{.rank = 2,
                        .type = U32(shape.type),
                        .swizzle = kSwizzle128B,
                        .box = {U32(columns), U32(tiles.tile_m)},
                        .extents = {U64(kIndexDim), U64(rows)},
                        .strides = {U64(row)}};
  const int64_t keys = shape.paged() ? shape.page : shape.s_c, pages = shape.paged() ? shape.pages : shape.b;
  const int64_t box = shape.paged() ? IndexBox(shape.page, shape.width, tiles.tile_n) : tiles.tile_n;
  const int64_t page_bytes = keys * (key + (shape.scaled_pages() ? kScaleBytes : 0));
  const TensorMapSpec k{.rank = 3,
                        .type = of_4_bits ? kUInt8 : U32(shape.type),
                        .swizzle = of_4_bits ? kNoSwizzle : kSwizzle128B,
                        .box = {U32(of_4_bits ? key : columns), U32(box), 1},
                        .extents = {U64(of_4_bits ? key : kIndexDim), U64(keys), U64(pages)},
                        .strides = {U64(key), U64(page_bytes)}};
  const TensorMapSpec k_scale{.rank = 2,
                              .type = kFloat32,
                              .swizzle = kNoSwizzle,
                              .box = {U32(box), 1},
                              .extents = {U64(keys), U64(pages)},
                              .strides = {U64(page_bytes)}};
  void* after_keys = static_cast<char*>(at.k) + keys * key;
  return {.grid = U32(std::min<int64_t>(count * splits, tiles.processors)),
          .arguments = {.q = {.map = q, .extents = {I32(rows)}, .address = at.q},
                        .k = {.map = k, .extents = {I32(keys), I32(pages)}, .address = at.k},
                        .weights = at.weights,
                        .k_scale = {.map = k_scale,
                                    .extents = {I32(keys), I32(pages)},
                                    .address = shape.scaled_pages() ? after_keys : at.k_scale},
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
                        .skip = shape.wants_values ? 0 : I32(shape.topk * shape.keys_of_score),
                        .table = at.table,
                        .width = I32(shape.width),
                        .page = I32(shape.page),
                        .box = I32(box)}};
}

// The launch that chooses their entries, or the blocks of these; so many CTAs share a row. Where an entry of the batch
// has one query, the rows of its block's others have no CTAs.
inline Plan<TopkArguments> PlanTopk(const IndexerShape& shape, int64_t ctas_of_row, int64_t first, int64_t count,
                                    const IndexerAddresses& at) {
  const bool of_blocks = shape.keys_of_score != 1;
  const bool alone = shape.s_q == 1 && shape.stride <= kMaxExtent / shape.queries;
  const int64_t rows = alone ? 1 : shape.queries;
  return {.grid = U32(count * rows * ctas_of_row),
          .arguments = {.scores = at.scores,
                        .start = of_blocks ? at.oldest : at.start,
                        .stop = of_blocks ? at.newest : at.stop,
                        .indices = at.indices,
                        .values = at.values,
                        .s_q = I32(shape.s_q),
                        .queries = I32(rows),
                        .blocks_of_entry = I32(shape.blocks_of_entry()),
                        .first_block = I32(first),
                        .stride = I32(shape.stride * (shape.queries / rows)),
                        .topk = I32(shape.topk),
                        .wants_values = I32(shape.wants_values)}};
}

}  // namespace dsv4_fmha
