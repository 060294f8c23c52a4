// The call of head-summed probabilities at given keys, where lse has the sink -> p f32 [b, s_q, topk].
#pragma once

#include "probabilities_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct Probabilities {
  using Call = ProbabilitiesCall;
  using Shape = ProbabilitiesShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call&, const Axes& n, Shape* shape) {
    *shape = {.b = n.b, .s_q = n.s_q, .h_q = n.h_q, .s_kv = n.s_kv, .topk = n.topk};
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape*, Kernels* kernels) {
    const ProbabilitiesChoices choices{.d = call.q.dimensions[3], .dtype = call.q.dtype};
    return LookUp(call.target->name, device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    const auto at = AddressesOf<ProbabilitiesAddresses>(call);
    Plan<ProbabilitiesArguments> plan;
    const int64_t processors = kernels.front()->TilesOn(stream.device).processors;
    if (std::string error = PlanProbabilities(shape, call.scale, processors, at, &plan); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
