// Forward attention: q [b, s_q, h_q, d], k and v [b, s_kv, h_kv, d], start and stop int32 [b, s_q], sink f32 [h_q]
// -> o like q, lse f32 [b, s_q, h_q].  Query i sees the keys start <= j < stop; the sink is part of o, never of lse.
#include <sstream>

#include "fwd_plan.h"
#include "registry.h"
#include "tensor_map.h"

namespace dsv4_fmha {
namespace {

using Ints = ffi::Span<const int64_t>;

std::string Show(Ints dimensions) {
  std::string text = "[";
  for (int64_t x : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(x);
  return text + "]";
}

std::string Show(ffi::DataType dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

bool Equal(Ints got, std::initializer_list<int64_t> wanted) {
  return std::equal(got.begin(), got.end(), wanted.begin(), wanted.end());
}

struct FwdOperands {
  ffi::AnyBuffer q, k, v;  // v is k where they are one array
  ffi::Buffer<ffi::S32, 2> start, stop;
  ffi::BufferR1<ffi::F32> sink;
  ffi::AnyBuffer o;
  ffi::Buffer<ffi::F32, 3> lse;
  float scale;
  bool shared_kv;
};

ffi::Error Check(const FwdOperands& x, FwdShape* shape) {
  Ints q = x.q.dimensions(), k = x.k.dimensions();
  if (q.size() != 4) return ffi::Error::InvalidArgument("q: got shape " + Show(q) + ", wanted [b, s_q, h_q, d]");
  if (k.size() != 4) return ffi::Error::InvalidArgument("k: got shape " + Show(k) + ", wanted [b, s_kv, h_kv, d]");
  *shape = FwdShape{q[0], q[1], k[1], q[2], k[2], q[3]};
  auto [b, s_q, s_kv, h_q, h_kv, d] = *shape;

  std::string wrong;
  auto expect = [&](const char* name, Ints got, std::initializer_list<int64_t> wanted) {
    if (!wrong.empty() || Equal(got, wanted)) return;
    wrong = std::string(name) + ": got shape " + Show(got) + ", wanted " + Show(Ints(wanted.begin(), wanted.size()));
  };
  auto expect_dtype = [&](const char* name, ffi::DataType got) {
    if (!wrong.empty() || got == x.q.element_type()) return;
    wrong = std::string(name) + ": got " + Show(got) + ", wanted " + Show(x.q.element_type()) + " like q";
  };
  expect("k", k, {b, s_kv, h_kv, d});
  expect("v", x.v.dimensions(), {b, s_kv, h_kv, d});
  expect("start", x.start.dimensions(), {b, s_q});
  expect("stop", x.stop.dimensions(), {b, s_q});
  expect("sink", x.sink.dimensions(), {h_q});
  expect("o", x.o.dimensions(), {b, s_q, h_q, d});
  expect("lse", x.lse.dimensions(), {b, s_q, h_q});
  expect_dtype("k", x.k.element_type());
  expect_dtype("v", x.v.element_type());
  expect_dtype("o", x.o.element_type());
  return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
}

ffi::Error LookUp(const FwdOperands& x, int device, Launcher** launcher) {
  std::string error;
  const std::string& arch = Architecture(device, &error);
  if (!error.empty()) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error);
  ffi::DataType dtype = x.q.element_type();
  int64_t d = x.q.dimensions()[3];
  *launcher = Find({"fwd", arch, d, dtype, x.shared_kv});
  if (*launcher != nullptr) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "fmha: no kernel for d=" + std::to_string(d) + ", " + Show(dtype) +
                        (x.shared_kv ? ", one array for K and V" : ", K and V apart") + " on " + arch +
                        "; built: " + Built("fwd"));
}

ffi::Error Initialize(int device, const FwdOperands& x) {
  FwdShape shape;
  Launcher* launcher;
  if (ffi::Error error = Check(x, &shape); error.failure()) return error;
  if (ffi::Error error = LookUp(x, device, &launcher); error.failure()) return error;
  const std::string& error = launcher->Load(device).error;
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

ffi::Error Execute(CUstream stream, int device, const FwdOperands& x) {
  FwdShape shape;
  Launcher* launcher;
  FwdPlan plan;
  if (ffi::Error error = Check(x, &shape); error.failure()) return error;
  if (shape.b == 0 || shape.s_q == 0) return ffi::Error::Success();
  if (ffi::Error error = LookUp(x, device, &launcher); error.failure()) return error;
  if (std::string error = PlanFwd(shape, x.scale, launcher->tile_m, launcher->tile_n, &plan); !error.empty()) {
    return ffi::Error::InvalidArgument("fmha: " + error);
  }
  const Launcher::Loaded& loaded = launcher->Load(device);
  if (!loaded.error.empty()) return ffi::Error::Internal(loaded.error);

  FwdArguments arguments{{}, {}, {}, {}, x.start.untyped_data(), x.stop.untyped_data(), x.sink.untyped_data(),
                         x.lse.untyped_data()};
  const TensorMapDataType type = x.q.element_type() == ffi::BF16 ? kBFloat16 : kFloat16;
  std::string error = Encode(plan.rows, type, x.q.untyped_data(), &arguments.q);
  if (error.empty()) error = Encode(plan.keys, type, x.k.untyped_data(), &arguments.k);
  if (error.empty() && !x.shared_kv) error = Encode(plan.keys, type, x.v.untyped_data(), &arguments.v);
  if (error.empty()) error = Encode(plan.rows, type, x.o.untyped_data(), &arguments.o);
  if (error.empty()) {
    FwdParams params(plan, arguments, x.shared_kv);
    void* pointers[FwdParams::kMax];
    for (int i = 0; i < params.count; ++i) pointers[i] = params.params[i].data;
    const CUlaunchConfig config{plan.grid, 1, 1, static_cast<unsigned>(launcher->threads), 1, 1,
                                static_cast<unsigned>(launcher->smem_bytes), stream, nullptr, 0};
    const Driver& driver = GetDriver();
    error = driver.Failure("cuLaunchKernelEx", driver.LaunchKernelEx(&config, loaded.function, pointers, nullptr));
  }
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

using S32Rows = ffi::Buffer<ffi::S32, 2>;
using Heads = ffi::BufferR1<ffi::F32>;
using Lse = ffi::Result<ffi::Buffer<ffi::F32, 3>>;
using Output = ffi::Result<ffi::AnyBuffer>;

ffi::Error ExecuteFwd(CUstream stream, int device, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, S32Rows start,
                      S32Rows stop, Heads sink, float scale, Output o, Lse lse) {
  return Execute(stream, device, {q, k, v, start, stop, sink, *o, *lse, scale, false});
}

ffi::Error InitializeFwd(int device, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, S32Rows start, S32Rows stop,
                         Heads sink, float scale, Output o, Lse lse) {
  return Initialize(device, {q, k, v, start, stop, sink, *o, *lse, scale, false});
}

ffi::Error ExecuteFwdSharedKv(CUstream stream, int device, ffi::AnyBuffer q, ffi::AnyBuffer kv, S32Rows start,
                              S32Rows stop, Heads sink, float scale, Output o, Lse lse) {
  return Execute(stream, device, {q, kv, kv, start, stop, sink, *o, *lse, scale, true});
}

ffi::Error InitializeFwdSharedKv(int device, ffi::AnyBuffer q, ffi::AnyBuffer kv, S32Rows start, S32Rows stop,
                                 Heads sink, float scale, Output o, Lse lse) {
  return Initialize(device, {q, kv, kv, start, stop, sink, *o, *lse, scale, true});
}

template <typename Binding>
auto BindTail(Binding binding) {
  return std::move(binding)
      .template Arg<S32Rows>()
      .template Arg<S32Rows>()
      .template Arg<Heads>()
      .template Attr<float>("scale")
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::Buffer<ffi::F32, 3>>();
}

template <typename Binding>
auto BindFwd(Binding binding) {
  return BindTail(std::move(binding)
                      .template Arg<ffi::AnyBuffer>()
                      .template Arg<ffi::AnyBuffer>()
                      .template Arg<ffi::AnyBuffer>());
}

template <typename Binding>
auto BindFwdSharedKv(Binding binding) {
  return BindTail(std::move(binding).template Arg<ffi::AnyBuffer>().template Arg<ffi::AnyBuffer>());
}

auto OnInitialize() { return ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>(); }
auto OnExecute() { return ffi::Ffi::BindExecute().Ctx<ffi::PlatformStream<CUstream>>().Ctx<ffi::DeviceOrdinal>(); }

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(dsv4_fmha_fwd_initialize, InitializeFwd, BindFwd(OnInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsv4_fmha_fwd, ExecuteFwd, BindFwd(OnExecute()), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsv4_fmha_fwd_shared_kv_initialize, InitializeFwdSharedKv,
                              BindFwdSharedKv(OnInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(dsv4_fmha_fwd_shared_kv, ExecuteFwdSharedKv, BindFwdSharedKv(OnExecute()),
                              {ffi::Traits::kCmdBufferCompatible});

#pragma GCC visibility pop

}  // namespace dsv4_fmha
