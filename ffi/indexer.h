// The calls of the lightning indexer: check the operands, look the kernels up, launch them block by block of queries.
//
// q [b, s_q, heads, 128] and k [b, s_c, 128] of one dtype, weights f32 [b, s_q, heads], k_scale f32 [b, s_c], start and
// stop i32 [b, s_q]; or k in pages, [pages, page, 128], or u8 [pages, page * 132] where q has 8 bits, and in place of
// k_scale a table i32 [b, width] -> indices i32 [b, s_q, topk], values f32 [b, s_q, topk] or [b, s_q, 0], and a
// workspace of scores f32 [rows, stride].  `indexer_scores` gives all scores and chooses nothing: f32 [b * blocks * queries
// of a block, stride].  `topk` takes given scores f32 [b, s_q, s_c] instead.
#pragma once

#include "indexer_plan.h"
#include "launch.h"
#include "operands.h"

namespace dsv4_fmha {

// A call that is one launch: `Call` has Find(device, shape, kernel) and PlanOf(shape, tiles).
template <typename Call>
struct OneLaunch {
  ffi::Error Initialize(int ordinal) const {
    IndexShape shape;
    Launcher* kernel = nullptr;
    if (ffi::Error error = call().Find(ordinal, &shape, &kernel); error.failure()) return error;
    return Load(ordinal, {kernel});
  }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    IndexShape shape;
    Launcher* kernel = nullptr;
    if (ffi::Error error = call().Find(ordinal, &shape, &kernel); error.failure()) return error;
    if (shape.b == 0 || shape.s_q == 0) return ffi::Error::Success();
    if (std::string error = CheckIndexShape(shape); !error.empty()) return ffi::Error::InvalidArgument(error);
    auto plan = call().PlanOf(shape, kernel->TilesOn(GetDevice(ordinal)));
    return Launch(kernel, stream, ordinal, plan);
  }

 private:
  const Call& call() const { return static_cast<const Call&>(*this); }
};

struct Chosen {
  Operand indices{}, values{};

  void Expect(int64_t b, int64_t s_q, Expectations* expect) const {
    const int64_t topk = indices.dimensions[2];
    expect->Shape(indices, {b, s_q, topk});
    expect->Shape(values, {b, s_q, values.dimensions[2] == 0 ? 0 : topk});
  }
};

// The entries to score, and the queries that score them.
struct Scored {
  Operand q, k, weights, start, stop;
  Operand k_scale{}, table{};  // exactly one of them is given
  Operand scores{};

  // All of the shape, except what is chosen.
  ffi::Error FindScores(int ordinal, IndexShape* shape, Launcher** kernel) const {
    const Ints rows = q.dimensions, keys = k.dimensions;
    const bool paged = table.name != nullptr, packed = paged && q.dtype == ffi::F8E4M3FN;
    if (rows.size() != 4) return Refuse(q, "shape " + Show(rows), "[b, s_q, heads, 128]");
    if (keys.size() != (packed ? 2 : 3)) {
      return Refuse(k, "shape " + Show(keys),
                    packed  ? "[pages, 132 bytes an entry]"
                    : paged ? "[pages, page, 128]"
                            : "[b, s_c, 128]");
    }
    const int64_t b = rows[0], s_q = rows[1], heads = rows[2], width = paged ? table.dimensions[1] : 0;
    const int64_t page = packed ? keys[1] / (kIndexDim + kScaleBytes) : keys[1], s_c = paged ? width * page : page;
    Expectations expect;
    expect.Shape(q, {b, s_q, heads, kIndexDim});
    if (packed) {
      expect.Shape(k, {keys[0], page * (kIndexDim + kScaleBytes)});
      expect.Dtype(k, ffi::U8);
    } else {
      expect.Shape(k, {paged ? keys[0] : b, page, kIndexDim});
      expect.DtypeOf(q, k);
    }
    if (paged) {
      expect.Shape(table, {b, width});
    } else {
      expect.Shape(k_scale, {b, s_c});
    }
    expect.Shape(weights, {b, s_q, heads});
    expect.Shape(start, {b, s_q});
    expect.Shape(stop, {b, s_q});
    if (expect.error().failure()) return expect.error();
    const IndexerScoresChoices call{.heads = heads, .dtype = q.dtype, .paged = paged};
    if (ffi::Error error = LookUp("indexer_scores", GetDevice(ordinal), call, kernel); error.failure()) return error;
    *shape = {.b = b,
              .s_q = s_q,
              .s_c = s_c,
              .heads = heads,
              .topk = 0,
              .type = MapType(q.dtype),
              .queries = (*kernel)->tile_m / heads,
              .stride = scores.dimensions[1],
              .wants_values = 0,
              .pages = keys[0],
              .page = page,
              .width = width};
    const int64_t tile = (*kernel)->tile_n, wanted = CeilDiv(s_c, tile) * tile;
    if (scores.dimensions[0] < shape->queries || shape->stride != wanted) {
      return Refuse(scores, "shape " + Show(scores.dimensions),
                    Show(wanted) + " columns, and " + Show(shape->queries) + " rows or more");
    }
    return ffi::Error::Success();
  }

  IndexAddresses Addresses() const {
    return {.q = q.data,
            .k = k.data,
            .weights = weights.data,
            .k_scale = k_scale.data,
            .table = table.data,
            .start = start.data,
            .stop = stop.data,
            .scores = scores.data,
            .indices = nullptr,
            .values = nullptr};
  }
};

// Scores of all entries that a query sees, unless it sees `skip` or fewer; what it does not see has a score of any kind.
struct AllScores : Scored, OneLaunch<AllScores> {
  int64_t skip = 0;

