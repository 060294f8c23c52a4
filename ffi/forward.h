// The body of every forward target: check the operands, look the kernel up, launch it.
//
// q [b, s_q, h_q, d], sink f32 [h_q] -> o like q, lse f32 [b, s_q, h_q], over the keys of one or more sources:
//   span       k and v [b, s_kv, h_kv, d], start and stop i32 [b, s_q]: query i sees start <= j < stop
//   selection  k and v [b, s_kv, h_kv, d], indices i32 [b, s_q, topk], length i32 [b, s_q]: it sees indices[:length]
//   packed     the same, of a pool of pages u8 [pages, bytes] as kernels/lib/packed.py describes them, with d = 512
// A target whose keys have one head by definition takes them as [b, s_kv, d]; those of a selection may be a pool of all
// sequences, [slots, d].  The sink is part of o, never of lse.
//
// Two more results say whether the keys of a row are worked on in parts: o_parts f32 [b, s_q, h_q, splits, d] and
// lse_parts f32 [b, s_q, h_q, splits] are where they are left, for a second kernel to merge.  Of 0 or 1 splits, there are
// no parts.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <string>

#include "launch_plan.h"
#include "registry.h"

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

struct Source {
  SourceKind kind;
  Operand k, v;      // v is k where they are one array
  Operand from, to;  // start and stop of a span, indices and length of a selection
};

inline Source LatentSpan(Operand kv, Operand start, Operand stop) { return {kSpan, kv, kv, start, stop}; }

inline Source LatentSelection(Operand kv, Operand indices, Operand length) {
  return {kSelection, kv, kv, indices, length};
}

inline Source PackedSelection(Operand kv, Operand indices, Operand length) {
  return {kPacked, kv, kv, indices, length};
}

// Entries of a page of so many bytes, or 0 where no page has as many.
inline int64_t PackedEntries(int64_t page_bytes) {
  static constexpr int64_t kEntry = 576, kScales = 8;
  const int64_t entries = page_bytes / (kEntry + kScales);
  const int64_t needed = (entries * (kEntry + kScales) + kEntry - 1) / kEntry * kEntry;
  return needed == page_bytes ? entries : 0;
}

struct Operands {
  const char* op;
  bool shared_kv;  // one array is K and V
  bool kv_heads;   // keys are [b, s_kv, h_kv, d], not [b, s_kv, d]
  Operand q;
  int source_count;
  Source sources[kMaxSources];
  Operand sink;
  float scale;
  Operand o{}, lse{}, o_parts{}, lse_parts{};
};

