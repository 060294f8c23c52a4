// The call of the gradient of hyper-connections: numbers of each token, then the gradients of its streams.
#pragma once

#include "hyper_connection_bwd_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct HyperConnectionBwd {
  using Call = HyperConnectionBwdCall;
  using Shape = HyperConnectionShape;
  using Kernels = std::array<Launcher*, 2>;  // numbers, streams

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.tokens = n.b * n.s_q, .hidden = n.hidden, .taken = n.n_taken, .iterations = call.iterations};
    if (n.parts == kParts && n.walks > 0 && n.walks <= kMaxExtent / kParts) return ffi::Error::Success();
    const Operand& wrong = n.parts == kParts ? call.dnorm : call.shares;
    return Refuse(wrong, "shape " + Show(wrong.dimensions), n.parts == kParts ? "some rows" : Show(kParts) + " first");
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    static constexpr std::string_view kNames[] = {"numbers", "streams"};
    for (size_t i = 0; i < kernels->size(); ++i) {
      const HyperConnectionBwdChoices choices{.hidden = shape->hidden, .dtype = call.x.dtype, .part = kNames[i]};
      ffi::Error error = LookUp("hyper_connection_bwd", device, choices, &(*kernels)[i]);
      if (error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    const auto& [numbers, streams] = kernels;
    if (std::string error = CheckHyperConnectionBwdShape(shape, numbers->tile_n); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<HyperConnectionBwdAddresses>(call);
    for (Launcher* launcher : {numbers, streams}) {
      const int64_t walks = launcher == streams ? call.dnorm.dimensions[0] : 0;
      auto plan = PlanHyperConnectionBwd(shape, walks, call.eps, call.hc_eps, launcher->tile_m, at);
      if (ffi::Error failed = Launch(launcher, stream, plan); failed.failure()) return failed;
    }
    return ffi::Error::Success();
  }
};

}  // namespace dsv4_fmha
