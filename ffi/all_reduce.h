// The call that sums an array over the devices of a process.
#pragma once

#include "all_reduce_plan.h"
#include "exchange.h"
#include "target.h"

namespace dsv4_fmha {

struct AllReduce {
  using Call = AllReduceCall;
  using Shape = AllReduceShape;
  using Kernels = std::array<Launcher*, 1>;
  using State = Exchange;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.bytes = n.n * static_cast<int64_t>(ffi::ByteWidth(call.x.dtype)),
              .device = 0,
              .devices = call.devices,
              .tile_n = 1};
    if (std::string error = CheckAllReduceShape(*shape); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    Launcher*& found = kernels->front();
    ffi::Error error = LookUp("all_reduce", device, AllReduceChoices{.dtype = call.x.dtype}, &found);
    if (error.success()) shape->tile_n = found->tile_n;
    return error;
  }

  // Before the first launch of a device: its memory and the way to that of the others.
  static ffi::Error Prepare(const Shape& shape, int ordinal, State* state) { return state->Join(shape, ordinal); }

  static ffi::Error Run(const Call& call, Shape shape, const Kernels& kernels, const Stream& stream, State* state) {
    const Exchange::Member own = state->Of(stream.ordinal);
    if (own.memory == nullptr) return ffi::Error::Internal("all_reduce: a device launches before it has joined");
    shape.device = own.number;
    auto plan = PlanAllReduce(shape, own.memory, AddressesOf<AllReduceAddresses>(call));
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
