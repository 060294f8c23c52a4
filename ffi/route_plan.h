// The launch of a router after its product, as a function of shapes: no driver, no device.
#pragma once

#include <string>
#include <utility>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// Logits [rows, parts, experts]; each row gets `chosen` experts, by its logits or from a row of a table.
struct RouteShape {
  int64_t rows, parts, experts, chosen;
  int64_t vocabulary;  // rows of the table; 0 without one
  int64_t is_sigmoid;
};

// Returns why it cannot be: empty if it can.
inline std::string CheckRouteShape(const RouteShape& x) {
  for (auto [name, extent, most] : {std::tuple{"b * s_q", x.rows, kMaxExtent},
                                    {"n_parts", x.parts, int64_t{kMostParts}},
                                    {"e", x.experts, int64_t{kMostRouted}},
                                    {"n_chosen", x.chosen, int64_t{kMostChosen}}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
    if (extent > most) return TooLarge(name, extent, most);
  }
  if (x.experts % 4 != 0) return "e is " + std::to_string(x.experts) + ", wanted a multiple of 4";
  if (x.vocabulary == 0 && x.chosen > x.experts) return TooLarge("n_chosen", x.chosen, x.experts);
  return x.vocabulary > kMaxExtent ? TooLarge("vocabulary", x.vocabulary, kMaxExtent) : "";
}

// For CTAs that take tile_m rows each.
inline Plan<RouteArguments> PlanRoute(const RouteShape& x, float unit, float scale, int32_t tile_m,
                                      const RouteAddresses& at) {
  return {.grid = U32(CeilDiv(x.rows, tile_m)),
          .arguments = {.logits = at.logits,
                        .bias = at.bias,
                        .table = at.table,
                        .tokens = at.tokens,
                        .weights = at.weights,
                        .chosen = at.chosen,
                        .rows = I32(x.rows),
                        .parts = I32(x.parts),
                        .experts = I32(x.experts),
                        .n_chosen = I32(x.chosen),
                        .vocabulary = I32(x.vocabulary),
                        .is_sigmoid = I32(x.is_sigmoid),
                        .unit = unit,
                        .scale = scale}};
}

}  // namespace dsv4_fmha