inline std::string Show(Ints dimensions) {
  std::string text = "[";
  for (int64_t x : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(x);
  return text + "]";
}

inline std::string Show(ffi::DataType dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

// Ranks and dtypes of start, stop, indices, length, sink and lse are checked where they are decoded.
inline ffi::Error Check(const Operands& x, Shape* shape) {
  auto refuse = [](const Operand& operand, const std::string& got, const std::string& wanted) {
    return ffi::Error::InvalidArgument(std::string(operand.name) + ": got " + got + ", wanted " + wanted);
  };
  const Ints q = x.q.dimensions;
  if (q.size() != 4) return refuse(x.q, "shape " + Show(q), "[b, s_q, h_q, d]");
  const size_t key_rank = x.kv_heads ? 4 : 3;
  for (int i = 0; i < x.source_count; ++i) {
    const auto& [kind, k, v, from, to] = x.sources[i];
    const Ints got = k.dimensions;
    if (kind == kPacked) {
      if (got.size() == 2 && PackedEntries(got[1]) > 0 && k.dtype == ffi::U8) continue;
      return refuse(k, Show(k.dtype) + Show(got), "U8[pages, 584 bytes an entry, padded up to a multiple of 576]");
    }
    if (got.size() == key_rank || (kind == kSelection && got.size() == 2)) continue;
    return refuse(k, "shape " + Show(got),
                  x.kv_heads           ? "[b, s_kv, h_kv, d]"
                  : kind == kSelection ? "[b, s_kv, d] or [slots, d]"
                                       : "[b, s_kv, d]");
  }
  const int64_t b = q[0], s_q = q[1], h_q = q[2], d = q[3];
  const int64_t h_kv = x.kv_heads ? x.sources[0].k.dimensions[2] : 1;
  const int64_t parts = x.lse_parts.dimensions[3];
  *shape = Shape{b, s_q, h_q, h_kv, d, std::max<int64_t>(parts, 1), x.shared_kv, x.source_count, {}};

  ffi::Error error;
  auto expect = [&](const Operand& operand, std::initializer_list<int64_t> wanted) {
    const Ints got = operand.dimensions;
    if (error.failure() || std::equal(got.begin(), got.end(), wanted.begin(), wanted.end())) return;
    error = refuse(operand, "shape " + Show(got), Show(Ints(wanted.begin(), wanted.size())));
  };
  auto expect_dtype_of_q = [&](const Operand& operand) {
    if (error.failure() || operand.dtype == x.q.dtype) return;
    error = refuse(operand, Show(operand.dtype), Show(x.q.dtype) + " like q");
  };
  for (int i = 0; i < x.source_count; ++i) {
    const Source& source = x.sources[i];
    const Ints k = source.k.dimensions;
    int64_t s_kv = k[1], stride = s_kv;
    if (source.kind == kPacked) {
      stride = PackedEntries(k[1]);
      s_kv = k[0] * stride;
    } else if (k.size() == 2) {
      s_kv = k[0], stride = 0;
    }
    for (const Operand* keys : {&source.k, &source.v}) {
      if (source.kind == kPacked) continue;
      if (k.size() == 2) {
        expect(*keys, {s_kv, d});
      } else if (x.kv_heads) {
        expect(*keys, {b, s_kv, h_kv, d});
      } else {
        expect(*keys, {b, s_kv, d});
      }
      expect_dtype_of_q(*keys);
    }
    const bool selects = source.kind != kSpan;
    const int64_t topk = selects ? source.from.dimensions[2] : 0;
    if (selects) {
      expect(source.from, {b, s_q, topk});
    } else {
      expect(source.from, {b, s_q});
    }
    expect(source.to, {b, s_q});
    shape->sources[i] = SourceShape{source.kind, s_kv, stride, topk};
  }
  expect(x.sink, {h_q});
  expect(x.o, {b, s_q, h_q, d});
  expect_dtype_of_q(x.o);
  expect(x.lse, {b, s_q, h_q});
  expect(x.o_parts, {b, s_q, h_q, parts, d});
  expect(x.lse_parts, {b, s_q, h_q, parts});
  return error;
}

// The kernels of a call.
struct Kernels {
  Launcher* forward;
  Launcher* combine;  // where keys are split
};

// A kernel that splits no keys gets them whole.
inline ffi::Error LookUp(const Operands& x, const Device& device, Shape* shape, Kernels* kernels) {
  if (!device.error.empty()) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, device.error);
  const ffi::DataType dtype = x.q.dtype;
  *kernels = {Find({x.op, device.arch, shape->d, dtype, x.shared_kv}, shape->h_q), nullptr};
  auto missing = [&](const char* op, const std::string& wanted) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      std::string(op) + ": no kernel for " + wanted + " on " + device.arch + "; built: " + Built(op));
  };
  if (kernels->forward == nullptr) {
    return missing(x.op, "d=" + std::to_string(shape->d) + ", " + Show(dtype) +
                             (x.shared_kv ? ", one array for K and V" : ", K and V apart"));
  }
  if (!kernels->forward->splits) shape->splits = 1;
  if (shape->splits == 1) return ffi::Error::Success();
  kernels->combine = Find({"combine", device.arch, kAnyD, dtype, false}, shape->h_q);
  return kernels->combine != nullptr ? ffi::Error::Success() : missing("combine", Show(dtype));
}

