// The launch of the gradient of attention over latents as a function of shapes: no driver, no device.
#pragma once

#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// What the kernels that norm and turn q are told besides: dO is [groups, b, s_q, heads of a group, d].
struct Turning {
  float eps = 0;
  int64_t dout_heads = 0;
};

// Returns why it cannot plan the launch: empty on success.
inline std::string PlanMlaBackward(const AttentionShape& shape, float scale, const Turning& turning, const Tiles& tiles,
                                   const MlaBackwardAddresses& at, Plan<MlaBackwardArguments>* plan) {
  Tiling n;
  MlaBackwardArguments& x = plan->arguments;
  if (std::string error = CutRows(shape.rows, tiles, &n); !error.empty()) return error;
  if (std::string error = BadScale(scale); !error.empty()) return error;
  for (int i = 0; i < shape.source_count; ++i) {
    std::string error = SetSource(shape.rows, tiles, shape.sources[i], at.sources[i], i == 0, &x.sources[i]);
    if (!error.empty()) return error;
    x.sources[i].dkv = at.sources[i].dkv;
  }
  plan->grid = n.grid;
  SetTiling(shape.rows, n, &x);
  x.q = at.q, x.dout = at.dout, x.dq = at.dq;
  x.lse = at.lse, x.sink_factor = at.sink_factor, x.delta = at.delta, x.resolution = at.resolution;
  x.scale = scale;
  x.table = at.table, x.eps = turning.eps;
  x.dout_heads = static_cast<int32_t>(turning.dout_heads);
  x.dout_queries = static_cast<int32_t>(shape.rows.b * shape.rows.s_q);
  return "";
}

}  // namespace dsv4_fmha
