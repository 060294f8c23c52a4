// The calls of the lightning indexer's choice within listed blocks of keys, which launch their kernels some queries at a
// time, with a workspace of scores f32 [rows, 8 n_blocks] between them: indices of places in a query's list, s32, and
// the scores there.
#pragma once

#include "indexer.h"
#include "indexer_within_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct IndexerWithin {
  using Call = IndexerWithinCall;
  using Shape = IndexerWithinShape;
  using Kernels = std::array<Launcher*, 2>;  // scores, choice

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    *shape = {.of_keys = {.b = n.b,
                          .s_q = n.s_q,
                          .s_c = n.s_c,
                          .heads = n.heads,
                          .topk = n.topk,
                          .type = MapType(call.q.dtype),
                          .of_4_bits = 0,
                          .queries = 1,
                          .stride = n.listed,
                          .wants_values = 1,
                          .keys_of_score = 1,
                          .pages = n.b,
                          .page = n.s_c,
                          .width = 0},
              .count = n.n_blocks,
              .from_start = call.from_start};
    if (ffi::Error error = CheckIndexPages(call, n, &shape->of_keys); error.failure()) return error;
    const Ints got = call.scores.dimensions;
    if (got[0] >= 1 && got[1] == shape->listed()) return ffi::Error::Success();
    return Refuse(call.scores, "shape " + Show(got), Show(shape->listed()) + " columns, and 1 row or more");
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const IndexerScoresWithinChoices choices{.heads = shape->of_keys.heads,
                                             .dtype = call.q.dtype,
                                             .paged = shape->of_keys.paged(),
                                             .packing = PackingOfKeys(shape->of_keys)};
    if (ffi::Error error = LookUp("indexer_scores_within", device, choices, &(*kernels)[0]); error.failure()) {
      return error;
    }
    return LookUpChoice(device, shape->queries(), shape->listed(), shape->of_keys.topk, &(*kernels)[1]);
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    if (std::string error = CheckIndexerWithinShape(shape); !error.empty()) return ffi::Error::InvalidArgument(error);
    const auto& [scores, choice] = kernels;
    const auto at = AddressesOf<IndexerWithinAddresses>(call);
    const int64_t queries = shape.queries(), at_a_time = call.scores.dimensions[0];
    for (int64_t first = 0; first < queries; first += at_a_time) {
      const int64_t count = std::min(at_a_time, queries - first);
      auto scoring = PlanIndexerScoresWithin(shape, scores->TilesOn(stream.device), first, count, at);
      if (ffi::Error error = Launch(scores, stream, scoring, /*overlaps=*/first != 0); error.failure()) return error;
      auto choosing = PlanTopkWithin(shape, choice->cluster, first, count, at);
      if (ffi::Error error = Launch(choice, stream, choosing, Overlaps(choosing.grid, choice, stream));
          error.failure()) {
        return error;
      }
    }
    return ffi::Error::Success();
  }
};

}  // namespace dsv4_fmha
