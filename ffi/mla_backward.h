// The calls of the gradient of attention over latents, which are K and V: over the keys of one or two sources -> dq like
// q, and for each source dkv, f32 like its keys. Where resolution, f32 [n], has numbers, one for every key, one source
// after the other, the sums of dkv are in fixed point, u32 like the keys, with so many units to 1 for each number of a
// key, and do not depend on order. With P = exp(S - lse),
//
//   dS = scale P * (sink_factor dout K' - delta)        dq = dS K        dkv = dS' Q + (sink_factor P)' dout
//
// Calls that are named so turn q and dout: q comes before its norm and RoPE, dq is of that, and dout is [groups, b, s_q,
// heads of a group, d], as a product over groups of heads makes it.
//
// Calls that are named so bound dkv instead. For each key they add up, rounded upwards with `resolution` units to 1,
//
//   P (|scale (sink_factor dout K' - delta)| + most_of_p)
//
// over all rows, in 64 bits. The highest is set where what is added is not finite.
//
// A row whose lse is -inf sees no key, and its other numbers are not read.
#pragma once

#include <vector>

#include "mla_backward_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct MlaBackward {
  using Call = MlaBackwardCall;
  using Shape = AttentionShape;
  using Kernels = std::array<Launcher*, 1>;

  static bool IsDeterministic(const Call& call) { return call.resolution.dimensions[0] != 0; }

  static bool IsBounds(const Call& call) { return call.dq.name == nullptr; }

  static bool IsGrouped(const Call& call) { return call.dout.dimensions.size() == 5; }

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = AttentionShapeOf(call, n, /*splits=*/1);
    Expectations expect;
    if (IsGrouped(call)) {
      const int64_t heads = n.group_heads > 0 && n.h_q % n.group_heads == 0 ? n.group_heads : 1;
      expect.Shape(call.dout, {n.h_q / heads, n.b, n.s_q, heads, n.d});
    }
    int64_t keys = 0;
    for (int64_t i = 0; i < shape->source_count; ++i) {
      const Operand &k = call.sources[i].k, &dkv = call.sources[i].dkv;
      std::vector<int64_t> sums(k.dimensions.begin(), k.dimensions.end());
      if (IsBounds(call)) sums.back() = 2;
      expect.Shape(dkv, Ints(sums.data(), sums.size()));
      expect.Dtype(dkv, IsDeterministic(call) ? ffi::U32 : ffi::F32);
      keys += Elements(Ints(k.dimensions.begin(), k.dimensions.size() - 1));
    }
    if (IsDeterministic(call)) expect.Shape(call.resolution, {IsBounds(call) ? 1 : keys});
    return expect.error();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const MlaBackwardChoices choices{.d = shape->rows.d,
                                     .dtype = call.q.dtype,
                                     .deterministic = IsDeterministic(call),
                                     .max_heads = shape->rows.h_q};
    return LookUp(call.target->name, device, choices, &kernels->front());
  }

  static ffi::Error Clear(const Call& call, const Shape& shape, const Stream& stream) {
    for (int64_t i = 0; i < shape.source_count; ++i) {
      const Operand& x = call.sources[i].dkv;
      if (ffi::Error error = Zero(x.data, Elements(x.dimensions), stream); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    Launcher* launcher = kernels.front();
    const auto at = AddressesOf<MlaBackwardAddresses>(call);
    Plan<MlaBackwardArguments> plan;
    const Turning turning{call.eps, IsGrouped(call) ? call.dout.dimensions[3] : shape.rows.h_q};
    std::string error = PlanMlaBackward(shape, call.scale, turning, launcher->TilesOn(stream.device), at, &plan);
    if (!error.empty()) return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    return Launch(launcher, stream, plan);
  }
};

}  // namespace dsv4_fmha
