// Makes an XLA custom call from a function that names its operands; their types say how to decode them.
//
// The function returns the call of an op of some family:
//   Results                        the types of its results, in order, as TypeList<ffi::Result<...>, ...>
//   Give(results...)               takes where they are
//   Initialize(device)             loads the kernels that the call will launch
//   Execute(stream, device)        launches it
#pragma once

#include "launch.h"

namespace dsv4_fmha {

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

// The two stages of a target, with the same operands and results.
template <typename Call, typename Results, auto name_operands>
struct Stages;

template <typename Call, typename... Results, typename... Decoded, Call (*name_operands)(Decoded...)>
struct Stages<Call, TypeList<Results...>, name_operands> {
  static Call All(Decoded&... x, Results&... results) {
    Call call = name_operands(x...);
    call.Give(results...);
    return call;
  }

  static ffi::Error OnInitialize(DeviceNumber device, Decoded... x, Results... results) {
    return All(x..., results...).Initialize(device.value);
  }

  static ffi::Error OnExecute(CUstream stream, DeviceNumber device, Decoded... x, Results... results) {
    return All(x..., results...).Execute(stream, device.value);
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

template <typename Call, typename... Decoded>
Call CallOf(Call (*)(Decoded...));

template <auto name_operands, typename Call = decltype(CallOf(name_operands))>
using Target = Stages<Call, typename Call::Results, name_operands>;

}  // namespace dsv4_fmha

#define DSV4_FMHA_TARGET(name, operands)                                   \
  XLA_FFI_Error* dsv4_fmha_##name##_initialize(XLA_FFI_CallFrame* frame) { \
    return dsv4_fmha::Target<dsv4_fmha::operands>::Initialize(frame);      \
  }                                                                        \
  XLA_FFI_Error* dsv4_fmha_##name(XLA_FFI_CallFrame* frame) {              \
    return dsv4_fmha::Target<dsv4_fmha::operands>::Execute(frame);         \
  }
