// The launch of the lightning indexer's scores at given entries, or of their gradients, as a function of shapes: no
// driver, no device.
#pragma once

#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// q [b, s_q, heads, 128] and k [b, s_c, 128]; each query has topk entries.
struct IndexerScoresAtShape {
  int64_t b, s_q, s_c, heads, topk;
};

// Returns why there is no such call: empty if there is.
inline std::string CheckIndexerScoresAtShape(const IndexerScoresAtShape& shape) {
  const auto& [b, s_q, s_c, heads, topk] = shape;
  for (auto [name, extent] : {std::pair{"b", b}, {"s_q", s_q}, {"s_c", s_c}, {"topk", topk}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  return b > kMaxExtent / s_q ? TooLarge("b * s_q", b * s_q, kMaxExtent) : "";
}

inline Plan<IndexerScoresAtArguments> PlanIndexerScoresAt(const IndexerScoresAtShape& shape,
                                                          const IndexerScoresAtAddresses& at) {
  return {.grid = U32(shape.b * shape.s_q),
          .arguments = {.q = at.q,
                        .k = at.k,
                        .weights = at.weights,
                        .indices = at.indices,
                        .scores = at.scores,
                        .s_q = I32(shape.s_q),
                        .s_c = I32(shape.s_c),
                        .topk = I32(shape.topk),
                        .dq = at.dq,
                        .dk = at.dk,
                        .dweights = at.dweights}};
}

}  // namespace dsv4_fmha
