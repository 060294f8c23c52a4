// The launch that makes codes of keys, as a function of shapes: no driver, no device.
#pragma once

#include <string>
#include <utility>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// n keys of each of b sequences, in a pool of rows of numbers, or of pages of packed entries.
struct KeyCodesShape {
  int64_t b, n, rows, page, page_bytes;
};

// For CTAs that take tile_m keys each. Returns why it cannot plan the launch: empty on success.
inline std::string PlanKeyCodes(const KeyCodesShape& x, int32_t tile_m, const KeyCodesAddresses& at,
                                Plan<KeyCodesArguments>* plan) {
  for (auto [name, extent] : {std::pair{"b", x.b}, {"n", x.n}, {"keys", x.rows}, {"page", x.page}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (x.rows > kMaxExtent / x.page) return TooLarge("entries of a pool", x.rows * x.page, kMaxExtent);
  if (x.page_bytes > kMaxExtent) return TooLarge("bytes of a page", x.page_bytes, kMaxExtent);
  const int64_t ctas = CeilDiv(x.n, tile_m);
  if (x.b > kMaxExtent / ctas) return TooLarge("b * n", x.b * x.n, kMaxExtent);
  *plan = {.grid = U32(x.b * ctas),
           .arguments = {.keys = at.keys,
                         .slots = at.slots,
                         .codes = at.codes,
                         .b = I32(x.b),
                         .n = I32(x.n),
                         .page = I32(x.page),
                         .page_bytes = I32(x.page_bytes)}};
  return "";
}

}  // namespace dsv4_fmha