  using Results = TypeList<ffi::Result<ffi::Buffer<ffi::F32, 2>>>;

  template <typename Scores>
  void Give(Scores& to_scores) {
    scores = {"scores", *to_scores};
  }

  ffi::Error Find(int ordinal, IndexShape* shape, Launcher** kernel) const {
    if (ffi::Error error = FindScores(ordinal, shape, kernel); error.failure()) return error;
    shape->topk = skip;
    const int64_t rows = shape->blocks() * shape->queries;
    return scores.dimensions[0] == rows ? ffi::Error::Success()
                                        : Refuse(scores, "shape " + Show(scores.dimensions), Show(rows) + " rows");
  }

  auto PlanOf(const IndexShape& shape, const Tiles& tiles) const {
    return PlanIndexScores(shape, tiles, 0, shape.blocks(), Addresses());
  }
};

struct Indexer : Scored, Chosen {
  using Results = TypeList<ffi::Result<ffi::Buffer<ffi::S32, 3>>, ffi::Result<ffi::Buffer<ffi::F32, 3>>,
                           ffi::Result<ffi::Buffer<ffi::F32, 2>>>;

  template <typename Indices, typename Values, typename Scores>
  void Give(Indices& to_indices, Values& to_values, Scores& to_scores) {
    indices = {"indices", *to_indices}, values = {"values", *to_values}, scores = {"scores", *to_scores};
  }

  struct Kernels {
    Launcher* scores = nullptr;
    Launcher* topk = nullptr;
  };

  ffi::Error Find(int ordinal, IndexShape* shape, Kernels* kernels) const {
    if (ffi::Error error = FindScores(ordinal, shape, &kernels->scores); error.failure()) return error;
    Expectations expect;
    Expect(shape->b, shape->s_q, &expect);
    if (expect.error().failure()) return expect.error();
    shape->topk = indices.dimensions[2], shape->wants_values = values.dimensions[2] != 0;
    return LookUp("indexer_topk", GetDevice(ordinal), TopkChoices{.max_topk = shape->topk}, &kernels->topk);
  }

  ffi::Error Initialize(int ordinal) const {
    IndexShape shape;
    Kernels kernels;
    if (ffi::Error error = Find(ordinal, &shape, &kernels); error.failure()) return error;
    return Load(ordinal, {kernels.scores, kernels.topk});
  }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    IndexShape shape;
    Kernels kernels;
    if (ffi::Error error = Find(ordinal, &shape, &kernels); error.failure()) return error;
    if (shape.b == 0 || shape.s_q == 0) return ffi::Error::Success();
    if (std::string error = CheckIndexShape(shape); !error.empty()) return ffi::Error::InvalidArgument(error);
    const Tiles tiles = kernels.scores->TilesOn(GetDevice(ordinal));
    IndexAddresses at = Addresses();
    at.indices = indices.data, at.values = values.data;
    const int64_t blocks = shape.blocks(), at_a_time = scores.dimensions[0] / shape.queries;
    for (int64_t first = 0; first < blocks; first += at_a_time) {
      const int64_t count = std::min(at_a_time, blocks - first);
      auto score = PlanIndexScores(shape, tiles, first, count, at);
      ffi::Error error = Launch(kernels.scores, stream, ordinal, score, /*overlaps=*/first != 0);
      if (error.failure()) return error;
      auto choose = PlanTopk(shape, first, count, at);
      // If there are fewer rows than places, the CTAs begin together, one on each processor. If some began early, the
      // first processors to become free would take several.
      const bool fills = choose.grid >= U32(kernels.topk->TilesOn(GetDevice(ordinal)).processors);
      error = Launch(kernels.topk, stream, ordinal, choose, /*overlaps=*/fills);
      if (error.failure()) return error;
    }
    return ffi::Error::Success();
  }
};

struct TopK : Chosen, OneLaunch<TopK> {
  Operand scores, start, stop;

  using Results = TypeList<ffi::Result<ffi::Buffer<ffi::S32, 3>>, ffi::Result<ffi::Buffer<ffi::F32, 3>>>;

  template <typename Indices, typename Values>
  void Give(Indices& to_indices, Values& to_values) {
    indices = {"indices", *to_indices}, values = {"values", *to_values};
  }

  ffi::Error Find(int ordinal, IndexShape* shape, Launcher** kernel) const {
    static constexpr int64_t kVector = 4;  // scores of one load
    const int64_t b = scores.dimensions[0], s_q = scores.dimensions[1], s_c = scores.dimensions[2];
    Expectations expect;
    expect.Shape(start, {b, s_q});
    expect.Shape(stop, {b, s_q});
    Expect(b, s_q, &expect);
    if (expect.error().failure()) return expect.error();
    if (s_c % kVector != 0) return Refuse(scores, "shape " + Show(scores.dimensions), "columns in fours");
    *shape = {.b = b,
              .s_q = s_q,
              .s_c = s_c,
              .heads = 1,
              .topk = indices.dimensions[2],
              .type = kFloat32,
              .queries = 1,
              .stride = s_c,
              .wants_values = values.dimensions[2] != 0};
    return LookUp("indexer_topk", GetDevice(ordinal), TopkChoices{.max_topk = shape->topk}, kernel);
  }

  auto PlanOf(const IndexShape& shape, const Tiles&) const {
    IndexAddresses at{};
    at.scores = scores.data, at.start = start.data, at.stop = stop.data;
    at.indices = indices.data, at.values = values.data;
    return PlanTopk(shape, 0, shape.blocks(), at);
  }
};

}  // namespace dsv4_fmha
