// What this library holds and would launch, for Python and for the tests.  Plain C, no device needed.
#include <cstdio>
#include <cstring>

#include "all_reduce_plan.h"
#include "by_columns_plan.h"
#include "expert_product_plan.h"
#include "expert_rows_plan.h"
#include "few_rows_product_plan.h"
#include "forward_plan.h"
#include "fused_moe_plan.h"
#include "hyper_connection_bwd_plan.h"
#include "hyper_connection_plan.h"
#include "indexer_plan.h"
#include "indexer_scores_at_plan.h"
#include "indexer_within_plan.h"
#include "key_codes_plan.h"
#include "kv_insert_plan.h"
#include "mha_backward_plan.h"
#include "mla_backward_plan.h"
#include "probabilities_plan.h"
#include "registry.h"
#include "rope_plan.h"
#include "route_plan.h"
#include "seen_slots_plan.h"
#include "unpack_matrix_plan.h"

using namespace dsv4_fmha;

namespace {

// What a kernel receives, in order, by name.  A tensor map shows its address here, and its other fields in `maps`.
struct ShownLaunch {
  uint32_t grid, count;
  int32_t least_smem_bytes;
  const char* names[kMaxParams];
  uint32_t sizes[kMaxParams];
  unsigned char bytes[kMaxParams][sizeof(CUtensorMap)];
  TensorMapSpec maps[kMaxParams];  // rank 0 where the parameter is not a map

