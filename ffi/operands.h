// The decoded operands and results of a call, and the checks that all calls share.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

using Ints = ffi::Span<const int64_t>;

struct Operand {
  const char* name = nullptr;
  void* data = nullptr;
  Ints dimensions;
  ffi::DataType dtype = ffi::DataType::INVALID;

  Operand() = default;
  template <typename Buffer>
  Operand(const char* name, const Buffer& x)
      : name(name), data(x.untyped_data()), dimensions(x.dimensions()), dtype(x.element_type()) {}
};

inline int64_t Elements(Ints dimensions) {
  int64_t count = 1;
  for (int64_t x : dimensions) count *= x;
  return count;
}

inline std::string Show(Ints dimensions) {
  std::string text = "[";
  for (int64_t x : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(x);
  return text + "]";
}

inline ffi::Error Refuse(const Operand& operand, const std::string& got, const std::string& wanted) {
  return ffi::Error::InvalidArgument(std::string(operand.name) + ": got " + got + ", wanted " + wanted);
}

// Keeps the first error.
class Expectations {
 public:
  void Shape(const Operand& operand, Ints wanted) {
    const Ints got = operand.dimensions;
    if (error_.failure() || std::equal(got.begin(), got.end(), wanted.begin(), wanted.end())) return;
    error_ = Refuse(operand, "shape " + Show(got), Show(wanted));
  }

  void Shape(const Operand& operand, std::initializer_list<int64_t> wanted) {
    Shape(operand, Ints(wanted.begin(), wanted.size()));
  }

  void Dtype(const Operand& operand, ffi::DataType wanted) {
    if (error_.failure() || operand.dtype == wanted) return;
    error_ = Refuse(operand, Show(operand.dtype), Show(wanted));
  }

  void DtypeOf(const Operand& other, const Operand& operand) {
    if (error_.failure() || operand.dtype == other.dtype) return;
    error_ = Refuse(operand, Show(operand.dtype), Show(other.dtype) + " like " + other.name);
  }

  // TMA and cp.async move 16 bytes at a time.
  void Aligned(const Operand& operand) {
    const auto address = reinterpret_cast<uintptr_t>(operand.data);
    if (error_.failure() || address % kAlignment == 0) return;
    error_ = Refuse(operand, "an address of remainder " + std::to_string(address % kAlignment),
                    "a multiple of " + std::to_string(kAlignment));
  }

  ffi::Error error() const { return error_; }

 private:
  static constexpr uintptr_t kAlignment = 16;  // bytes
  ffi::Error error_;
};

// The TensorMapDataType of an array's elements.
inline int64_t MapType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::BF16:
      return kBFloat16;
    case ffi::F16:
      return kFloat16;
    case ffi::F32:
      return kFloat32;
    default:
      return kUInt8;
  }
}

// Where the entries of an operand's first axis begin, from this one on.
inline void* From(const Operand& x, int64_t first) {
  int64_t bytes = first * ffi::ByteWidth(x.dtype);
  for (size_t i = 1; i < x.dimensions.size(); ++i) bytes *= x.dimensions[i];
  return static_cast<char*>(x.data) + bytes;
}

// ---- what calls.TARGETS says of a call

// An axis by its name, or a constant extent.
struct Axis {
  int64_t Axes::* name = nullptr;
  int64_t extent = -1;

  constexpr Axis() = default;
  constexpr Axis(int64_t Axes::* name) : name(name) {}  // NOLINT: tables are lists of axes
  constexpr Axis(int extent) : extent(extent) {}        // NOLINT
};

constexpr ffi::DataType kLikeFirst = ffi::DataType::INVALID;  // the dtype of a call's first array

struct Form {
  ffi::DataType dtype;
  const char* text;  // "[b, s_q, h_q, d]"
  int rank;
  Axis axes[5];
};

struct Array {
  const char* name;
  int places[2];  // among the arrays of its family of calls; the second is -1 where there is none
  bool aligned;
  int form_count;
  Form forms[4];
};

struct Target {
  const char* name;
  const Array* arrays;  // operands, then results
  int array_count, source_count;
  SourceKind sources[kMaxSources];

  const Array* begin() const { return arrays; }
  const Array* end() const { return arrays + array_count; }
};

template <typename Call>
const Operand& At(const Call& call, int place) {
  return reinterpret_cast<const Operand*>(&call)[place];  // a call begins with its arrays
}

