// The calls of the lightning indexer's scores at given entries, and of their gradients.
//
// q [b, s_q, heads, 128] and k [b, s_c, 128] of one dtype, weights f32 [b, s_q, heads], indices i32 [b, s_q, topk]
// -> scores f32 [b, s_q, topk]; or with their cotangent -> dq like q, dk f32 like k, dweights f32 like weights.
#pragma once

#include "indexer_plan.h"
#include "launch.h"
#include "operands.h"

namespace dsv4_fmha {

struct IndexerScoresAt {
  const char* op;
  Operand q, k, weights, indices;
  Operand scores{};

  ffi::Error Check(Expectations expect, IndexAtShape* shape) const {
    const Ints rows = q.dimensions;
    if (rows.size() != 4) return Refuse(q, "shape " + Show(rows), "[b, s_q, heads, 128]");
    if (k.dimensions.size() != 3) return Refuse(k, "shape " + Show(k.dimensions), "[b, s_c, 128]");
    const int64_t b = rows[0], s_q = rows[1], heads = rows[2], s_c = k.dimensions[1], topk = indices.dimensions[2];
    expect.Shape(q, {b, s_q, heads, kIndexDim});
    expect.Shape(k, {b, s_c, kIndexDim});
    expect.DtypeOf(q, k);
    expect.Shape(weights, {b, s_q, heads});
    expect.Shape(indices, {b, s_q, topk});
    expect.Shape(scores, {b, s_q, topk});
    for (const Operand* x : {&q, &k}) expect.Aligned(*x);
    *shape = {.b = b, .s_q = s_q, .s_c = s_c, .heads = heads, .topk = topk};
    return expect.error();
  }

  ffi::Error Find(int ordinal, Launcher** launcher) const {
    const IndexerScoresAtChoices call{.heads = q.dimensions[2], .dtype = q.dtype};
    return LookUp(op, GetDevice(ordinal), call, launcher);
  }

  ffi::Error Initialize(int ordinal, const ffi::Error& wrong) const {
    if (wrong.failure()) return wrong;
    Launcher* launcher = nullptr;
    if (ffi::Error error = Find(ordinal, &launcher); error.failure()) return error;
    return Load(ordinal, {launcher});
  }

  ffi::Error Execute(CUstream stream, int ordinal, const IndexAtShape& shape, IndexAtAddresses at) const {
    if (shape.b == 0 || shape.s_q == 0) return ffi::Error::Success();
    if (std::string error = CheckIndexAtShape(shape); !error.empty()) return ffi::Error::InvalidArgument(error);
    Launcher* launcher = nullptr;
    if (ffi::Error error = Find(ordinal, &launcher); error.failure()) return error;
    at.q = q.data, at.k = k.data, at.weights = weights.data, at.indices = indices.data, at.scores = scores.data;
    auto plan = PlanIndexAt(shape, at);
    return Launch(launcher, stream, ordinal, plan);
  }
};

struct ScoresAt : IndexerScoresAt {
  using Results = TypeList<ffi::Result<ffi::Buffer<ffi::F32, 3>>>;

  template <typename Scores>
  void Give(Scores& to_scores) {
    scores = {"scores", *to_scores};
  }

  ffi::Error Initialize(int ordinal) const {
    IndexAtShape shape;
    return IndexerScoresAt::Initialize(ordinal, Check({}, &shape));
  }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    IndexAtShape shape;
    if (ffi::Error error = Check({}, &shape); error.failure()) return error;
    return IndexerScoresAt::Execute(stream, ordinal, shape, {});
  }
};

struct ScoresAtGradient : IndexerScoresAt {
  Operand dq{}, dk{}, dweights{};

  using Results = TypeList<ffi::Result<ffi::AnyBuffer>, ffi::Result<ffi::Buffer<ffi::F32, 3>>,
                           ffi::Result<ffi::Buffer<ffi::F32, 3>>>;

  template <typename Q, typename K, typename Weights>
  void Give(Q& to_q, K& to_k, Weights& to_weights) {
    dq = {"dq", *to_q}, dk = {"dk", *to_k}, dweights = {"dweights", *to_weights};
  }

  ffi::Error CheckAll(IndexAtShape* shape) const {
    Expectations expect;
    expect.Shape(dq, q.dimensions);
    expect.DtypeOf(q, dq);
    expect.Shape(dk, k.dimensions);
    expect.Shape(dweights, weights.dimensions);
    return Check(expect, shape);
  }

  ffi::Error Initialize(int ordinal) const {
    IndexAtShape shape;
    return IndexerScoresAt::Initialize(ordinal, CheckAll(&shape));
  }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    IndexAtShape shape;
    if (ffi::Error error = CheckAll(&shape); error.failure()) return error;
    if (ffi::Error error = Zero(dk.data, Elements(dk.dimensions), stream); error.failure()) return error;
    IndexAtAddresses at{};
    at.dq = dq.data, at.dk = dk.data, at.dweights = dweights.data;
    return IndexerScoresAt::Execute(stream, ordinal, shape, at);
  }
};

}  // namespace dsv4_fmha
