// Every call of attention's gradient: check the operands, look its kernel up, clear what it adds to, launch it.
//
// q and dout [b, s_q, h_q, d], lse, weight and delta f32 [b, s_q, h_q], over the keys of `count` sources (operands.h)
// -> dq like q, and for each source dkv, f32 like its keys. Where resolution, f32 [n], has a number, the sums of dkv
// are in fixed point, u32 [..., 2] like the keys, with `resolution` units to 1, and do not depend on order. With P =
// exp(S - lse),
//
//   dS = scale P * (weight dout K' - delta)        dq = dS K        dkv = dS' Q + (weight P)' dout
//
// A row whose lse is -inf sees no key, and its other numbers are not read.
#pragma once

#include <vector>

#include "backward_plan.h"
#include "launch.h"
#include "operands.h"

namespace dsv4_fmha {

template <int count>
struct Backward {
  const char* op;
  bool shared_kv;  // one array is K and V
  bool kv_heads;   // keys are [b, s_kv, h_kv, d], not [b, s_kv, d]
  Operand q, dout, lse, weight, delta, resolution;
  Sources sources;
  float scale;
  Operand dq{}, dkv[count]{};

  template <int, typename Type>
  using Repeat = Type;
  template <typename>
  struct ResultsOf;
  template <int... i>
  struct ResultsOf<std::integer_sequence<int, i...>> {
    using Type = TypeList<ffi::Result<ffi::AnyBuffer>, Repeat<i, ffi::Result<ffi::AnyBuffer>>...>;
  };
  using Results = typename ResultsOf<std::make_integer_sequence<int, count>>::Type;

  template <typename Dq, typename... Dkv>
  void Give(Dq& to_dq, Dkv&... to_dkv) {
    dq = {"dq", *to_dq};
    int i = 0;
    ((dkv[i++] = {"dkv", *to_dkv}), ...);
  }

  bool deterministic() const { return resolution.dimensions[0] != 0; }

  // Decoding has checked the ranks and dtypes of start, stop, indices, length, lse, weight, delta and resolution.
  ffi::Error Check(AttentionShape* shape) const {
    ffi::Error error = CheckAttention(q, sources, kv_heads, /*splits=*/1, shape);
    if (error.failure()) return error;
    Expectations expect;
    expect.Aligned(q);
    for (const Operand& x : {dout, dq}) {
      expect.Aligned(x);
      expect.Shape(x, q.dimensions);
      expect.DtypeOf(q, x);
    }
    for (const Operand& x : {lse, weight, delta}) expect.Shape(x, {q.dimensions.begin(), 3});
    for (int i = 0; i < count; ++i) {
      const Ints keys = sources.items[i].k.dimensions;
      std::vector<int64_t> sums(keys.begin(), keys.end());
      if (deterministic()) sums.push_back(2);
      expect.Shape(dkv[i], Ints(sums.data(), sums.size()));
      expect.Dtype(dkv[i], deterministic() ? ffi::U32 : ffi::F32);
      expect.Aligned(dkv[i]);
    }
    return expect.error();
  }

  ffi::Error Find(const Device& device, const AttentionShape& shape, Launcher** launcher) const {
    const RowShape& rows = shape.rows;
    const MlaBackwardChoices call{
        .d = rows.d, .dtype = q.dtype, .deterministic = deterministic(), .max_heads = rows.h_q};
    return LookUp(op, device, call, launcher);
  }

  ffi::Error Initialize(int ordinal) const {
    AttentionShape shape;
    Launcher* launcher = nullptr;
    if (ffi::Error error = Check(&shape); error.failure()) return error;
    if (ffi::Error error = Find(GetDevice(ordinal), shape, &launcher); error.failure()) return error;
    return Load(ordinal, {launcher});
  }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    AttentionShape shape;
    Launcher* launcher = nullptr;
    if (ffi::Error error = Check(&shape); error.failure()) return error;
    for (const Operand& x : dkv) {
      if (ffi::Error error = Zero(x.data, Elements(x.dimensions), stream); error.failure()) return error;
    }
    if (shape.rows.b == 0 || shape.rows.s_q == 0) return ffi::Error::Success();
    const Device& device = GetDevice(ordinal);
    if (ffi::Error error = Find(device, shape, &launcher); error.failure()) return error;
    BackwardAddresses at{.q = q.data,
                         .dout = dout.data,
                         .dq = dq.data,
                         .lse = lse.data,
                         .weight = weight.data,
                         .delta = delta.data,
                         .resolution = resolution.data,
                         .sources = {},
                         .dkv = {}};
    for (int i = 0; i < count; ++i) at.sources[i] = sources.items[i].at(), at.dkv[i] = dkv[i].data;
    Plan<MlaBackwardArguments> plan;
    if (std::string error = PlanBackward(shape, scale, launcher->TilesOn(device), at, &plan); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(op) + ": " + error);
    }
    return Launch(launcher, stream, ordinal, plan);
  }
};

}  // namespace dsv4_fmha
