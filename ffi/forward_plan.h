// The launches of attention as functions of shapes: no driver, no device.
#pragma once

#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// Returns why it cannot plan the launch: empty on success.
inline std::string PlanForward(const AttentionShape& shape, float scale, float eps, const Tiles& tiles,
                               const ForwardAddresses& at, Plan<ForwardArguments>* plan) {
  Tiling n;
  ForwardArguments& x = plan->arguments;
  if (std::string error = CutRows(shape.rows, tiles, &n); !error.empty()) return error;
  if (std::string error = BadScale(scale); !error.empty()) return error;
  for (int i = 0; i < shape.source_count; ++i) {
    std::string error = SetSource(shape.rows, tiles, shape.sources[i], at.sources[i], i == 0, &x.sources[i]);
    if (!error.empty()) return error;
  }
  plan->grid = n.grid;
  SetTiling(shape.rows, n, &x);
  x.q = Rows(shape.rows, n, shape.rows.d, at.q);
  x.o = Rows(shape.rows, n, shape.rows.d_v, at.o);
  x.sink = at.sink;
  x.lse = shape.rows.splits > 1 ? at.lse_parts : at.lse;
  x.o_parts = at.o_parts;
  x.scale_log2 = static_cast<float>(scale * 1.4426950408889634);  // log2(e)
  x.table = at.table;
  x.eps = eps;
  return "";
}

// The launch that merges the partial results of a forward launch's splits.  A thread merges `columns` of a row.
//
// Its CTAs begin before that launch ends, on processors that have no CTA of it.  Where there are two to four for each
// processor of the chip, shared memory that nobody uses keeps those from taking more; fewer find room anyhow.
inline Plan<CombineArguments> PlanCombine(const RowShape& shape, int32_t threads, int32_t columns, int32_t processors,
                                          const ForwardAddresses& at) {
  const int64_t rows = shape.b * shape.s_q * shape.h_q;
  const int64_t ctas = CeilDiv(rows * (shape.d_v / columns), threads);
  const bool spreads = 2 * processors < ctas && ctas <= 4 * processors;
  return {.grid = U32(ctas),
          .arguments = {.o_parts = at.o_parts,
                        .lse_parts = at.lse_parts,
                        .o = at.o,
                        .sink = at.sink,
                        .lse = at.lse,
                        .rows = I32(rows),
                        .h_q = I32(shape.h_q),
                        .d = I32(shape.d_v),
                        .splits = I32(shape.splits)},
          .least_smem_bytes = spreads ? kSpreadSmemBytes : 0};
}

}  // namespace dsv4_fmha
