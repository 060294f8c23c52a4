// The calls of attention, over the keys of one or more sources -> o like q, as wide as values are, and lse f32
// [b, s_q, h_q]. The sink is part of o, never of lse.
//
// Two more results say whether the keys of a row are split: o_parts f32 [n, s_q, h_q, splits, d] and lse_parts f32
// [n, s_q, h_q, splits] hold the partial results of the last n sequences, which a second kernel merges.  The keys of the
// sequences before them are whole, in a launch of their own.  With 0 or 1 splits there are no partial results.
//
// Calls that are named so turn q and o: q comes before its norm and RoPE, and o_parts are turned back already.
#pragma once

#include "canonical_order.h"
#include "forward_plan.h"
#include "packed_pages.h"
#include "target.h"

namespace dsv4_fmha {

struct Forward {
  using Call = ForwardCall;
  using Shape = AttentionShape;
  using Kernels = std::array<Launcher*, 2>;  // attention; where keys are split, the merge of its parts

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = AttentionShapeOf(call, n, std::max<int64_t>(n.splits, 1));
    shape->rows.d_v = call.o.dimensions[3];
    if (ffi::Error error = CheckPacking(call, shape); error.failure()) return error;
    Expectations expect;
    const int64_t split = std::min(std::max<int64_t>(n.b_split, 1), n.b);
    expect.Shape(call.o_parts, {split, n.s_q, n.h_q, n.splits, shape->rows.d_v});
    return expect.error();
  }

  // A kernel that does not split keys gets all of them.
  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    RowShape& rows = shape->rows;
    auto& [forward, combine] = *kernels;
    if (std::string missing = CanonicalOrder::Missing(call, rows, device); !missing.empty()) {
      return ffi::Error(ffi::ErrorCode::kUnimplemented, missing);
    }
    const ForwardChoices choices{.d = rows.d, .dtype = call.q.dtype, .packing = call.packing, .max_heads = rows.h_q};
    if (ffi::Error error = LookUp(call.target->name, device, choices, &forward); error.failure()) return error;
    if (!forward->splits) rows.splits = 1;
    if (rows.splits == 1) return ffi::Error::Success();
    return LookUp("combine", device, CombineChoices{.dtype = call.q.dtype}, &combine);
  }

  static ffi::Error Run(const Call& call, Shape shape, const Kernels& kernels, const Stream& stream) {
    const int64_t b = shape.rows.b, splits = shape.rows.splits;
    const int64_t split = splits > 1 ? call.lse_parts.dimensions[0] : b;
    if (split < b) {
      shape.rows.b = b - split, shape.rows.splits = 1;
      if (ffi::Error error = Attend(call, shape, kernels, stream, 0); error.failure()) return error;
      shape.rows.b = split, shape.rows.splits = splits;
    }
    return Attend(call, shape, kernels, stream, b - split);
  }

  // The launches for shape.rows.b sequences from `first` on. Where keys are gathered, they begin while the launch for
  // the sequences before them ends: it writes nothing that they touch, and those kernels wait for it at their end.
  static ffi::Error Attend(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream,
                           int64_t first) {
    const auto& [forward, combine] = kernels;
    const auto at = AddressesOf<ForwardAddresses>(call, first);
    Plan<ForwardArguments> plan;
    const Tiles tiles = forward->TilesOn(stream.device);
    if (std::string error = PlanForward(shape, call.scale, call.eps, tiles, at, &plan); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    ffi::Error error = Launch(forward, stream, plan, /*overlaps=*/first > 0 && tiles.gathers);
    if (error.failure() || shape.rows.splits == 1) return error;
    auto merge = PlanCombine(shape.rows, combine->threads, combine->tile_n, stream.device.processors, at);
    return Launch(combine, stream, merge, /*overlaps=*/true);
  }
};

}  // namespace dsv4_fmha
