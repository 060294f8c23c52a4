// The calls of the lightning indexer's scores at given entries -> scores f32 [b, s_q, topk]; and of their gradients, for
// the cotangent of these scores -> dq like q, dk f32 like k, dweights f32 like weights.
#pragma once

#include "indexer_scores_at_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct IndexerScoresAt {
  using Call = IndexerScoresAtCall;
  using Shape = IndexerScoresAtShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call&, const Axes& n, Shape* shape) {
    *shape = {.b = n.b, .s_q = n.s_q, .s_c = n.s_c, .heads = n.heads, .topk = n.topk};
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const IndexerScoresAtChoices choices{.heads = shape->heads, .dtype = call.q.dtype};
    return LookUp(call.target->name, device, choices, &kernels->front());
  }

  static ffi::Error Clear(const Call& call, const Shape&, const Stream& stream) {
    return call.dk.data == nullptr ? ffi::Error::Success() : Zero(call.dk.data, Elements(call.dk.dimensions), stream);
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckIndexerScoresAtShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(error);
    }
    auto plan = PlanIndexerScoresAt(shape, AddressesOf<IndexerScoresAtAddresses>(call));
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
