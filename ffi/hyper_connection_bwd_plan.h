// The launches of the gradient of hyper-connections, as a function of shapes: no driver, no device.
#pragma once

#include <string>

#include "hyper_connection_plan.h"

namespace dsv4_fmha {

constexpr int64_t kParts = 16;  // CTAs that share out the channels

// Returns why it cannot be, for kernels that keep the sums of so many iterations: empty if it can.
inline std::string CheckHyperConnectionBwdShape(const HyperConnectionShape& shape, int64_t most_iterations) {
  if (shape.iterations > most_iterations) return TooLarge("iterations", shape.iterations, most_iterations);
  return CheckHyperConnectionShape(shape);
}

// The kernel that makes gradients of streams, by so many CTAs that share out the tokens; or without any the one that
// makes numbers, by CTAs of tile_m tokens.
inline Plan<HyperConnectionBwdArguments> PlanHyperConnectionBwd(const HyperConnectionShape& shape, int64_t walks,
                                                                float eps, float hc_eps, int32_t tile_m,
                                                                const HyperConnectionBwdAddresses& at) {
  return {.grid = U32(walks > 0 ? kParts * walks : CeilDiv(shape.tokens, tile_m)),
          .arguments = {.new_x = at.new_x,
                        .dz = at.dz,
                        .norm = at.norm,
                        .totals = at.totals,
                        .squares = at.squares,
                        .scale = at.scale,
                        .base = at.base,
                        .taken = at.taken,
                        .dnew_pre = at.dnew_pre,
                        .dnew_post = at.dnew_post,
                        .dnew_mix = at.dnew_mix,
                        .numbers = at.numbers,
                        .dtaken = at.dtaken,
                        .tokens = I32(shape.tokens),
                        .has_taken = I32(shape.taken),
                        .iterations = I32(shape.iterations),
                        .eps = eps,
                        .hc_eps = hc_eps,
                        .x = at.x,
                        .y = at.y,
                        .post = at.post,
                        .mix = at.mix,
                        .fn = at.fn,
                        .dnew_x = at.dnew_x,
                        .dx = at.dx,
                        .dy = at.dy,
                        .shares = at.shares,
                        .dnorm = at.dnorm}};
}

}  // namespace dsv4_fmha
