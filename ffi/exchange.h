// What the devices of a process keep to exchange messages: one such state for each all-reduce of a compiled program, so
// that two which run at the same time do not take each other's messages.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "all_reduce_plan.h"
#include "launch.h"

namespace dsv4_fmha {

class Exchange {
 public:
  static ffi::TypeId id;  // XLA sets it

  struct Member {
    void* memory = nullptr;  // as BytesKept says
    int64_t number = 0;      // of this device among those that take part, in the order of their ordinals
    bool has_ways = false;   // whether it knows the memory of the others
  };

  ~Exchange() {
    for (auto& [ordinal, member] : members_) {
      if (member.memory != nullptr && Enter(ordinal).empty()) {
        GetDriver().MemFree(member.memory);
        Leave();
      }
    }
  }

  // The first time, makes a device's memory, waits for that of the others, and finds the ways there. All devices begin
  // a program at about the same time, so the wait is short; after kPatience it is an error.
  ffi::Error Join(const AllReduceShape& shape, int ordinal) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (members_[ordinal].has_ways) return ffi::Error::Success();
    if (members_[ordinal].memory == nullptr && error_.empty()) {
      error_ = Make(shape, ordinal, &members_[ordinal].memory);
      changed_.notify_all();
    }
    const bool in_time =
        changed_.wait_for(lock, kPatience, [&] { return !error_.empty() || Present() == shape.devices; });
    if (error_.empty() && !in_time) {
      error_ = "got " + std::to_string(Present()) + " devices after a minute, wanted all " +
               std::to_string(shape.devices) + " of the mesh";
    }
    if (error_.empty()) error_ = FindWays(shape, ordinal);
    if (error_.empty()) return ffi::Error::Success();
    return ffi::Error::Internal("all_reduce: " + error_);
  }

  Member Of(int ordinal) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = members_.find(ordinal);
    return found == members_.end() || !found->second.has_ways ? Member{} : found->second;
  }

 private:
  static constexpr auto kPatience = std::chrono::seconds(60);

  int64_t Present() const {
    return std::count_if(members_.begin(), members_.end(), [](auto& x) { return x.second.memory != nullptr; });
  }

  // Makes a device's context the current one. Returns why it cannot.
  static std::string Enter(int ordinal, CUcontext* context = nullptr) {
    const Driver& driver = GetDriver();
    CUdevice device;
    CUcontext found;
    std::string error = driver.Failure("cuDeviceGet", driver.DeviceGet(&device, ordinal));
    if (error.empty()) {
      error = driver.Failure("cuDevicePrimaryCtxRetain", driver.DevicePrimaryCtxRetain(&found, device));
    }
    if (error.empty()) error = driver.Failure("cuCtxPushCurrent", driver.CtxPushCurrent(found));
    if (error.empty() && context != nullptr) *context = found;
    return error;
  }

  static void Leave() {
    CUcontext context;
    GetDriver().CtxPopCurrent(&context);
  }

  // Zeros: no message has the number 0.
  static std::string Make(const AllReduceShape& shape, int ordinal, void** memory) {
    const Driver& driver = GetDriver();
    const size_t bytes = BytesKept(shape);
    if (std::string error = Enter(ordinal); !error.empty()) return error;
    void* made = nullptr;
    std::string error = driver.Failure("cuMemAlloc", driver.MemAlloc(&made, bytes));
    if (error.empty()) error = driver.Failure("cuMemsetD32", driver.MemsetD32(made, 0, bytes / 4));
    if (error.empty()) *memory = made;
    Leave();
    return error.empty() ? ""
                         : error + ", for " + std::to_string(bytes) + " bytes of device " + std::to_string(ordinal);
  }

  // Writes where each device has this one's lines.
  std::string FindWays(const AllReduceShape& shape, int ordinal) {
    constexpr CUresult kAlreadyEnabled = 704;
    const Driver& driver = GetDriver();
    Member& own = members_[ordinal];
    own.number = std::distance(members_.begin(), members_.find(ordinal));
    char* outboxes[kMostExchanging] = {};
    int64_t number = 0;
    for (auto& [other, member] : members_) {
      outboxes[number++] = Outbox(shape, own.number, member.memory);
      if (other == ordinal) continue;
      CUcontext its;
      std::string error = Enter(other, &its);
      if (!error.empty()) return error;
      Leave();
      if (error = Enter(ordinal); !error.empty()) return error;
      const CUresult result = driver.CtxEnablePeerAccess(its, 0);
      Leave();
      if (result != kAlreadyEnabled && result != 0) {
        return driver.Failure("cuCtxEnablePeerAccess", result) + ", of device " + std::to_string(ordinal) +
               " to device " + std::to_string(other);
      }
    }
    if (std::string error = Enter(ordinal); !error.empty()) return error;
    std::string error = driver.Failure("cuMemcpyHtoD", driver.MemcpyHtoD(own.memory, outboxes, sizeof(outboxes)));
    Leave();
    own.has_ways = error.empty();
    return error;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Member> members_;  // by ordinal
  std::string error_;
};

inline ffi::TypeId Exchange::id = {};

}  // namespace dsv4_fmha
