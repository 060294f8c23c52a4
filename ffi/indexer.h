// The calls of the lightning indexer, which launch their kernels block by block of queries: scores of entries, the
// choice of the greatest, or both with a workspace of scores f32 [rows, stride] between them.
//
// Keys of 8 bits have a scale each: k_scale, or in pages after the page's keys, as keys of 4 bits have theirs. `indexer_scores` gives all scores and
// chooses nothing: f32 [b * blocks * queries of a block, stride]. `indexer_topk` takes given scores f32 [b, s_q, s_c].
// `indexer_blocks` chooses among blocks of keys by their greatest scores, which are what its workspace has.
#pragma once

#include "indexer_plan.h"
#include "target.h"

namespace dsv4_fmha {

// What a call's pages are, if its keys are in any.
template <typename Call>
ffi::Error CheckIndexPages(const Call& call, const Axes& n, IndexerShape* shape) {
  if (call.table.name == nullptr) return ffi::Error::Success();
  const Ints keys = call.k.dimensions;
  const bool packed = call.k.dtype == ffi::U8;
  if (!packed && call.q.dtype == ffi::F8E4M3FN) {
    return Refuse(call.k, "shape " + Show(keys), "[pages, 132 bytes an entry]");
  }
  shape->of_4_bits = packed && call.q.dtype != ffi::F8E4M3FN;
  const int64_t entry = shape->key_bytes() + kScaleBytes;
  shape->pages = n.pages, shape->page = packed ? n.page_bytes / entry : n.page;
  shape->width = n.width, shape->s_c = n.width * shape->page;
  Expectations expect;
  if (packed) expect.Shape(call.k, {n.pages, shape->page * entry});
  return expect.error();
}

// The packing by which a kernel of such keys is found: "" where they are like q.
inline std::string_view PackingOfKeys(const IndexerShape& shape) { return shape.of_4_bits != 0 ? "index_fp4" : ""; }

// The kernel that chooses among so many scores of each of so many queries. Where CTAs share rows, 15 rows run at a time
// on an H100, in 9 us and 5 us for 100 000 scores; with a CTA each all run at a time, in 8 us and 35 us for 100 000.
inline ffi::Error LookUpChoice(const Device& device, int64_t queries, int64_t scores, int64_t topk, Launcher** choice) {
  static constexpr int64_t kRowsAtATime = 15, kLong = 16384;
  const int64_t turns = std::max<int64_t>(CeilDiv(queries, kRowsAtATime), 1);
  const int64_t rows = scores / turns / turns < kLong ? kMaxExtent : queries;
  return LookUp("indexer_topk", device, TopkChoices{.max_topk = topk, .max_rows = rows}, choice);
}

// Whether a choice begins before all scores are there. If there are fewer rows than places, the CTAs begin together, one
// on each processor. If some began early, the first processors to become free would take several.
inline bool Overlaps(uint32_t grid, const Launcher* choice, const Stream& stream) {
  return grid / choice->cluster >= U32(choice->TilesOn(stream.device).processors);
}

struct Indexer {
  using Call = IndexerCall;
  using Shape = IndexerShape;
  using Kernels = std::array<Launcher*, 2>;  // scores, choice; a call may lack either

  static bool Scores(const Call& call) { return call.q.name != nullptr; }
  static bool Chooses(const Call& call) { return call.indices.name != nullptr; }
  static bool OfBlocks(const Call& call) { return call.newest.name != nullptr; }

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    static constexpr int64_t kVector = 4;  // scores of one load
    *shape = {.b = n.b,
              .s_q = n.s_q,
              .s_c = n.s_c,
              .heads = 1,
              .topk = Chooses(call) ? n.topk : call.skip,
              .type = kFloat32,
              .of_4_bits = 0,
              .queries = 1,
              .stride = n.s_c,
              .wants_values = Chooses(call) && n.n_values != 0,
              .keys_of_score = OfBlocks(call) ? kIndexBlock : 1,
              .pages = n.b,
              .page = n.s_c,
              .width = 0};
    if (Scores(call)) {
      shape->heads = n.heads, shape->type = MapType(call.q.dtype), shape->stride = n.stride;
      if (ffi::Error error = CheckIndexPages(call, n, shape); error.failure()) return error;
    } else if (n.s_c % kVector != 0) {
      return Refuse(call.scores, "shape " + Show(call.scores.dimensions), "columns in fours");
    }
    Expectations expect;
    if (Chooses(call)) expect.Shape(call.values, {n.b, n.s_q, n.n_values == 0 || OfBlocks(call) ? 0 : n.topk});
    return expect.error();
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    auto& [scores, choice] = *kernels;
    if (Scores(call)) {
      const IndexerScoresChoices choices{.heads = shape->heads,
                                         .dtype = call.q.dtype,
                                         .paged = shape->paged(),
                                         .blocks = OfBlocks(call),
                                         .packing = PackingOfKeys(*shape)};
      if (ffi::Error error = LookUp("indexer_scores", device, choices, &scores); error.failure()) return error;
      shape->queries = scores->tile_m / shape->heads;
      if (ffi::Error error = CheckWorkspace(call, *shape, scores->tile_n); error.failure()) return error;
    }
    if (!Chooses(call)) return ffi::Error::Success();
    return LookUpChoice(device, shape->b * shape->s_q, shape->stride, shape->topk, &choice);
  }

  // Whole tiles of columns; and rows for some blocks of queries, or for all where the scores are the result.
  static ffi::Error CheckWorkspace(const Call& call, const Shape& shape, int64_t tile) {
    const Ints got = call.scores.dimensions;
    const int64_t stride = CeilDiv(shape.s_c, tile) * tile / shape.keys_of_score, all = shape.blocks() * shape.queries;
    if (got[0] < shape.queries || got[1] != stride) {
      return Refuse(call.scores, "shape " + Show(got),
                    Show(stride) + " columns, and " + Show(shape.queries) + " rows or more");
    }
    if (Chooses(call) || got[0] == all) return ffi::Error::Success();
    return Refuse(call.scores, "shape " + Show(got), Show(all) + " rows");
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckIndexerShape(shape); !error.empty()) return ffi::Error::InvalidArgument(error);
    const auto& [scores, choice] = kernels;
    const auto at = AddressesOf<IndexerAddresses>(call);
    const int64_t blocks = shape.blocks();
    const int64_t at_a_time = Scores(call) ? call.scores.dimensions[0] / shape.queries : blocks;
    for (int64_t first = 0; first < blocks; first += at_a_time) {
      const int64_t count = std::min(at_a_time, blocks - first);
      if (scores != nullptr) {
        auto plan = PlanIndexerScores(shape, scores->TilesOn(stream.device), first, count, at);
        ffi::Error error = Launch(scores, stream, plan, /*overlaps=*/first != 0);
        if (error.failure()) return error;
      }
      if (choice == nullptr) continue;
      auto plan = PlanTopk(shape, choice->cluster, first, count, at);
      const bool overlaps = scores != nullptr && Overlaps(plan.grid, choice, stream);
      ffi::Error error = Launch(choice, stream, plan, overlaps);
      if (error.failure()) return error;
    }
    return ffi::Error::Success();
  }
};

}  // namespace dsv4_fmha
