// The order of sums that calls may ask for.
#pragma once

#include <algorithm>
#include <string>

#include "calls.h"
#include "registry.h"

namespace dsv4_fmha {

// The order of sums in which the bits of a query's results depend on its own operands alone (docs/bits.md).
struct CanonicalOrder {
  static constexpr int64_t kNumber = 2;
  static constexpr std::string_view kArch = "sm_90a";
  static constexpr std::string_view kTargets[] = {"mha_fwd",     "mla_sparse_fwd",      "csa_fwd",
                                                  "hca_fwd",     "mla_span_fwd",        "mla_span_fwd_few_heads",
                                                  "dsv4_decode", "mla_sparse_fwd_v512", "mla_span_fwd_v512"};
  // Targets whose kernels have the order only where a tile of rows has heads of one query.
  static constexpr std::string_view kOfTiles[] = {"hca_fwd", "mla_span_fwd", "mla_span_fwd_v512"};
  static constexpr int64_t kTile = 64;  // heads

  // Why there is no order of this number on a device; empty where there is. 0 is any order.
  static std::string OfNumber(int64_t number, const Device& device) {
    if (number == 0 || !device.error.empty()) return "";
    const std::string got = "order: got " + std::to_string(number);
    if (number != kNumber) return got + ", wanted " + std::to_string(kNumber) + ", which this library has, or 0";
    return device.arch == kArch ? "" : got + " on " + device.arch + ", wanted " + std::string(kArch);
  }

  // Why a call has not the order that it asks for; empty where it has.
  static std::string Missing(const ForwardCall& call, const RowShape& rows, const Device& device) {
    if (call.order == 0) return "";
    if (std::string error = OfNumber(call.order, device); !error.empty()) return error;
    const std::string got = "order: got " + std::to_string(call.order);
    auto is_of = [&](const auto& targets) {
      return std::find(std::begin(targets), std::end(targets), call.target->name) != std::end(targets);
    };
    if (!is_of(kTargets)) return got + " of " + call.target->name + ", wanted a call whose kernels have it";
    if (is_of(kOfTiles) && (rows.h_kv != 1 || rows.h_q % kTile != 0)) {
      return got + " of " + call.target->name + " with " + std::to_string(rows.h_q) + " heads and " +
             std::to_string(rows.h_kv) + " KV heads, wanted a multiple of " + std::to_string(kTile) + ", and 1";
    }
    return rows.splits > 1 ? got + " with " + std::to_string(rows.splits) + " splits, wanted whole keys" : "";
  }
};

}  // namespace dsv4_fmha
