// The launch of head-summed probabilities as a function of shapes: no driver, no device.
#pragma once

#include <algorithm>
#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

struct ProbabilitiesShape {
  int64_t b, s_q, h_q, s_kv, topk;
};

// Returns why it cannot plan the launch: empty on success.
inline std::string PlanProbabilities(const ProbabilitiesShape& shape, float scale, int64_t processors,
                                     const ProbabilitiesAddresses& at, Plan<ProbabilitiesArguments>* plan) {
  const auto& [b, s_q, h_q, s_kv, topk] = shape;
  for (auto [name, extent] : {std::pair{"b", b}, {"s_q", s_q}, {"h_q", h_q}, {"s_kv", s_kv}, {"topk", topk}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (b > kMaxExtent / s_q) return TooLarge("b * s_q", b * s_q, kMaxExtent);
  if (std::string error = BadScale(scale); !error.empty()) return error;
  *plan = {.grid = U32(std::min(b * s_q, processors)),
           .arguments = {.q = at.q,
                         .k = at.k,
                         .lse = at.lse,
                         .indices = at.indices,
                         .p = at.p,
                         .scale = scale,
                         .queries = I32(b * s_q),
                         .s_q = I32(s_q),
                         .h_q = I32(h_q),
                         .s_kv = I32(s_kv),
                         .topk = I32(topk)}};
  return "";
}

}  // namespace dsv4_fmha
