// The call that says which slots of its caches each query of a step sees.
#pragma once

#include "seen_slots_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct SeenSlots {
  using Call = SeenSlotsCall;
  using Shape = SeenSlotsShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.b = n.b,
              .s_q = n.s_q,
              .window = n.window,
              .ratio = call.ratio,
              .n_position = n.n_position,
              .n_topk_length = n.n_topk_length,
              .n_far = n.n_far,
              .topk = n.topk,
              .of_window = {n.window_width, call.window_room, call.window_page, call.window_pages, call.window_stride},
              .compressed = {n.width, call.room, call.page, call.pages, call.stride}};
    if (n.n_position > 1) {
      return Refuse(call.position, "shape " + Show(call.position.dimensions), "0 or 1 numbers last");
    }
    if (n.n_topk_length > 1) {
      return Refuse(call.topk_length, "shape " + Show(call.topk_length.dimensions), "0 or 1 numbers last");
    }
    if (call.ratio < 0 || call.ratio > kMaxExtent) return ffi::Error::InvalidArgument("ratio: got " + Show(call.ratio));
    const bool all = n.topk == 0 && call.ratio > 0 && n.n_far == call.room;
    if (n.n_far != n.topk && !all) {
      return Refuse(call.far, "shape " + Show(call.far.dimensions),
                    "topk last, or room with a ratio and without indices");
    }
    return ffi::Error::Success();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape*, Kernels* kernels) {
    return LookUp(call.target->name, device, SeenSlotsChoices{}, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    Plan<SeenSlotsArguments> plan;
    const auto at = AddressesOf<SeenSlotsAddresses>(call);
    if (std::string error = PlanSeenSlots(shape, kernels.front()->tile_n, at, &plan); !error.empty()) {
      return ffi::Error::InvalidArgument("seen_slots: " + error);
    }
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
