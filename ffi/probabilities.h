// The call of head-summed probabilities: checks the operands, looks the kernel up, launches it.
//
// q [b, s_q, h_q, d] and k [b, s_kv, d] of one dtype, lse f32 [b, s_q, h_q] with the sink, indices i32 [b, s_q, topk]
// -> p f32 [b, s_q, topk].
#pragma once

#include "launch.h"
#include "operands.h"
#include "probabilities_plan.h"

namespace dsv4_fmha {

struct HeadSummedProbabilities {
  Operand q, k, lse, indices;
  float scale;
  Operand p{};

  using Results = TypeList<ffi::Result<ffi::Buffer<ffi::F32, 3>>>;

  template <typename P>
  void Give(P& to_p) {
    p = {"p", *to_p};
  }

  ffi::Error Find(int ordinal, ProbabilitiesShape* shape, Launcher** launcher) const {
    const Ints rows = q.dimensions, keys = k.dimensions;
    if (rows.size() != 4) return Refuse(q, "shape " + Show(rows), "[b, s_q, h_q, d]");
    if (keys.size() != 3) return Refuse(k, "shape " + Show(keys), "[b, s_kv, d]");
    *shape = {.b = rows[0], .s_q = rows[1], .h_q = rows[2], .s_kv = keys[1], .topk = indices.dimensions[2]};
    Expectations expect;
    expect.Aligned(q);
    expect.Aligned(k);
    expect.Shape(k, {shape->b, shape->s_kv, rows[3]});
    expect.DtypeOf(q, k);
    expect.Shape(lse, {shape->b, shape->s_q, shape->h_q});
    expect.Shape(indices, {shape->b, shape->s_q, shape->topk});
    expect.Shape(p, {shape->b, shape->s_q, shape->topk});
    if (expect.error().failure()) return expect.error();
    const ProbabilitiesChoices call{.d = rows[3], .dtype = q.dtype};
    return LookUp("head_summed_probabilities", GetDevice(ordinal), call, launcher);
  }

  ffi::Error Initialize(int ordinal) const {
    ProbabilitiesShape shape;
    Launcher* launcher = nullptr;
    if (ffi::Error error = Find(ordinal, &shape, &launcher); error.failure()) return error;
    return Load(ordinal, {launcher});
  }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    ProbabilitiesShape shape;
    Launcher* launcher = nullptr;
    if (ffi::Error error = Find(ordinal, &shape, &launcher); error.failure()) return error;
    if (shape.b == 0 || shape.s_q == 0) return ffi::Error::Success();
    const ProbabilitiesAddresses at{.q = q.data, .k = k.data, .lse = lse.data, .indices = indices.data, .p = p.data};
    Plan<ProbabilitiesArguments> plan;
    const int64_t processors = launcher->TilesOn(GetDevice(ordinal)).processors;
    if (std::string error = PlanProbabilities(shape, scale, processors, at, &plan); !error.empty()) {
      return ffi::Error::InvalidArgument("head_summed_probabilities: " + error);
    }
    return Launch(launcher, stream, ordinal, plan);
  }
};

}  // namespace dsv4_fmha
