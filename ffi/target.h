// Makes XLA custom calls of the code of a family of calls. The family says what differs:
//   Call, Shape, Kernels            the decoded call; what its launches depend on; std::array of Launcher*, some nullptr
//   Check(call, n, &shape)          what the axes and dtypes of calls.TARGETS do not say
//   Find(call, device, &shape, &kernels)   looks its kernels up
//   Clear(call, shape, stream)      writes what kernels add to, even where there are no queries; a family may lack it
//   Run(call, shape, kernels, stream)      plans and launches
// A family with a type `State` has one for each such call of a compiled program, which all devices share. It has
//   Prepare(shape, device, state)          before the first launch of a device; and `Run` gets the state too
#pragma once

#include "calls.h"
#include "launch.h"

namespace dsv4_fmha {

template <typename Family>
ffi::Error Check(const typename Family::Call& call, Axes* n, typename Family::Shape* shape) {
  if (ffi::Error error = CheckArrays(call, n); error.failure()) return error;
  return Family::Check(call, *n, shape);
}

// The first of a call's two stages: loads the kernels that it will launch. `state` is Family::State*, or nothing.
template <typename Family, typename... States>
ffi::Error Initialize(const typename Family::Call& call, int ordinal, States... state) {
  Axes n;
  typename Family::Shape shape{};
  typename Family::Kernels kernels{};
  if (ffi::Error error = Check<Family>(call, &n, &shape); error.failure()) return error;
  if (ffi::Error error = Family::Find(call, GetDevice(ordinal), &shape, &kernels); error.failure()) return error;
  if (ffi::Error error = Load(ordinal, kernels); error.failure()) return error;
  if constexpr (sizeof...(States) > 0) return Family::Prepare(shape, ordinal, state...);
  return ffi::Error::Success();
}

// The second one: launches them.
template <typename Family, typename... States>
ffi::Error Execute(const typename Family::Call& call, CUstream handle, int ordinal, States... state) {
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
  return Family::Run(call, shape, kernels, stream, state...);
}

inline void Put(const Array& array, const ffi::AnyBuffer& x, Operand* arrays) {
  for (int place : array.places) {
    if (place >= 0) arrays[place] = Operand(array.name, x);
  }
}

// The arrays of a call, by the table of its target: operands, then results.
inline ffi::Error PutArrays(const Target& target, ffi::RemainingArgs operands, ffi::RemainingRets results,
                            Operand* arrays) {
  const size_t count = target.array_count, given = operands.size() + results.size();
  if (given != count) {
    return ffi::Error::InvalidArgument(std::string(target.name) + ": got " + std::to_string(given) +
                                       " arrays, wanted " + std::to_string(count));
  }
  for (size_t i = 0; i < count; ++i) {
    if (i < operands.size()) {
      ffi::ErrorOr<ffi::AnyBuffer> x = operands.get<ffi::AnyBuffer>(i);
      if (x.has_error()) return x.error();
      Put(target.arrays[i], *x, arrays);
    } else {
      ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> x = results.get<ffi::AnyBuffer>(i - operands.size());
      if (x.has_error()) return x.error();
      Put(target.arrays[i], **x, arrays);
    }
  }
  return ffi::Error::Success();
}

inline ffi::Error ReadEach(ffi::Dictionary) { return ffi::Error::Success(); }

template <typename T, typename... Others>
ffi::Error ReadEach(ffi::Dictionary attributes, std::string_view name, T* to, Others... others) {
  ffi::ErrorOr<T> x = attributes.get<T>(name);
  if (x.has_error()) return x.error();
  *to = *x;
  return ReadEach(attributes, others...);
}

// Reads all attributes of a call, by their names: Read(x, "scale", &scale, "order", &order).
template <typename... NamesAndPlaces>
ffi::Error Read(ffi::Dictionary attributes, NamesAndPlaces... given) {
  const size_t count = sizeof...(given) / 2;
  if (attributes.size() != count) {
    return ffi::Error::InvalidArgument("got " + std::to_string(attributes.size()) + " attributes, wanted " +
                                       std::to_string(count));
  }
  return ReadEach(attributes, given...);
}

// What both stages decode of a call besides: the device, arrays and attributes.
template <typename Binding>
auto WithArrays(Binding binding) {
  return std::move(binding).template Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs();
}

// The handlers of both stages. `read` fills in a call's attributes. All targets have handlers of two types, for which
// the compiler instantiates XLA's templates once.
template <typename Family, const Target& target, ffi::Error (*read)(ffi::Dictionary, typename Family::Call*)>
struct Handlers {
  static ffi::Error Decode(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
                           typename Family::Call* call) {
    call->target = &target;
    Operand* arrays = reinterpret_cast<Operand*>(call);  // a call begins with its arrays
    if (ffi::Error error = PutArrays(target, operands, results, arrays); error.failure()) return error;
    return read(attributes, call);
  }

