// The launch of hyper-connections between two sublayers, as a function of shapes: no driver, no device.
#pragma once

#include <algorithm>
#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

struct HyperConnectionShape {
  int64_t tokens, hidden;
  int64_t taken;  // numbers of a token that say how z takes the streams; 0 where the new ones do
  int64_t iterations;
};

constexpr int64_t kStreams = 4;

// Returns why it cannot be: empty if it can.
inline std::string CheckHyperConnectionShape(const HyperConnectionShape& shape) {
  if (std::string error = OutOfRange("b * s_q", shape.tokens); !error.empty()) return error;
  if (shape.taken != 0 && shape.taken != kStreams) {
    return "n_taken is " + std::to_string(shape.taken) + ", wanted 0 or 4";
  }
  return OutOfRange("iterations", shape.iterations);
}

inline Plan<HyperConnectionArguments> PlanHyperConnection(const HyperConnectionShape& shape, float eps, float hc_eps,
                                                          const Tiles& tiles, const HyperConnectionAddresses& at) {
  const int64_t clusters = std::max<int64_t>(tiles.processors / tiles.cluster, 1);
  return {.grid = U32(std::min(CeilDiv(shape.tokens, tiles.tile_m), clusters) * tiles.cluster),
          .arguments = {.x = at.x,
                        .y = at.y,
                        .post = at.post,
                        .mix = at.mix,
                        .taken = at.taken,
                        .fn = at.fn,
                        .scale = at.scale,
                        .base = at.base,
                        .norm = at.norm,
                        .new_x = at.new_x,
                        .z = at.z,
                        .new_pre = at.new_pre,
                        .new_post = at.new_post,
                        .new_mix = at.new_mix,
                        .totals = at.totals,
                        .squares = at.squares,
                        .tokens = I32(shape.tokens),
                        .has_taken = I32(shape.taken),
                        .iterations = I32(shape.iterations),
                        .eps = eps,
                        .hc_eps = hc_eps}};
}

}  // namespace dsv4_fmha
