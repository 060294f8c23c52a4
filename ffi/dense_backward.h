// Every call of the gradient of attention over one span, K and V apart: check the operands, look its kernels up, launch
// them.
//
// q and dout [b, s_q, h_q, d], lse, weight and delta f32 [b, s_q, h_q], k and v [b, s_kv, h_kv, d], start and stop i32
// [b, s_q] -> dq like q, dk and dv like k. One kernel makes the gradients of keys and another those of rows, the same
// bits on every run; or where dq is f32, one makes all, and adds to dq / scale in no fixed order. With P = exp(S - lse),
//
//   dS = P * (weight dout V' - delta)        dq = scale dS K        dk = scale dS' Q        dv = (weight P)' dout
//
// Where K is V, k is both, dk is the sum of both gradients, and v and dv do not exist. In another result, seen i32
// [b, s_q * h_q / h_kv, 2], the first launch tells the second what every tile of rows sees.
//
// A row whose lse is -inf sees no key, and its other numbers are not read.
#pragma once

#include <type_traits>

#include "dense_backward_plan.h"
#include "launch.h"
#include "operands.h"

namespace dsv4_fmha {

template <bool shared_kv>
struct DenseBackward {
  const char* op;
  Operand q, dout, lse, weight, delta;
  Sources sources;
  float scale;
  Operand dq{}, dk{}, dv{}, seen{};

  using Gradient = ffi::Result<ffi::AnyBuffer>;
  using Seen = ffi::Result<ffi::Buffer<ffi::S32, 3>>;
  using Results =
      std::conditional_t<shared_kv, TypeList<Gradient, Gradient, Seen>, TypeList<Gradient, Gradient, Gradient, Seen>>;

  template <typename Dq, typename Dk, typename... Rest>
  void Give(Dq& to_dq, Dk& to_dk, Rest&... rest) {
    dq = {"dq", *to_dq}, dk = {"dk", *to_dk};
    GiveRest(rest...);
  }
  template <typename Dv, typename S>
  void GiveRest(Dv& to_dv, S& to_seen) {
    dv = {"dv", *to_dv};
    GiveRest(to_seen);
  }
  template <typename S>
  void GiveRest(S& to_seen) {
    seen = {"seen", *to_seen};
  }

  // Decoding has checked the ranks and dtypes of start, stop, lse, weight, delta and seen.
  ffi::Error Check(AttentionShape* shape) const {
    ffi::Error error = CheckAttention(q, sources, /*kv_heads=*/true, /*splits=*/1, shape);
    if (error.failure()) return error;
    const auto& [b, s_q, h_q, h_kv, d, splits, type] = shape->rows;
    Expectations expect;
    expect.Aligned(q);
    auto like = [&](const Operand& x, const Operand& of) {
      expect.Aligned(x);
      expect.Shape(x, of.dimensions);
      expect.DtypeOf(q, x);
    };
    like(dout, q);
    expect.Aligned(dq);
    expect.Shape(dq, q.dimensions);
    if (!Adds()) expect.DtypeOf(q, dq);
    like(dk, sources.items[0].k);
    if (!shared_kv) like(dv, sources.items[0].k);
    for (const Operand& x : {lse, weight, delta}) expect.Shape(x, {b, s_q, h_q});
    expect.Aligned(seen);
    expect.Shape(seen, {b, h_kv == 0 ? 0 : s_q * (h_q / h_kv), 2});
    return expect.error();
  }

  bool Adds() const { return dq.dtype == ffi::DataType::F32; }

  struct Kernels {
    Launcher* tile_spans = nullptr;
    Launcher* keys = nullptr;
    Launcher* rows = nullptr;  // none where that of keys makes all
  };

  ffi::Error Find(const Device& device, const AttentionShape& shape, Kernels* kernels) const {
    const MhaBackwardChoices call{.d = shape.rows.d, .dtype = q.dtype};
    ffi::Error error = LookUp("tile_spans", device, TileSpansChoices{}, &kernels->tile_spans);
    if (error.failure()) return error;
    error = LookUp(Adds() ? "mha_dqdkdv" : "mha_dkdv", device, call, &kernels->keys);
    if (error.failure() || Adds()) return error;
    return LookUp("mha_dq", device, call, &kernels->rows);
  }

  ffi::Error Initialize(int ordinal) const {
    AttentionShape shape;
    Kernels kernels;
    if (ffi::Error error = Check(&shape); error.failure()) return error;
    if (ffi::Error error = Find(GetDevice(ordinal), shape, &kernels); error.failure()) return error;
    if (Adds()) return Load(ordinal, {kernels.tile_spans, kernels.keys});
    return Load(ordinal, {kernels.tile_spans, kernels.keys, kernels.rows});
  }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    AttentionShape shape;
    Kernels kernels;
    if (ffi::Error error = Check(&shape); error.failure()) return error;
    if (shape.rows.b == 0 || shape.rows.s_q == 0) {
      for (const Operand& x : {dk, dv}) {
        if (x.data == nullptr) continue;
        const size_t words = Elements(x.dimensions) / 2;
        if (ffi::Error error = Zero(x.data, words, stream); error.failure()) return error;
      }
      return ffi::Error::Success();
    }
    const Device& device = GetDevice(ordinal);
    if (ffi::Error error = Find(device, shape, &kernels); error.failure()) return error;
    const Source& source = sources.items[0];
    const DenseBackwardAddresses at{.q = q.data,
                                    .dout = dout.data,
                                    .k = source.k.data,
                                    .v = source.v.data,
                                    .lse = lse.data,
                                    .weight = weight.data,
                                    .delta = delta.data,
                                    .start = source.from.data,
                                    .stop = source.to.data,
                                    .seen = seen.data,
                                    .dq = dq.data,
                                    .dk = dk.data,
                                    .dv = shared_kv ? nullptr : dv.data,
                                    .sums = Adds() ? dq.data : nullptr};
    auto refused = [&](const std::string& why) { return ffi::Error::InvalidArgument(std::string(op) + ": " + why); };
    Plan<TileSpansArguments> spans;
    std::string error = PlanTileSpans(shape.rows, kernels.keys->tile_m, kernels.tile_spans->tile_n, at, &spans);
    if (!error.empty()) return refused(error);
    if (ffi::Error failed = Launch(kernels.tile_spans, stream, ordinal, spans); failed.failure()) return failed;
    if (Adds()) {
      if (ffi::Error error = Zero(dq.data, Elements(dq.dimensions), stream); error.failure()) return error;
    }
    for (Launcher* launcher : {kernels.keys, kernels.rows}) {
      if (launcher == nullptr) continue;
      Plan<MhaBackwardArguments> plan;
      error = PlanDenseBackward(shape.rows, shape.sources[0].s_kv, scale, launcher == kernels.keys,
                                launcher->TilesOn(device), at, &plan);
      if (!error.empty()) return refused(error);
      if (ffi::Error failed = Launch(launcher, stream, ordinal, plan); failed.failure()) return failed;
    }
    return ffi::Error::Success();
  }
};

}  // namespace dsv4_fmha
