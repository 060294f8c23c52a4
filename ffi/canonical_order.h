// The order of sums that calls may ask for.
#pragma once

#include <algorithm>
#include <string>

#include "calls.h"
#include "registry.h"

namespace dsv4_fmha {

// The order of sums in which the bits of a query's results depend on its own operands alone (docs/semantics.md).
struct CanonicalOrder {
  static constexpr int64_t kNumber = 2;
  static constexpr std::string_view kArch = "sm_90a";
  static constexpr std::string_view kTargets[] = {"mha_fwd", "mla_sparse_fwd", "csa_fwd", "dsv4_decode"};

  // Why there is no order of this number on a device; empty where there is. 0 is any order.
  static std::string OfNumber(int64_t number, const Device& device) {
    if (number == 0 || !device.error.empty()) return "";
    const std::string got = "order: got " + std::to_string(number);
    if (number != kNumber) return got + ", wanted " + std::to_string(kNumber) + ", which this library has, or 0";
    return device.arch == kArch ? "" : got + " on " + device.arch + ", wanted " + std::string(kArch);
  }

  // Why a call has not the order that it asks for; empty where it has.
  static std::string Missing(const ForwardCall& call, int64_t splits, const Device& device) {
    if (call.order == 0) return "";
    if (std::string error = OfNumber(call.order, device); !error.empty()) return error;
    const std::string got = "order: got " + std::to_string(call.order);
    if (std::find(std::begin(kTargets), std::end(kTargets), call.target->name) == std::end(kTargets)) {
      return got + " of " + call.target->name + ", wanted a call whose kernels have it";
    }
    return splits > 1 ? got + " with " + std::to_string(splits) + " splits, wanted whole keys" : "";
  }
};

}  // namespace dsv4_fmha
