// The launch of attention's gradient as a function of shapes: no driver, no device.
#pragma once

#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// Where the arrays of a call are.
struct BackwardAddresses {
  void *q, *dout, *dq;
  void *lse, *weight, *delta;  // f32 [b, s_q, h_q]
  void* resolution;            // f32 [1] where sums are in fixed point
  SourceAddresses sources[kMaxSources];
  void* dkv[kMaxSources];  // like the keys: the kernel adds to it
};

// Returns why it cannot plan the launch: empty on success.
inline std::string PlanBackward(const AttentionShape& shape, float scale, const Tiles& tiles,
                                const BackwardAddresses& at, Plan<MlaBackwardArguments>* plan) {
  Tiling n;
  MlaBackwardArguments& x = plan->arguments;
  if (std::string error = CutRows(shape.rows, tiles, &n); !error.empty()) return error;
  if (std::string error = BadScale(scale); !error.empty()) return error;
  for (int i = 0; i < shape.source_count; ++i) {
    std::string error = SetSource(shape.rows, tiles, shape.sources[i], at.sources[i], i == 0, &x.sources[i]);
    if (!error.empty()) return error;
    x.sources[i].dkv = at.dkv[i];
  }
  plan->grid = n.grid;
  SetTiling(shape.rows, n, &x);
  x.q = at.q, x.dout = at.dout, x.dq = at.dq;
  x.lse = at.lse, x.weight = at.weight, x.delta = at.delta, x.resolution = at.resolution;
  x.scale = scale;
  return "";
}

}  // namespace dsv4_fmha
