// Makes XLA custom calls of the code of a family of calls. The family says what differs:
//   Call, Shape, Kernels            the decoded call; what its launches depend on; std::array of Launcher*, some nullptr
//   Check(call, n, &shape)          what the axes and dtypes of calls.TARGETS do not say
//   Find(call, device, &shape, &kernels)   looks its kernels up
//   Clear(call, shape, stream)      writes what kernels add to, even where there are no queries; a family may lack it
//   Run(call, shape, kernels, stream)      plans and launches
#pragma once

#include "calls.h"
#include "launch.h"

namespace dsv4_fmha {

template <typename Family>
ffi::Error Check(const typename Family::Call& call, Axes* n, typename Family::Shape* shape) {
  if (ffi::Error error = CheckArrays(call, n); error.failure()) return error;
  return Family::Check(call, *n, shape);
}

// The first of a call's two stages: loads the kernels that it will launch.
template <typename Family>
ffi::Error Initialize(const typename Family::Call& call, int ordinal) {
  Axes n;
  typename Family::Shape shape{};
  typename Family::Kernels kernels{};
  if (ffi::Error error = Check<Family>(call, &n, &shape); error.failure()) return error;
  if (ffi::Error error = Family::Find(call, GetDevice(ordinal), &shape, &kernels); error.failure()) return error;
  return Load(ordinal, kernels);
}

// The second one: launches them.
template <typename Family>
ffi::Error Execute(const typename Family::Call& call, CUstream handle, int ordinal) {
  Axes n;
  typename Family::Shape shape{};
  typename Family::Kernels kernels{};
  if (ffi::Error error = Check<Family>(call, &n, &shape); error.failure()) return error;
  const Stream stream{handle, ordinal, GetDevice(ordinal)};
  if constexpr (requires { Family::Clear(call, shape, stream); }) {
    if (ffi::Error error = Family::Clear(call, shape, stream); error.failure()) return error;
  }
  if (n.b == 0 || n.s_q == 0) return ffi::Error::Success();
  if (ffi::Error error = Family::Find(call, stream.device, &shape, &kernels); error.failure()) return error;
  return Family::Run(call, shape, kernels, stream);
}

struct DeviceNumber {
  int value;
  DeviceNumber(int32_t value) : value(value) {}  // NOLINT: what DeviceOrdinal is decoded to
};

}  // namespace dsv4_fmha

namespace xla::ffi {

template <>
struct CtxBinding<dsv4_fmha::CUstream> {
  using Ctx = PlatformStream<dsv4_fmha::CUstream>;
};

template <>
struct CtxBinding<dsv4_fmha::DeviceNumber> {
  using Ctx = DeviceOrdinal;
};

}  // namespace xla::ffi

namespace dsv4_fmha {

// The handlers of both stages. `decode` makes a call from operands, results and attributes, whose types say how to
// decode them.
template <typename Family, auto decode>
struct Handlers;

template <typename Family, typename... Given, typename Family::Call (*decode)(Given...)>
struct Handlers<Family, decode> {
  static ffi::Error OnInitialize(DeviceNumber device, Given... x) {
    return dsv4_fmha::Initialize<Family>(decode(x...), device.value);
  }

  static ffi::Error OnExecute(CUstream stream, DeviceNumber device, Given... x) {
    return dsv4_fmha::Execute<Family>(decode(x...), stream, device.value);
  }

  static XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
    using Function = decltype(&OnInitialize);
    static auto* handler = ffi::Ffi::BindTo<Function, ffi::ExecutionStage::kInitialize>(&OnInitialize).release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    static auto* handler = ffi::Ffi::BindTo(&OnExecute, {ffi::Traits::kCmdBufferCompatible}).release();
    return handler->Call(frame);
  }
};

}  // namespace dsv4_fmha

#define DSV4_FMHA_TARGET(name, Family, decode)                                           \
  XLA_FFI_Error* dsv4_fmha_##name##_initialize(XLA_FFI_CallFrame* frame) {               \
    return dsv4_fmha::Handlers<dsv4_fmha::Family, dsv4_fmha::decode>::Initialize(frame); \
  }                                                                                      \
  XLA_FFI_Error* dsv4_fmha_##name(XLA_FFI_CallFrame* frame) {                            \
    return dsv4_fmha::Handlers<dsv4_fmha::Family, dsv4_fmha::decode>::Execute(frame);    \
  }
