// A value that the first thread to ask makes; after a failure the next thread tries again.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

namespace dsv4_fmha {

// The caller gets a failure, and nothing else remembers it: the next call tries again, for memory may have been short,
// or a device busy.  A success is kept, and costs the next caller a load.
template <typename T>
class Once {
 public:
  // Makes the value by `make(T&)`, unless it exists.  `make` returns why it failed, or nothing on success.
  template <typename Make>
  std::string Get(const Make& make) {
    if (made_.load(std::memory_order_acquire)) return "";
    std::lock_guard<std::mutex> lock(mutex_);
    if (made_.load(std::memory_order_relaxed)) return "";
    std::string error = make(value_);
    if (error.empty()) made_.store(true, std::memory_order_release);
    return error;
  }

  // Only after `Get` has succeeded.
  const T& operator*() const { return value_; }

 private:
  std::atomic<bool> made_{false};
  std::mutex mutex_;
  T value_{};
};

}  // namespace dsv4_fmha