  template <typename FamilyArguments>
  ShownLaunch(const Layout& layout, const Plan<FamilyArguments>& plan)
      : grid(plan.grid), count(0), least_smem_bytes(plan.least_smem_bytes), names{}, sizes{}, bytes{}, maps{} {
    for (const Param& param : layout) {
      const uint32_t i = count++;
      const char* value = reinterpret_cast<const char*>(&plan.arguments) + param.offset;
      names[i] = param.name;
      sizes[i] = param.bytes;
      if (param.is_map) {
        const auto& tensor = *reinterpret_cast<const TensorArgument*>(value);
        memcpy(bytes[i], &tensor.address, sizeof tensor.address);
        maps[i] = tensor.map;
      } else {
        memcpy(bytes[i], value, param.bytes);
      }
    }
  }
};

const Layout* FindLayout(std::string_view name) {
  for (const Layout* layout : kLayouts) {
    if (layout->name == name) return layout;
  }
  return nullptr;
}

// 0, or -1 with the reason why there is no plan in `error`.
template <typename FamilyArguments>
int Show(const char* layout, const Plan<FamilyArguments>& plan, const std::string& reason, ShownLaunch* out,
         char* error, size_t error_bytes) {
  if (reason.empty()) {
    *out = ShownLaunch(*FindLayout(layout), plan);
    return 0;
  }
  snprintf(error, error_bytes, "%s", reason.c_str());
  return -1;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// JSON: {"toolchain": ..., "variants": [...]}, as kernels/build.py wrote it.
const char* dsv4_fmha_manifest() { return Manifest(); }

// The cubin of a variant, by its key in the manifest; nullptr when there is none.
const unsigned char* dsv4_fmha_cubin(const char* key, size_t* bytes) {
  for (const Launcher& launcher : Launchers()) {
    if (std::string_view(launcher.name) != key) continue;
    *bytes = launcher.cubin_bytes;
    return launcher.cubin;
  }
  return nullptr;
}

// The key of the variant that attention with this many heads gets, with all other choices as in this one; nullptr for
// none.
const char* dsv4_fmha_called(const char* key, int64_t heads) {
  for (const Launcher& launcher : Launchers()) {
    if (std::string_view(launcher.name) != key) continue;
    ForwardChoices call = std::get<ForwardChoices>(launcher.choices);
    call.max_heads = heads;
    const Launcher* found = Find(launcher.op, launcher.arch, call);
    return found != nullptr ? found->name : nullptr;
  }
  return nullptr;
}

// What attention launches for a shape, with a kernel of this layout: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan_forward(const char* layout, const AttentionShape* shape, float scale, float eps, const Tiles* tiles,
                           const ForwardAddresses* addresses, ShownLaunch* out, char* error, size_t error_bytes) {
  Plan<ForwardArguments> plan;
  const std::string reason = PlanForward(*shape, scale, eps, *tiles, *addresses, &plan);
  return Show(layout, plan, reason, out, error, error_bytes);
}

// The same for its gradient.
int dsv4_fmha_plan_mla_backward(const char* layout, const AttentionShape* shape, float scale, float eps,
                                int64_t dout_heads, const Tiles* tiles, const MlaBackwardAddresses* addresses,
                                ShownLaunch* out, char* error, size_t error_bytes) {
  Plan<MlaBackwardArguments> plan;
  const std::string reason = PlanMlaBackward(*shape, scale, {eps, dout_heads}, *tiles, *addresses, &plan);
  return Show(layout, plan, reason, out, error, error_bytes);
}

// The same where K and V are separate, for the gradients of keys or those of rows.
int dsv4_fmha_plan_mha_backward(const char* layout, const AttentionShape* shape, float scale, bool of_keys,
                                const Tiles* tiles, const MhaBackwardAddresses* addresses, ShownLaunch* out,
                                char* error, size_t error_bytes) {
  Plan<MhaBackwardArguments> plan;
  const std::string reason =
      PlanMhaBackward(shape->rows, shape->sources[0].s_kv, scale, of_keys, *tiles, *addresses, &plan);
  return Show(layout, plan, reason, out, error, error_bytes);
}

// The launch before that one.
int dsv4_fmha_plan_tile_spans(const RowShape* shape, int32_t tile_m, int32_t tiles_of_cta,
                              const MhaBackwardAddresses* addresses, ShownLaunch* out, char* error,
                              size_t error_bytes) {
  Plan<TileSpansArguments> plan;
  const std::string reason = PlanTileSpans(*shape, tile_m, tiles_of_cta, *addresses, &plan);
  return Show("tile_spans", plan, reason, out, error, error_bytes);
}

// The launch after attention where keys are split: each of this many threads merges `columns` of a row.
void dsv4_fmha_plan_combine(const RowShape* shape, int32_t threads, int32_t columns, int32_t processors,
                            const ForwardAddresses* addresses, ShownLaunch* out) {
  *out = ShownLaunch(kCombine, PlanCombine(*shape, threads, columns, processors, *addresses));
}

// The launches of attention to few queries, with room for so many tiles of keys: scores, with a kernel of this layout.
int dsv4_fmha_plan_row_scores(const char* layout, const AttentionShape* shape, int64_t room, const Tiles* tiles,
                              const ByColumnsAddresses* addresses, ShownLaunch* out, char* error, size_t error_bytes) {
  Plan<RowScoresArguments> plan;
  const std::string reason = PlanRowScores(*shape, room, *tiles, *addresses, &plan);
  return Show(layout, plan, reason, out, error, error_bytes);
}

// Then columns of o.
int dsv4_fmha_plan_row_columns(const RowShape* shape, int64_t room, float scale, const Tiles* tiles,
                               const ByColumnsAddresses* addresses, ShownLaunch* out, char* error, size_t error_bytes) {
  Plan<RowColumnsArguments> plan;
  const std::string reason = PlanRowColumns(*shape, room, scale, *tiles, *addresses, &plan);
  return Show(kRowColumns.name, plan, reason, out, error, error_bytes);
}

// The launches of the lightning indexer for `count` blocks of queries from `first` on: scores, then their choice.
void dsv4_fmha_plan_indexer(const IndexerShape* shape, const Tiles* tiles, int64_t ctas_of_row, int64_t first,
                            int64_t count, const IndexerAddresses* addresses, ShownLaunch* scores,
                            ShownLaunch* choice) {
  const Layout& layout = !shape->paged()         ? kIndexerScores
                         : shape->scaled_pages() ? kIndexerScoresPagedScaled
                                                 : kIndexerScoresPaged;
  *scores = ShownLaunch(layout, PlanIndexerScores(*shape, *tiles, first, count, *addresses));
  *choice = ShownLaunch(kTopk, PlanTopk(*shape, ctas_of_row, first, count, *addresses));
}

// The launches of a choice within blocks for `count` queries from `first` on: scores, then their choice.
void dsv4_fmha_plan_indexer_within(const IndexerShape* of_keys, int64_t blocks, int64_t from_start, const Tiles* tiles,
                                   int64_t ctas_of_row, int64_t first, int64_t count,
                                   const IndexerWithinAddresses* addresses, ShownLaunch* scores, ShownLaunch* choice) {
  const Layout& layout = of_keys->paged()                   ? kIndexerScoresWithinPaged
                         : ElementBytes(of_keys->type) == 1 ? kIndexerScoresWithinScaled
                                                            : kIndexerScoresWithin;
  const IndexerWithinShape shape{*of_keys, blocks, from_start};
  *scores = ShownLaunch(layout, PlanIndexerScoresWithin(shape, *tiles, first, count, *addresses));
  *choice = ShownLaunch(kTopk, PlanTopkWithin(shape, ctas_of_row, first, count, *addresses));
}

// The launch of head-summed probabilities: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan_probabilities(const ProbabilitiesShape* shape, float scale, int64_t processors,
                                 const ProbabilitiesAddresses* addresses, ShownLaunch* out, char* error,
                                 size_t error_bytes) {
  Plan<ProbabilitiesArguments> plan;
  const std::string reason = PlanProbabilities(*shape, scale, processors, *addresses, &plan);
  return Show(kProbabilities.name, plan, reason, out, error, error_bytes);
}

