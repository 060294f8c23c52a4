// The launch that says which slots of its caches each query of a step sees, as a function of shapes: no driver, no
// device.
#pragma once

#include <string>
#include <utility>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// Where a cache has its entries: `width` pages for a sequence of `page` entries each, out of `pages`; or, with page 0,
// room in a row, `stride` slots after those of the sequence before.
struct PoolShape {
  int64_t width, room, page, pages, stride;
};

// A step's queries, and what they see.
struct SeenSlotsShape {
  int64_t b, s_q, window, ratio, n_position, n_topk_length, n_far, topk;
  PoolShape of_window, compressed;
};

// Why a pool of b sequences cannot be: empty if it can.
inline std::string CheckPool(const char* name, const PoolShape& x, int64_t b) {
  if (std::string error = OutOfRange(name, x.room); !error.empty()) return error;
  if (x.page < 0 || (x.page > 0 && (x.width < 1 || x.width > kMaxExtent / x.page || x.width * x.page != x.room))) {
    return std::string(name) + ": got room for " + std::to_string(x.room) + " entries in " + std::to_string(x.width) +
           " pages of " + std::to_string(x.page);
  }
  if (x.page > 0 && (x.pages < 1 || x.pages > kMaxExtent / x.page)) return TooLarge("pages", x.pages, kMaxExtent);
  if (x.stride < 0 || x.stride > kMaxExtent / b) return TooLarge("b * stride", b * x.stride, kMaxExtent);
  return "";
}

// For CTAs that have tile_n numbers of one query, of one of its caches. Returns why it cannot plan the launch: empty on success.
inline std::string PlanSeenSlots(const SeenSlotsShape& x, int32_t tile_n, const SeenSlotsAddresses& at,
                                 Plan<SeenSlotsArguments>* plan) {
  for (auto [name, extent] : {std::pair{"b", x.b}, {"s_q", x.s_q}, {"window + n_far", x.window + x.n_far}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (x.window > 0) {
    if (std::string error = CheckPool("window_table", x.of_window, x.b); !error.empty()) return error;
  }
  if (x.n_far > 0) {
    if (std::string error = CheckPool("table", x.compressed, x.b); !error.empty()) return error;
  }
  const int64_t ctas = CeilDiv(x.window, tile_n) + CeilDiv(x.n_far, tile_n);
  if (x.b > kMaxExtent / x.s_q || x.b * x.s_q > kMaxExtent / ctas) {
    return TooLarge("b * s_q", x.b * x.s_q, kMaxExtent / ctas);
  }
  *plan = {.grid = U32(x.b * x.s_q * ctas),
           .arguments = {.lengths = at.lengths,
                         .position = at.position,
                         .indices = at.indices,
                         .topk_length = at.topk_length,
                         .near = at.near,
                         .near_length = at.near_length,
                         .far = at.far,
                         .far_length = at.far_length,
                         .window_table = at.window_table,
                         .window_width = I32(x.of_window.width),
                         .window_room = I32(x.of_window.room),
                         .window_page = I32(x.of_window.page),
                         .window_pages = I32(x.of_window.pages),
                         .window_stride = I32(x.of_window.stride),
                         .table = at.table,
                         .width = I32(x.compressed.width),
                         .room = I32(x.compressed.room),
                         .page = I32(x.compressed.page),
                         .pages = I32(x.compressed.pages),
                         .stride = I32(x.compressed.stride),
                         .b = I32(x.b),
                         .s_q = I32(x.s_q),
                         .window = I32(x.window),
                         .ratio = I32(x.ratio),
                         .has_position = I32(x.n_position),
                         .has_length = I32(x.n_topk_length),
                         .n_far = I32(x.n_far),
                         .topk = I32(x.topk)}};
  return "";
}

}  // namespace dsv4_fmha
