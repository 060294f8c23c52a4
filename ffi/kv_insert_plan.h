// The launch that inserts entries into a cache, as a function of shapes: no driver, no device.
#pragma once

#include <string>
#include <utility>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// A step's rows, and the cache that they go to.
struct KvInsertShape {
  int64_t b, s, n, width, columns, column, n_ape, n_bounds, ratio, ring;
  int64_t pages, page, page_bytes, table_width;
};

// For CTAs that take tile_m sequences each, where tokens are pooled, or else tokens. Returns why it cannot plan the
// launch: empty on success.
inline std::string PlanKvInsert(const KvInsertShape& x, float eps, int32_t tile_m, const KvInsertAddresses& at,
                                Plan<KvInsertArguments>* plan) {
  for (auto [name, extent] : {std::pair{"b", x.b},
                              {"s_q", x.s},
                              {"n", x.n},
                              {"n_bounds", x.n_bounds},
                              {"width", x.width},
                              {"ratio", x.ratio},
                              {"pages", x.pages},
                              {"page", x.page}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (x.columns > kMaxExtent) return TooLarge("columns", x.columns, kMaxExtent);
  if (x.b > kMaxExtent / x.s) return TooLarge("b * s_q", x.b * x.s, kMaxExtent);
  if (x.ring > kMaxExtent) return TooLarge("ring", x.ring, kMaxExtent);
  if (x.page_bytes > kMaxExtent) return TooLarge("bytes of a page", x.page_bytes, kMaxExtent);
  if (x.table_width > 0 && x.table_width > kMaxExtent / x.page) {
    return TooLarge("entries of a sequence", x.table_width * x.page, kMaxExtent);
  }
  *plan = {.grid = U32(CeilDiv(x.ring > 0 ? x.b : x.b * x.s, tile_m)),
           .arguments = {.rows = at.rows,
                         .ape = at.ape,
                         .norm = at.norm,
                         .table = at.table,
                         .bounds = at.bounds,
                         .block_table = at.block_table,
                         .state = at.state,
                         .sums = at.sums,
                         .folded = at.folded,
                         .cache = at.cache,
                         .b = I32(x.b),
                         .s = I32(x.s),
                         .n = I32(x.n),
                         .width = I32(x.width),
                         .columns = I32(x.columns),
                         .column = I32(x.column),
                         .has_ape = I32(x.n_ape > 0),
                         .n_bounds = I32(x.n_bounds),
                         .ratio = I32(x.ratio),
                         .ring = I32(x.ring),
                         .pages = I32(x.pages),
                         .page = I32(x.page),
                         .page_bytes = I32(x.page_bytes),
                         .table_width = I32(x.table_width),
                         .eps = eps}};
  return "";
}

}  // namespace dsv4_fmha
