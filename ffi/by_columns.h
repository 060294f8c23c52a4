// The calls of attention to few queries in the canonical order of sums: to the same operands as those of forward.h, the
// same results, and what the first kernel leaves for the second one.
#pragma once

#include "by_columns_plan.h"
#include "canonical_order.h"
#include "packed_pages.h"
#include "target.h"

namespace dsv4_fmha {

struct ByColumns {
  using Call = ByColumnsCall;
  using Shape = AttentionShape;
  using Kernels = std::array<Launcher*, 2>;  // scores; columns

  static constexpr int64_t kHeadsOfTile = 64;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = AttentionShapeOf(call, n, /*splits=*/1);
    if (ffi::Error error = CheckPacking(call, shape); error.failure()) return error;
    Expectations expect;
    expect.Shape(call.counts, {n.b, n.s_q});
    expect.Shape(call.scores, {n.b, n.s_q, CeilDiv(n.h_q, kHeadsOfTile), n.tiles, kHeadsOfTile * kKeysOfTile});
    return expect.error();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    auto& [scores, columns] = *kernels;
    if (std::string missing = CanonicalOrder::OfNumber(call.order, device); !missing.empty()) {
      return ffi::Error(ffi::ErrorCode::kUnimplemented, missing);
    }
    const RowScoresChoices choices{.d = shape->rows.d, .dtype = call.q.dtype, .packing = call.packing};
    if (ffi::Error error = LookUp(call.target->name, device, choices, &scores); error.failure()) return error;
    return LookUp("row_columns", device, RowColumnsChoices{.d = shape->rows.d, .dtype = call.q.dtype}, &columns);
  }

  // The second launch begins while the first one ends, for which it waits itself.
  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    const auto& [scores, columns] = kernels;
    const auto at = AddressesOf<ByColumnsAddresses>(call);
    const int64_t room = call.scores.dimensions[3];
    Plan<RowScoresArguments> first;
    Plan<RowColumnsArguments> second;
    std::string error = PlanRowScores(shape, room, scores->TilesOn(stream.device), at, &first);
    if (error.empty()) {
      error = PlanRowColumns(shape.rows, room, call.scale, columns->TilesOn(stream.device), at, &second);
    }
    if (!error.empty()) return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    if (ffi::Error failed = Launch(scores, stream, first); failed.failure()) return failed;
    return Launch(columns, stream, second, /*overlaps=*/true);
  }
};

}  // namespace dsv4_fmha