// The launch of scores at given entries, or of their gradients.
void dsv4_fmha_plan_indexer_scores_at(const IndexerScoresAtShape* shape, bool gradient,
                                      const IndexerScoresAtAddresses* addresses, ShownLaunch* out) {
  *out = ShownLaunch(gradient ? kIndexerScoresAtBwd : kIndexerScoresAt, PlanIndexerScoresAt(*shape, *addresses));
}

// What RoPE is launched with, by CTAs of tile_m rows: in place, or with a norm in front of it, or their gradient.
void dsv4_fmha_plan_rope(const RopeShape* shape, float direction, int32_t tile_m, const RopeAddresses* addresses,
                         ShownLaunch* out) {
  *out = ShownLaunch(kRope, PlanRope(*shape, direction, tile_m, *addresses));
}

void dsv4_fmha_plan_norm_rope(const RopeShape* shape, float eps, int32_t tile_m, const RopeAddresses* addresses,
                              ShownLaunch* out) {
  *out = ShownLaunch(kNormRope, PlanNormRope(*shape, eps, tile_m, *addresses));
}

void dsv4_fmha_plan_index_query(const RopeShape* shape, int32_t tile_m, const RopeAddresses* addresses,
                                ShownLaunch* out) {
  *out = ShownLaunch(kIndexQuery, PlanIndexQuery(*shape, tile_m, *addresses));
}

// A product of few rows with a matrix: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan_few_rows_product(const FewRowsProductShape* shape, float eps, float scale, const Tiles* tiles,
                                    const FewRowsProductAddresses* addresses, ShownLaunch* out, char* error,
                                    size_t error_bytes) {
  const bool packed = shape->is_packed != 0;
  const Layout& layout =
      shape->makes_heads != 0   ? (packed ? kFewRowsProductNormRopeOfPacked : kFewRowsProductNormRope)
      : shape->indexes != 0     ? (packed ? kFewRowsProductIndexQueryOfPacked : kFewRowsProductIndexQuery)
      : shape->takes_heads != 0 ? (packed ? kFewRowsProductOfTurnedOfPacked : kFewRowsProductOfTurned)
                                : (packed ? kFewRowsProductOfPacked : kFewRowsProduct);
  return Show(layout.name, PlanFewRowsProduct(*shape, eps, scale, *tiles, *addresses), CheckFewRowsProductShape(*shape),
              out, error, error_bytes);
}

// What writes matrices in FP8 as arrays, by CTAs of tile_m rows and tile_n columns: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan_unpack_matrix(const UnpackMatrixShape* shape, int32_t tile_m, int32_t tile_n,
                                 const UnpackMatrixAddresses* addresses, ShownLaunch* out, char* error,
                                 size_t error_bytes) {
  return Show(kUnpackMatrix.name, PlanUnpackMatrix(*shape, tile_m, tile_n, *addresses), CheckUnpackMatrixShape(*shape),
              out, error, error_bytes);
}

// What chooses the experts of rows and weighs them, by CTAs of tile_m rows: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan_route(const RouteShape* shape, float unit, float scale, int32_t tile_m,
                         const RouteAddresses* addresses, ShownLaunch* out, char* error, size_t error_bytes) {
  return Show(kRoute.name, PlanRoute(*shape, unit, scale, tile_m, *addresses), CheckRouteShape(*shape), out, error,
              error_bytes);
}

// What sorts rows by expert, for products whose tiles have tile_m rows: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan_group_rows(const FusedMoeShape* shape, int32_t tile_m, const FusedMoeAddresses* addresses,
                              ShownLaunch* out, char* error, size_t error_bytes) {
  return Show(kGroupRows.name, PlanGroupRows(*shape, tile_m, *addresses), CheckFusedMoeShape(*shape), out, error,
              error_bytes);
}

// The gated product of experts, or the one after it.
int dsv4_fmha_plan_grouped_product(const FusedMoeShape* shape, bool gated, float limit, const Tiles* tiles,
                                   const FusedMoeAddresses* addresses, ShownLaunch* out, char* error,
                                   size_t error_bytes) {
  return Show(kGroupedProduct.name, PlanGroupedProduct(*shape, gated, *tiles, limit, *addresses),
              CheckFusedMoeShape(*shape), out, error, error_bytes);
}

// What moves rows to and from experts, by CTAs of tile_m rows.
int dsv4_fmha_plan_expert_rows(const ExpertRowsShape* shape, int32_t tile_m, const ExpertRowsAddresses* addresses,
                               ShownLaunch* out, char* error, size_t error_bytes) {
  return Show(kExpertRows.name, PlanExpertRows(*shape, tile_m, *addresses), CheckExpertRowsShape(*shape), out, error,
              error_bytes);
}

