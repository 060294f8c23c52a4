// The XLA custom calls.  Each is a function that names its operands; their types say what is decoded.
#include "forward.h"

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
namespace {

constexpr char kScale[] = "scale";

using Array = ffi::AnyBuffer;
using PerQuery = ffi::Buffer<ffi::S32, 2>;
using PerQueryList = ffi::Buffer<ffi::S32, 3>;
using PerHead = ffi::Buffer<ffi::F32, 1>;
using Scale = ffi::Attr<float, kScale>;
using Output = ffi::Result<ffi::AnyBuffer>;
using Lse = ffi::Result<ffi::Buffer<ffi::F32, 3>>;
using OParts = ffi::Result<ffi::Buffer<ffi::F32, 5>>;
using LseParts = ffi::Result<ffi::Buffer<ffi::F32, 4>>;

Operands Fwd(Array q, Array k, Array v, PerQuery start, PerQuery stop, PerHead sink, Scale scale) {
  const Source keys{kSpan, {"k", k}, {"v", v}, {"start", start}, {"stop", stop}};
  return {"fwd", false, true, {"q", q}, 1, {keys}, {"sink", sink}, *scale};
}

Operands FwdSharedKv(Array q, Array kv, PerQuery start, PerQuery stop, PerHead sink, Scale scale) {
  const Source keys = LatentSpan({"kv", kv}, {"start", start}, {"stop", stop});
  return {"fwd", true, true, {"q", q}, 1, {keys}, {"sink", sink}, *scale};
}

Operands SparseFwd(Array q, Array kv, PerQueryList indices, PerQuery length, PerHead sink, Scale scale) {
  const Source keys = LatentSelection({"kv", kv}, {"indices", indices}, {"length", length});
  return {"sparse_fwd", true, false, {"q", q}, 1, {keys}, {"sink", sink}, *scale};
}

Operands Dsv4SparseFwd(Array q, Array window_kv, PerQuery start, PerQuery stop, Array kv, PerQueryList indices,
                       PerQuery length, PerHead sink, Scale scale) {
  const Source window = LatentSpan({"window_kv", window_kv}, {"start", start}, {"stop", stop});
  const Source keys = LatentSelection({"kv", kv}, {"indices", indices}, {"length", length});
  return {"dsv4_sparse_fwd", true, false, {"q", q}, 2, {window, keys}, {"sink", sink}, *scale};
}

Operands Dsv4DenseFwd(Array q, Array window_kv, PerQuery start, PerQuery stop, Array kv, PerQuery start2,
                      PerQuery stop2, PerHead sink, Scale scale) {
  const Source window = LatentSpan({"window_kv", window_kv}, {"start", start}, {"stop", stop});
  const Source keys = LatentSpan({"kv", kv}, {"start2", start2}, {"stop2", stop2});
  return {"dsv4_dense_fwd", true, false, {"q", q}, 2, {window, keys}, {"sink", sink}, *scale};
}

// Both pools are like q, or both are bytes, which are packed keys.
Operands Dsv4Decode(Array q, Array window_kv, PerQueryList window_indices, PerQuery window_length, Array kv,
                    PerQueryList indices, PerQuery length, PerHead sink, Scale scale) {
  const bool packed = window_kv.element_type() == ffi::U8;
  const auto selection = packed ? PackedSelection : LatentSelection;
  const Source window =
      selection({"window_kv", window_kv}, {"window_indices", window_indices}, {"window_length", window_length});
  const Source keys = selection({"kv", kv}, {"indices", indices}, {"length", length});
  const char* const op = packed ? "dsv4_decode_fp8" : "dsv4_decode";
  return {op, true, false, {"q", q}, 2, {window, keys}, {"sink", sink}, *scale};
}

// A target's two stages, of one and the same operands; the results are the same for all targets.
template <auto name_operands>
struct Target;

template <typename... Decoded, Operands (*name_operands)(Decoded...)>
struct Target<name_operands> {
  static Operands All(Decoded... x, Output o, Lse lse, OParts o_parts, LseParts lse_parts) {
    Operands all = name_operands(x...);
    all.o = {"o", *o}, all.lse = {"lse", *lse};
    all.o_parts = {"o_parts", *o_parts}, all.lse_parts = {"lse_parts", *lse_parts};
    return all;
  }

  static ffi::Error OnInitialize(DeviceNumber device, Decoded... x, Output o, Lse lse, OParts o_parts,
                                 LseParts lse_parts) {
    return Initialize(device.value, All(x..., o, lse, o_parts, lse_parts));
  }

  static ffi::Error OnExecute(CUstream stream, DeviceNumber device, Decoded... x, Output o, Lse lse, OParts o_parts,
                              LseParts lse_parts) {
    return Execute(stream, device.value, All(x..., o, lse, o_parts, lse_parts));
  }

  static XLA_FFI_Error* CallInitialize(XLA_FFI_CallFrame* frame) {
    using Function = decltype(&OnInitialize);
    static auto* handler = ffi::Ffi::BindTo<Function, ffi::ExecutionStage::kInitialize>(&OnInitialize).release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* CallExecute(XLA_FFI_CallFrame* frame) {
    static auto* handler = ffi::Ffi::BindTo(&OnExecute, {ffi::Traits::kCmdBufferCompatible}).release();
    return handler->Call(frame);
  }
};

}  // namespace
}  // namespace dsv4_fmha

#define DSV4_FMHA_TARGET(name, operands)                                   \
  XLA_FFI_Error* dsv4_fmha_##name##_initialize(XLA_FFI_CallFrame* frame) { \
    return dsv4_fmha::Target<dsv4_fmha::operands>::CallInitialize(frame);  \
  }                                                                        \
  XLA_FFI_Error* dsv4_fmha_##name(XLA_FFI_CallFrame* frame) {              \
    return dsv4_fmha::Target<dsv4_fmha::operands>::CallExecute(frame);     \
  }

#pragma GCC visibility push(default)
extern "C" {

DSV4_FMHA_TARGET(fwd, Fwd)
DSV4_FMHA_TARGET(fwd_shared_kv, FwdSharedKv)
DSV4_FMHA_TARGET(sparse_fwd, SparseFwd)
DSV4_FMHA_TARGET(dsv4_sparse_fwd, Dsv4SparseFwd)
DSV4_FMHA_TARGET(dsv4_dense_fwd, Dsv4DenseFwd)
DSV4_FMHA_TARGET(dsv4_decode, Dsv4Decode)

}  // extern "C"
#pragma GCC visibility pop
