// Every call of attention: check the operands, look its kernels up, launch them.
//
// q [b, s_q, h_q, d], sink f32 [h_q] -> o like q, lse f32 [b, s_q, h_q], over the keys of one or more sources
// (operands.h). The sink is part of o, never of lse.
//
// Two more results say whether the keys of a row are split: o_parts f32 [n, s_q, h_q, splits, d] and lse_parts f32
// [n, s_q, h_q, splits] hold the partial results of the last n sequences, which a second kernel merges.  The keys of the
// sequences before them are whole, in a launch of their own.  With 0 or 1 splits there are no partial results.
#pragma once

#include "forward_plan.h"
#include "launch.h"
#include "operands.h"

namespace dsv4_fmha {

struct Forward {
  const char* op;
  bool shared_kv;  // one array is K and V
  bool kv_heads;   // keys are [b, s_kv, h_kv, d], not [b, s_kv, d]
  Operand q;
  Sources sources;
  Operand sink;
  float scale;
  Operand o{}, lse{}, o_parts{}, lse_parts{};

  using Results = TypeList<ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::Buffer<ffi::F32, 3>>,
                           ffi::Result<ffi::Buffer<ffi::F32, 5>>, ffi::Result<ffi::Buffer<ffi::F32, 4>>>;

  template <typename O, typename Lse, typename OParts, typename LseParts>
  void Give(O& to_o, Lse& to_lse, OParts& to_o_parts, LseParts& to_lse_parts) {
    o = {"o", *to_o}, lse = {"lse", *to_lse};
    o_parts = {"o_parts", *to_o_parts}, lse_parts = {"lse_parts", *to_lse_parts};
  }

  // Decoding has checked the ranks and dtypes of start, stop, indices, length, sink and lse.
  ffi::Error Check(AttentionShape* shape) const {
    const int64_t parts = lse_parts.dimensions[3];
    ffi::Error error = CheckAttention(q, sources, kv_heads, std::max<int64_t>(parts, 1), shape);
    if (error.failure()) return error;
    const auto& [b, s_q, h_q, h_kv, d, splits, type] = shape->rows;
    Expectations expect;
    expect.Aligned(q);
    expect.Aligned(o);
    expect.Shape(sink, {h_q});
    expect.Shape(o, {b, s_q, h_q, d});
    expect.DtypeOf(q, o);
    expect.Shape(lse, {b, s_q, h_q});
    const int64_t split = std::min(std::max<int64_t>(lse_parts.dimensions[0], 1), b);
    expect.Shape(o_parts, {split, s_q, h_q, parts, d});
    expect.Shape(lse_parts, {split, s_q, h_q, parts});
    return expect.error();
  }

  struct Kernels {
    Launcher* forward = nullptr;
    Launcher* combine = nullptr;  // where keys are split
  };

  // A kernel that does not split keys gets all of them.
  ffi::Error Find(const Device& device, AttentionShape* shape, Kernels* kernels) const {
    RowShape& rows = shape->rows;
    const ForwardChoices call{.d = rows.d, .dtype = q.dtype, .max_heads = rows.h_q};
    if (ffi::Error error = LookUp(op, device, call, &kernels->forward); error.failure()) return error;
    if (!kernels->forward->splits) rows.splits = 1;
    if (rows.splits == 1) return ffi::Error::Success();
    return LookUp("combine", device, CombineChoices{.dtype = q.dtype}, &kernels->combine);
  }

  ffi::Error Initialize(int ordinal) const {
    AttentionShape shape;
    Kernels kernels;
    if (ffi::Error error = Check(&shape); error.failure()) return error;
    if (ffi::Error error = Find(GetDevice(ordinal), &shape, &kernels); error.failure()) return error;
    return Load(ordinal, {kernels.forward, kernels.combine});
  }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    AttentionShape shape;
    Kernels kernels;
    if (ffi::Error error = Check(&shape); error.failure()) return error;
    if (shape.rows.b == 0 || shape.rows.s_q == 0) return ffi::Error::Success();
    const Device device = GetDevice(ordinal);
    if (ffi::Error error = Find(device, &shape, &kernels); error.failure()) return error;
    const int64_t b = shape.rows.b, splits = shape.rows.splits, split = splits > 1 ? lse_parts.dimensions[0] : b;
    if (split < b) {
      shape.rows.b = b - split, shape.rows.splits = 1;
      if (ffi::Error error = Attend(stream, ordinal, device, kernels, shape, 0); error.failure()) return error;
      shape.rows.b = split, shape.rows.splits = splits;
    }
    return Attend(stream, ordinal, device, kernels, shape, b - split);
  }

  // The launches for shape.rows.b sequences from `first` on. Where keys are gathered, they begin while the launch for
  // the sequences before them ends: it writes nothing that they touch, and those kernels wait for it at their end.
  ffi::Error Attend(CUstream stream, int ordinal, const Device& device, const Kernels& kernels,
                    const AttentionShape& shape, int64_t first) const {
    ForwardAddresses at{.q = From(q, first),
                        .o = From(o, first),
                        .sink = sink.data,
                        .lse = From(lse, first),
                        .o_parts = o_parts.data,
                        .lse_parts = lse_parts.data,
                        .sources = {}};
    for (int i = 0; i < sources.count; ++i) at.sources[i] = sources.items[i].at(first);
    Plan<ForwardArguments> plan;
    const Tiles tiles = kernels.forward->TilesOn(device);
    if (std::string error = PlanForward(shape, scale, tiles, at, &plan); !error.empty()) {
      return ffi::Error::InvalidArgument(std::string(op) + ": " + error);
    }
    ffi::Error error = Launch(kernels.forward, stream, ordinal, plan, /*overlaps=*/first > 0 && tiles.gathers);
    if (error.failure() || shape.rows.splits == 1) return error;
    Launcher* combine = kernels.combine;
    Plan<CombineArguments> merge = PlanCombine(shape.rows, combine->threads, combine->tile_n, device.processors, at);
    return Launch(combine, stream, ordinal, merge, /*overlaps=*/true);
  }
};

}  // namespace dsv4_fmha
