// The call of hyper-connections between two sublayers.
#pragma once

#include "hyper_connection_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct HyperConnection {
  using Call = HyperConnectionCall;
  using Shape = HyperConnectionShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.tokens = n.b * n.s_q, .hidden = n.hidden, .taken = n.n_taken, .iterations = call.iterations};
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const HyperConnectionChoices choices{.hidden = shape->hidden, .dtype = call.x.dtype};
    return LookUp("hyper_connection", device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckHyperConnectionShape(shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    const auto at = AddressesOf<HyperConnectionAddresses>(call);
    const Launcher::Loaded loaded = kernels.front()->Load(stream.ordinal);
    if (!loaded.error.empty()) return ffi::Error::Internal(loaded.error);
    Tiles tiles = kernels.front()->TilesOn(stream.device);
    tiles.processors = loaded.clusters * tiles.cluster;  // at most: not all are in groups of eight
    auto plan = PlanHyperConnection(shape, call.eps, call.hc_eps, tiles, at);
    return Launch(kernels.front(), stream, plan);  // which reads fn at once: it may not overlap what makes that
  }
};

}  // namespace dsv4_fmha
