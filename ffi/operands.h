// The decoded operands and results of a call, and the checks that all ops share.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "layout.h"
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

  void DtypeOf(const Operand& other, const Operand& operand) {
    if (error_.failure() || operand.dtype == other.dtype) return;
    error_ = Refuse(operand, Show(operand.dtype), Show(other.dtype) + " like " + other.name);
  }

  void Dtype(const Operand& operand, ffi::DataType wanted) {
    if (error_.failure() || operand.dtype == wanted) return;
    error_ = Refuse(operand, Show(operand.dtype), Show(wanted));
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

// ---- sources of keys:
//   span       k and v [b, s_kv, h_kv, d], start and stop i32 [b, s_q]: query i sees start <= j < stop
//   selection  k and v [b, s_kv, h_kv, d], indices i32 [b, s_q, topk], length i32 [b, s_q]: it sees indices[:length]
//   packed     a selection from a pool of pages u8 [pages, bytes], as kernels/packings.py describes; d = 512
// An op whose keys have one head by definition takes them as [b, s_kv, d]. The keys of a selection may be a pool
// [slots, d] that all sequences share.

struct Source {
  SourceKind kind;
  Operand k, v;      // v is k where they are one array
  Operand from, to;  // start and stop of a span, indices and length of a selection
  const Packing* packing = nullptr;

  // For sequences from `first` on, which may share a pool of keys.
  SourceAddresses at(int64_t first = 0) const {
    const int64_t keys = k.dimensions.size() == 2 ? 0 : first;
    return {.k = From(k, keys), .v = From(v, keys), .from = From(from, first), .to = From(to, first)};
  }
};

inline Source LatentSpan(Operand kv, Operand start, Operand stop) {
  return {.kind = kSpan, .k = kv, .v = kv, .from = start, .to = stop};
}

inline Source LatentSelection(Operand kv, Operand indices, Operand length) {
  return {.kind = kSelection, .k = kv, .v = kv, .from = indices, .to = length};
}

inline Source PackedSelection(Operand kv, Operand indices, Operand length, const Packing& packing) {
  return {.kind = kPacked, .k = kv, .v = kv, .from = indices, .to = length, .packing = &packing};
}

struct Sources {
  int count = 0;
  Source items[kMaxSources];

  Sources() = default;
  Sources(std::initializer_list<Source> given) {
    for (const Source& source : given) items[count++] = source;
  }
  const Source* begin() const { return items; }
  const Source* end() const { return items + count; }
};

// Entries of a page of this many bytes, or 0 if no page has this size.
inline int64_t PackedEntries(const Packing& packing, int64_t page_bytes) {
  const int64_t entries = page_bytes / packing.entry;
  const int64_t needed = (entries * packing.entry + packing.multiple - 1) / packing.multiple * packing.multiple;
  return needed == page_bytes ? entries : 0;
}

inline std::string Show(const Packing& packing) {
  std::string page = "U8[pages, " + std::to_string(packing.entry) + " bytes an entry";
  if (packing.multiple > 1) page += ", padded up to a multiple of " + std::to_string(packing.multiple);
  return page + "], as " + packing.name + " has them";
}

// Whether the keys have the rank and, if packed, the layout of their kind.
inline ffi::Error CheckKeys(const Source& source, bool kv_heads) {
  const Operand& k = source.k;
  const Ints got = k.dimensions;
  if (source.kind == kPacked) {
    const bool is_page = got.size() == 2 && PackedEntries(*source.packing, got[1]) > 0;
    if (is_page && k.dtype == ffi::U8) return ffi::Error::Success();
    return Refuse(k, Show(k.dtype) + Show(got), Show(*source.packing));
  }
  if (got.size() == (kv_heads ? 4 : 3) || (source.kind == kSelection && got.size() == 2)) return ffi::Error::Success();
  return Refuse(k, "shape " + Show(got),
                kv_heads                    ? "[b, s_kv, h_kv, d]"
                : source.kind == kSelection ? "[b, s_kv, d] or [slots, d]"
                                            : "[b, s_kv, d]");
}

// The rest of a source's shapes, for the rows of q.
inline SourceShape CheckSource(const Source& source, const Operand& q, const RowShape& rows, bool kv_heads,
                               Expectations* expect) {
  const auto& [b, s_q, h_q, h_kv, d, splits, type] = rows;
  const Ints k = source.k.dimensions;
  const bool is_pool = k.size() == 2;  // that all sequences share
  SourceShape shape{.kind = source.kind, .s_kv = k[is_pool ? 0 : 1], .s_batch = is_pool ? 0 : k[1], .topk = 0};
  if (source.kind == kPacked) {
    shape.s_batch = PackedEntries(*source.packing, k[1]);
    shape.s_kv = k[0] * shape.s_batch;
  }
  for (const Operand* keys : {&source.k, &source.v}) {
    expect->Aligned(*keys);
    if (source.kind == kPacked) continue;
    if (is_pool) {
      expect->Shape(*keys, {shape.s_kv, d});
    } else if (kv_heads) {
      expect->Shape(*keys, {b, shape.s_kv, h_kv, d});
    } else {
      expect->Shape(*keys, {b, shape.s_kv, d});
    }
    expect->DtypeOf(q, *keys);
  }
  if (source.kind != kSpan) {
    shape.topk = source.from.dimensions[2];
    expect->Shape(source.from, {b, s_q, shape.topk});
  } else {
    expect->Shape(source.from, {b, s_q});
  }
  expect->Shape(source.to, {b, s_q});
  return shape;
}

// The shapes of q and of all sources.
inline ffi::Error CheckAttention(const Operand& q, const Sources& sources, bool kv_heads, int64_t splits,
                                 AttentionShape* shape) {
  const Ints rows = q.dimensions;
  if (rows.size() != 4) return Refuse(q, "shape " + Show(rows), "[b, s_q, h_q, d]");
  for (const Source& source : sources) {
    if (ffi::Error error = CheckKeys(source, kv_heads); error.failure()) return error;
  }
  *shape = AttentionShape{.rows = {.b = rows[0],
                                   .s_q = rows[1],
                                   .h_q = rows[2],
                                   .h_kv = kv_heads ? sources.begin()->k.dimensions[2] : 1,
                                   .d = rows[3],
                                   .splits = splits,
                                   .type = MapType(q.dtype)},
                          .source_count = sources.count,
                          .sources = {}};
  Expectations expect;
  for (int i = 0; i < sources.count; ++i) {
    shape->sources[i] = CheckSource(sources.items[i], q, shape->rows, kv_heads, &expect);
  }
  return expect.error();
}

}  // namespace dsv4_fmha
