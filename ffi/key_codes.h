// The call that makes codes of e4m3 of a sequence's keys, in rows or in pages, each in a unit of its own.
#pragma once

#include "key_codes_plan.h"
#include "packed_pages.h"
#include "target.h"

namespace dsv4_fmha {

struct KeyCodes {
  static constexpr int64_t kPlain = 528, kWithRope = 656;  // bytes of a key
  using Call = KeyCodesCall;
  using Shape = KeyCodesShape;
  using Kernels = std::array<Launcher*, 1>;

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.b = n.b, .n = n.n, .rows = call.keys.dimensions[0], .page = 1, .page_bytes = 0};
    const bool packed = call.keys.dtype == ffi::U8;
    if (!packed && call.packing.empty()) return ffi::Error::Success();
    for (const Packing& known : kPackings) {
      if (!packed || known.name != call.packing) continue;
      shape->page_bytes = call.keys.dimensions[1];
      shape->page = PackedEntries(known, shape->page_bytes);
      if (shape->page == 0) return Refuse(call.keys, "shape " + Show(call.keys.dimensions), Show(known));
      return ffi::Error::Success();
    }
    return ffi::Error::InvalidArgument("packing: got " + std::string(call.packing));
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape*, Kernels* kernels) {
    const int64_t row_bytes = call.codes.dimensions[2];
    if (row_bytes != kPlain && row_bytes != kWithRope) {
      return Refuse(call.codes, "rows of " + std::to_string(row_bytes) + " bytes",
                    std::to_string(kPlain) + " or " + std::to_string(kWithRope));
    }
    const KeyCodesChoices choices{.dtype = call.packing.empty() ? call.keys.dtype : ffi::BF16,
                                  .packing = call.packing,
                                  .rope = row_bytes == kWithRope};
    return LookUp(call.target->name, device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    Plan<KeyCodesArguments> plan;
    const auto at = AddressesOf<KeyCodesAddresses>(call);
    if (std::string error = PlanKeyCodes(shape, kernels.front()->tile_m, at, &plan); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(call.target->name) + ": " + error);
    }
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