  static ffi::Error OnInitialize(int32_t ordinal, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                 ffi::Dictionary attributes) {
    typename Family::Call call;
    if (ffi::Error error = Decode(operands, results, attributes, &call); error.failure()) return error;
    return dsv4_fmha::Initialize<Family>(call, ordinal);
  }

  static ffi::Error OnExecute(CUstream stream, int32_t ordinal, ffi::RemainingArgs operands, ffi::RemainingRets results,
                              ffi::Dictionary attributes) {
    typename Family::Call call;
    if (ffi::Error error = Decode(operands, results, attributes, &call); error.failure()) return error;
    return dsv4_fmha::Execute<Family>(call, stream, ordinal);
  }

  static XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
    static auto* handler = WithArrays(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()).To(&OnInitialize).release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    static auto* handler = WithArrays(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CUstream>>())
                               .To(&OnExecute, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(frame);
  }
};

// The same with a state, which a third stage makes when a program is compiled.
template <typename Family, const Target& target, ffi::Error (*read)(ffi::Dictionary, typename Family::Call*)>
struct HandlersWithState {
  using State = typename Family::State;
  using Plain = Handlers<Family, target, read>;

  static ffi::ErrorOr<std::unique_ptr<State>> OnInstantiate(ffi::Dictionary) { return std::make_unique<State>(); }

  static ffi::Error OnInitialize(State* state, int32_t ordinal, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                 ffi::Dictionary attributes) {
    typename Family::Call call;
    if (ffi::Error error = Plain::Decode(operands, results, attributes, &call); error.failure()) return error;
    return dsv4_fmha::Initialize<Family>(call, ordinal, state);
  }

  static ffi::Error OnExecute(State* state, CUstream stream, int32_t ordinal, ffi::RemainingArgs operands,
                              ffi::RemainingRets results, ffi::Dictionary attributes) {
    typename Family::Call call;
    if (ffi::Error error = Plain::Decode(operands, results, attributes, &call); error.failure()) return error;
    return dsv4_fmha::Execute<Family>(call, stream, ordinal, state);
  }

  static XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
    static auto* handler = ffi::Ffi::BindInstantiate().Attrs().To(&OnInstantiate).release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
    static auto* handler = WithArrays(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::State<State>>())
                               .To(&OnInitialize)
                               .release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    static auto* handler =
        WithArrays(ffi::Ffi::Bind().Ctx<ffi::State<State>>().template Ctx<ffi::PlatformStream<CUstream>>())
            .To(&OnExecute, {ffi::Traits::kCmdBufferCompatible})
            .release();
    return handler->Call(frame);
  }
};

}  // namespace dsv4_fmha

#define DSV4_FMHA_HANDLERS(Of, Family, target, read) \
  dsv4_fmha::Of<dsv4_fmha::Family, dsv4_fmha::target, dsv4_fmha::read>

#define DSV4_FMHA_TARGET(name, Of, Family, target, read)                    \
  XLA_FFI_Error* dsv4_fmha_##name##_initialize(XLA_FFI_CallFrame* frame) {  \
    return DSV4_FMHA_HANDLERS(Of, Family, target, read)::Initialize(frame); \
  }                                                                         \
  XLA_FFI_Error* dsv4_fmha_##name(XLA_FFI_CallFrame* frame) {               \
    return DSV4_FMHA_HANDLERS(Of, Family, target, read)::Execute(frame);    \
  }

#define DSV4_FMHA_STATE_OF(name, Family, target, read)                                      \
  XLA_FFI_Error* dsv4_fmha_##name##_instantiate(XLA_FFI_CallFrame* frame) {                 \
    return DSV4_FMHA_HANDLERS(HandlersWithState, Family, target, read)::Instantiate(frame); \
  }
