// The calls of the gradient of attention over one span, K and V separate -> dq like q, dk and dv like k. One kernel makes
// the gradients of keys and another those of rows, the same bits on every run; or where dq is f32, one makes all, and
// adds to dq / scale in no fixed order. With P = exp(S - lse),
//
//   dS = P * (sink_factor dout V' - delta)    dq = scale dS K    dk = scale dS' Q    dv = (sink_factor P)' dout
//
// Where K is V, k is both, dk is the sum of both gradients, and dv does not exist. In another result, seen i32
// [b, s_q * h_q / h_kv, 2], the first launch tells the second what every tile of rows sees.
//
// A row whose lse is -inf sees no key, and its other numbers are not read.
#pragma once

#include "mha_backward_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct MhaBackward {
  using Call = MhaBackwardCall;
  using Shape = AttentionShape;
  using Kernels = std::array<Launcher*, 3>;  // spans of tiles; gradients of keys, or all; if not all, those of rows

  static bool IsOneKernel(const Call& call) { return call.dq.dtype == ffi::DataType::F32; }

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = AttentionShapeOf(call, n, /*splits=*/1);
    Expectations expect;
    expect.Shape(call.seen, {n.b, n.h_kv == 0 ? 0 : n.s_q * (n.h_q / n.h_kv), 2});
    return expect.error();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    auto& [tile_spans, keys, rows] = *kernels;
    const MhaBackwardChoices choices{.d = shape->rows.d, .dtype = call.q.dtype};
    ffi::Error error = LookUp("tile_spans", device, TileSpansChoices{}, &tile_spans);
    if (error.failure()) return error;
    error = LookUp(IsOneKernel(call) ? "mha_dqdkdv" : "mha_dkdv", device, choices, &keys);
    if (error.failure() || IsOneKernel(call)) return error;
    return LookUp("mha_dq", device, choices, &rows);
  }

  // Kernels add to dq where it is f32; and without queries there is no launch that writes dk and dv.
  static ffi::Error Clear(const Call& call, const Shape& shape, const Stream& stream) {
    if (IsOneKernel(call)) {
      ffi::Error error = Zero(call.dq.data, Elements(call.dq.dimensions), stream);
      if (error.failure()) return error;
    }
    if (shape.rows.b != 0 && shape.rows.s_q != 0) return ffi::Error::Success();
    for (const Operand& x : {call.dk, call.dv}) {
      if (x.data == nullptr) continue;
      const size_t words = Elements(x.dimensions) / 2;
      if (ffi::Error error = Zero(x.data, words, stream); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    const auto& [tile_spans, keys, rows] = kernels;
    const auto at = AddressesOf<MhaBackwardAddresses>(call);
    auto refused = [](const std::string& why) { return ffi::Error::InvalidArgument("mha_bwd: " + why); };
    Plan<TileSpansArguments> spans;
    std::string error = PlanTileSpans(shape.rows, keys->tile_m, tile_spans->tile_n, at, &spans);
    if (!error.empty()) return refused(error);
    if (ffi::Error failed = Launch(tile_spans, stream, spans); failed.failure()) return failed;
    for (Launcher* launcher : {keys, rows}) {
      if (launcher == nullptr) continue;
      Plan<MhaBackwardArguments> plan;
      error = PlanMhaBackward(shape.rows, shape.sources[0].s_kv, call.scale, launcher == keys,
                              launcher->TilesOn(stream.device), at, &plan);
      if (!error.empty()) return refused(error);
      if (ffi::Error failed = Launch(launcher, stream, plan); failed.failure()) return failed;
    }
    return ffi::Error::Success();
  }
};

}  // namespace dsv4_fmha
