// The launch that moves rows to and from a layer's experts, as a function of shapes: no driver, no device.
#pragma once

#include <string>
#include <utility>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// Tokens of k numbers, each with so many choices. Taken are rows of tokens, one for each choice; summed those of choices.
struct ExpertRowsShape {
  int64_t tokens, choices, k, experts;
  int64_t summed;  // 1, or 0
};

constexpr int64_t kColumnsOfWarp = 256;  // that it moves at a time

// Returns why it cannot be: empty if it can.
inline std::string CheckExpertRowsShape(const ExpertRowsShape& x) {
  for (auto [name, extent] :
       {std::pair{"tokens", x.tokens}, {"choices", x.choices}, {"k", x.k}, {"experts", x.experts}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (x.k % kColumnsOfWarp != 0) return "k is " + std::to_string(x.k) + ", wanted a multiple of 256";
  return x.tokens > kMaxExtent / x.choices ? TooLarge("tokens * choices", x.tokens * x.choices, kMaxExtent) : "";
}

// For CTAs of tile_m rows each.
inline Plan<ExpertRowsArguments> PlanExpertRows(const ExpertRowsShape& x, int32_t tile_m,
                                                const ExpertRowsAddresses& at) {
  const int64_t rows = x.summed ? x.tokens : x.tokens * x.choices;
  return {.grid = U32(CeilDiv(rows, tile_m)),
          .arguments = {.x = at.x,
                        .which = at.which,
                        .count = at.count,
                        .y = at.y,
                        .rows = I32(rows),
                        .choices = I32(x.choices),
                        .k = I32(x.k),
                        .experts = I32(x.experts)}};
}

}  // namespace dsv4_fmha
