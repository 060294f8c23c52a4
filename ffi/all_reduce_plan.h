// The launch that sums an array over devices, and what each device keeps for it: no driver, no device.
#pragma once

#include <algorithm>
#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

struct AllReduceShape {
  int64_t bytes;            // of the array
  int64_t device, devices;  // which one of how many
  int64_t tile_n;           // lines that a CTA takes at a time, one for each thread
  int64_t lines() const { return bytes / 8; }
  int64_t ctas() const { return std::min(CeilDiv(lines(), tile_n), int64_t{128}); }  // few: several sums run at a time
};

// What a device keeps: where its lines go at each device, how many messages each thread has sent, and its inbox.
constexpr int64_t kMostExchanging = 8;  // devices
constexpr int64_t kLineBytes = 16, kMessagesHeld = 2;
constexpr int64_t kMessagesAt = 8 * kMostExchanging;  // bytes from the begin

inline int64_t InboxAt(const AllReduceShape& x) { return kMessagesAt + 4 * x.ctas() * x.tile_n; }

inline int64_t BytesKept(const AllReduceShape& x) {
  return InboxAt(x) + kMessagesHeld * x.devices * x.lines() * kLineBytes;
}

// Where the lines of a device are in the memory that another one keeps.
inline char* Outbox(const AllReduceShape& x, int64_t from, void* memory) {
  return static_cast<char*>(memory) + InboxAt(x) + from * x.lines() * kLineBytes;
}

// Returns why it cannot be: empty if it can.
inline std::string CheckAllReduceShape(const AllReduceShape& x) {
  if (x.devices < 2 || x.devices > kMostExchanging) {
    return "devices is " + std::to_string(x.devices) + ", wanted 2 to " + std::to_string(kMostExchanging);
  }
  if (x.bytes % 8 != 0) return "x has " + std::to_string(x.bytes) + " bytes, wanted a multiple of 8";
  return OutOfRange("n", x.lines());
}

inline Plan<AllReduceArguments> PlanAllReduce(const AllReduceShape& x, void* memory, const AllReduceAddresses& at) {
  char* kept = static_cast<char*>(memory);
  return {.grid = U32(x.ctas()),
          .arguments = {.x = at.x,
                        .y = at.y,
                        .inbox = kept + InboxAt(x),
                        .messages = kept + kMessagesAt,
                        .outboxes = kept,
                        .device = I32(x.device),
                        .devices = I32(x.devices),
                        .lines = I32(x.lines())}};
}

}  // namespace dsv4_fmha