inline ffi::Error Initialize(int device, const Operands& x) {
  Shape shape;
  Kernels kernels;
  if (ffi::Error error = Check(x, &shape); error.failure()) return error;
  if (ffi::Error error = LookUp(x, GetDevice(device), &shape, &kernels); error.failure()) return error;
  for (Launcher* launcher : {kernels.forward, kernels.combine}) {
    if (launcher == nullptr) continue;
    if (const std::string& error = launcher->Load(device).error; !error.empty()) return ffi::Error::Internal(error);
  }
  return ffi::Error::Success();
}

// Launches a kernel that `Load` has made ready.  `overlaps`: it may begin before the one before it has ended, for which
// it waits by itself.
inline ffi::Error Launch(Launcher* launcher, CUstream stream, int device, uint32_t grid, ffi::DataType dtype,
                         const Params& params, bool overlaps) {
  const Launcher::Loaded& loaded = launcher->Load(device);
  if (!loaded.error.empty()) return ffi::Error::Internal(loaded.error);
  void* pointers[Params::kMax];
  int count = 0;
  for (const Param& param : params) {
    if (param.map != nullptr) {
      const TensorMapDataType type = dtype == ffi::BF16 ? kBFloat16 : kFloat16;
      std::string error = Encode(*param.map, type, param.tensor, static_cast<CUtensorMap*>(param.data));
      if (!error.empty()) return ffi::Error::Internal(error);
    }
    pointers[count++] = param.data;
  }
  CUlaunchAttribute attributes[2];
  unsigned attribute_count = 0;
  if (overlaps) attributes[attribute_count++] = {kProgrammaticStreamSerialization, {1}};
  if (launcher->cluster > 1) attributes[attribute_count++] = {kClusterDimension, {launcher->cluster, 1, 1}};
  const CUlaunchConfig config{grid, 1, 1, static_cast<unsigned>(launcher->threads), 1, 1,
                              static_cast<unsigned>(launcher->smem_bytes), stream, attributes, attribute_count};
  const Driver& driver = GetDriver();
  std::string error = driver.Failure("cuLaunchKernelEx",
                                     driver.LaunchKernelEx(&config, loaded.function, pointers, nullptr));
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(error);
}

inline ffi::Error Execute(CUstream stream, int ordinal, const Operands& x) {
  Shape shape;
  Kernels kernels;
  Plan plan;
  if (ffi::Error error = Check(x, &shape); error.failure()) return error;
  if (shape.b == 0 || shape.s_q == 0) return ffi::Error::Success();
  const Device& device = GetDevice(ordinal);
  if (ffi::Error error = LookUp(x, device, &shape, &kernels); error.failure()) return error;
  const auto& [forward, combine] = kernels;
  const Tiles tiles{forward->tile_m, forward->tile_n, device.processors * forward->ctas, forward->cluster};
  if (std::string error = PlanLaunch(shape, x.scale, tiles, &plan); !error.empty()) {
    return ffi::Error::InvalidArgument(std::string(x.op) + ": " + error);
  }
  Addresses at{x.q.data, x.o.data, x.sink.data, x.lse.data, x.o_parts.data, x.lse_parts.data, {}};
  for (int i = 0; i < x.source_count; ++i) {
    const Source& source = x.sources[i];
    at.sources[i] = {source.k.data, source.v.data, source.from.data, source.to.data};
  }
  const ForwardParams params(plan, at);
  ffi::Error error = Launch(forward, stream, ordinal, plan.grid, x.q.dtype, params, false);
  if (error.failure() || combine == nullptr) return error;
  CombinePlan combination = PlanCombine(shape, combine->threads, combine->tile_n);
  return Launch(combine, stream, ordinal, combination.grid, x.q.dtype, CombineParams(combination, at), true);
}

}  // namespace dsv4_fmha