// A product of rows by group, as training has them.
int dsv4_fmha_plan_expert_product(const ExpertProductShape* shape, float limit, const Tiles* tiles,
                                  const ExpertProductAddresses* addresses, ShownLaunch* out, char* error,
                                  size_t error_bytes) {
  const Layout& layout = shape->form == kOuter       ? kExpertOuterProduct
                         : shape->form == kGated     ? kExpertProductGated
                         : shape->form == kGatedBack ? kExpertProductGatedBack
                                                     : kExpertProduct;
  return Show(layout.name, PlanExpertProduct(*shape, *tiles, limit, *addresses), CheckExpertProductShape(*shape), out,
              error, error_bytes);
}

// Hyper-connections between two sublayers: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan_hyper_connection(const HyperConnectionShape* shape, float eps, float hc_eps, const Tiles* tiles,
                                    const HyperConnectionAddresses* addresses, ShownLaunch* out, char* error,
                                    size_t error_bytes) {
  return Show(kHyperConnection.name, PlanHyperConnection(*shape, eps, hc_eps, *tiles, *addresses),
              CheckHyperConnectionShape(*shape), out, error, error_bytes);
}

// What sums an array over devices, where this one keeps `memory`: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan_all_reduce(const AllReduceShape* shape, void* memory, const AllReduceAddresses* addresses,
                              ShownLaunch* out, char* error, size_t error_bytes) {
  return Show(kAllReduce.name, PlanAllReduce(*shape, memory, *addresses), CheckAllReduceShape(*shape), out, error,
              error_bytes);
}

// Returns the number of devices here if each of them reaches the memory of all others, else 1; 0 without a driver.
int dsv4_fmha_exchanging_devices() {
  if (!LoadDriver().empty()) return 0;
  const Driver& driver = GetDriver();
  int count = 0;
  if (driver.DeviceGetCount(&count) != 0) return 0;
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < count; ++j) {
      CUdevice from, to;
      int reaches = 0;
      if (i == j) continue;
      if (driver.DeviceGet(&from, i) != 0 || driver.DeviceGet(&to, j) != 0) return 1;
      if (driver.DeviceCanAccessPeer(&reaches, from, to) != 0 || reaches == 0) return 1;
    }
  }
  return count;
}

// A kernel of their gradient, by so many walks; without any the first one, which keeps tile_n iterations at most.
int dsv4_fmha_plan_hyper_connection_bwd(const HyperConnectionShape* shape, int64_t walks, float eps, float hc_eps,
                                        const Tiles* tiles, const HyperConnectionBwdAddresses* addresses,
                                        ShownLaunch* out, char* error, size_t error_bytes) {
  const bool streams = walks > 0;
  const std::string reason =
      streams ? CheckHyperConnectionShape(*shape) : CheckHyperConnectionBwdShape(*shape, tiles->tile_n);
  const auto plan = PlanHyperConnectionBwd(*shape, walks, eps, hc_eps, tiles->tile_m, *addresses);
  return Show(streams ? kHyperConnectionBwdStreams.name : kHyperConnectionBwdNumbers.name, plan, reason, out, error,
              error_bytes);
}

// What inserts entries into a cache, by CTAs of tile_m sequences or tokens.
int dsv4_fmha_plan_kv_insert(const KvInsertShape* shape, float eps, int32_t tile_m, const KvInsertAddresses* addresses,
                             ShownLaunch* out, char* error, size_t error_bytes) {
  Plan<KvInsertArguments> plan;
  const std::string reason = PlanKvInsert(*shape, eps, tile_m, *addresses, &plan);
  return Show(kKvInsert.name, plan, reason, out, error, error_bytes);
}

// What finds the slots that a step's queries see, by CTAs of tile_n numbers.
int dsv4_fmha_plan_seen_slots(const SeenSlotsShape* shape, int32_t tile_n, const SeenSlotsAddresses* addresses,
                              ShownLaunch* out, char* error, size_t error_bytes) {
  Plan<SeenSlotsArguments> plan;
  const std::string reason = PlanSeenSlots(*shape, tile_n, *addresses, &plan);
  return Show(kSeenSlots.name, plan, reason, out, error, error_bytes);
}

// What makes codes of keys, by CTAs of tile_m keys.
int dsv4_fmha_plan_key_codes(const KeyCodesShape* shape, int32_t tile_m, const KeyCodesAddresses* addresses,
                             ShownLaunch* out, char* error, size_t error_bytes) {
  Plan<KeyCodesArguments> plan;
  const std::string reason = PlanKeyCodes(*shape, tile_m, *addresses, &plan);
  return Show(kKeyCodes.name, plan, reason, out, error, error_bytes);
}

}  // extern "C"
#pragma GCC visibility pop