// The form that an array has; nullptr where it has none.
inline const Form* FormOf(const Array& array, const Operand& x, const Operand& first) {
  for (int i = 0; i < array.form_count; ++i) {
    const Form& form = array.forms[i];
    const ffi::DataType dtype = form.dtype == kLikeFirst ? first.dtype : form.dtype;
    if (form.rank == static_cast<int>(x.dimensions.size()) && dtype == x.dtype) return &form;
  }
  return nullptr;
}

// Why an array has none of its forms.
inline ffi::Error Misfit(const Array& array, const Operand& x, const Operand& first) {
  std::string shapes, dtypes;
  for (int i = 0; i < array.form_count; ++i) {
    const Form& form = array.forms[i];
    shapes += (shapes.empty() ? "" : " or ") + std::string(form.text);
    if (form.rank != static_cast<int>(x.dimensions.size())) continue;
    dtypes += dtypes.empty() ? "" : " or ";
    dtypes += form.dtype == kLikeFirst ? Show(first.dtype) + " like " + first.name : Show(form.dtype);
  }
  if (dtypes.empty()) return Refuse(x, "shape " + Show(x.dimensions), shapes);
  return Refuse(x, Show(x.dtype), dtypes);
}

// Each array has one of its forms, an axis the same extent in all of them, and aligned arrays are.
template <typename Call>
ffi::Error CheckArrays(const Call& call, Axes* n) {
  const Target& target = *call.target;
  const Operand& first = At(call, target.arrays[0].places[0]);
  for (const Array& array : target) {
    const Operand& x = At(call, array.places[0]);
    const Form* form = FormOf(array, x, first);
    if (form == nullptr) return Misfit(array, x, first);
    int64_t wanted[std::size(form->axes)];
    for (int i = 0; i < form->rank; ++i) {
      const Axis& axis = form->axes[i];
      wanted[i] = axis.name == nullptr ? axis.extent : n->*axis.name;
      if (wanted[i] < 0) wanted[i] = n->*axis.name = x.dimensions[i];
    }
    Expectations expect;
    expect.Shape(x, Ints(wanted, form->rank));
    if (array.aligned) expect.Aligned(x);
    if (expect.error().failure()) return expect.error();
  }
  return ffi::Error::Success();
}

// Where the arrays of a call are, from this batch entry on.
template <typename Addresses, typename Call>
Addresses AddressesOf(const Call& call, int64_t first_entry = 0) {
  Addresses at{};
  const Operand& first = At(call, call.target->arrays[0].places[0]);
  for (const Array& array : *call.target) {
    for (int place : array.places) {
      if (place < 0) continue;
      const Operand& x = At(call, place);
      const bool has_entries = FormOf(array, x, first)->axes[0].name == &Axes::b;
      reinterpret_cast<void**>(&at)[place] = has_entries ? From(x, first_entry) : x.data;
    }
  }
  return at;
}

// The shape of attention over a call's sources, none of which is packed.
template <typename Call>
AttentionShape AttentionShapeOf(const Call& call, const Axes& n, int64_t splits) {
  AttentionShape shape{.rows = {.b = n.b,
                                .s_q = n.s_q,
                                .h_q = n.h_q,
                                .h_kv = n.h_kv < 0 ? 1 : n.h_kv,
                                .d = n.d,
                                .d_v = n.d,
                                .splits = splits,
                                .type = MapType(call.q.dtype)},
                       .source_count = call.target->source_count,
                       .sources = {}};
  for (int i = 0; i < shape.source_count; ++i) {
    const Ints k = call.sources[i].k.dimensions, from = call.sources[i].from.dimensions;
    const bool is_pool = k.size() == 2;  // that all sequences share
    shape.sources[i] = {.kind = call.target->sources[i],
                        .s_kv = k[is_pool ? 0 : 1],
                        .s_batch = is_pool ? 0 : k[1],
                        .topk = from.size() == 3 ? from[2] : 0,
                        .pages = 0,
                        .window = 0};
    if (IsInPages(shape.sources[i].kind)) shape.sources[i].s_kv = n.width * n.page, shape.sources[i].pages = n.pages;
    if constexpr (requires { call.window; }) shape.sources[i].window = call.window;
  }
  return shape;
}

}  // namespace dsv4_fmha
