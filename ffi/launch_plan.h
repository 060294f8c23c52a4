// A forward launch as a function of the shapes: no driver, no device, so that it can be tested without either.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "tensor_map.h"

namespace dsv4_fmha {

// Where keys come from.  A span is one interval of keys per query; a selection is a list of keys per query, gathered by
// index; packed, a selection of keys that are kept in FP8.  A span is loaded by TMA where there is nothing but spans, and
// gathered too where anything is.
enum SourceKind : int64_t { kSpan, kSelection, kPacked };

constexpr int kMaxSources = 2;

struct SourceShape {
  int64_t kind, s_kv;
  // Of a selection only.  The stride is that of keys from one batch entry's to the next's: s_kv, or 0 of a pool; of
  // packed keys, that from page to page.
  int64_t stride, topk;
};

// q and o [b, s_q, h_q, d]; the keys of each source [b, s_kv, h_kv, d].  The keys of a tile of rows are worked on in
// `splits` parts.
struct Shape {
  int64_t b, s_q, h_q, h_kv, d, splits, shared_kv, source_count;
  SourceShape sources[kMaxSources];
};

// What the variant and the device add to it.
struct Tiles {
  int32_t tile_m, tile_n;
  int32_t processors;  // or CTAs that run at a time: as many tiles of rows are worked on
  int32_t cluster;     // CTAs that take tiles with heads of the same queries
};

// How the rows of q and o are cut into tiles.  A row is a (query, head of one KV head's group) pair; the rows of one KV
// head form an `outer` x `inner` grid, of which a tile takes a box.  Row (o, i) is query o + i / group and head
// i % group of the group.  The kernel is handed these in this order.
struct Extents {
  int32_t s_q, group, h_kv, inner, outer, box_inner, box_outer, tiles_inner, tiles_outer, pairs, splits;
};

struct SourcePlan {
  SourceKind kind;
  TensorMapSpec map;       // of k and of v that are not gathered: [d, s_kv, h_kv, b]
  int32_t map_extents[3];  // the dynamic extents, which follow a descriptor in the parameter list
  int32_t s_kv, stride, topk;
};

struct Plan {
  uint32_t grid;
  TensorMapSpec map;  // of q and o: [d, inner, outer, h_kv, b]
  int32_t map_extents[4];
  bool shared_kv, gathers;
  int source_count;
  SourcePlan sources[kMaxSources];
  float scale_log2;  // scale * log2(e)
  Extents extents;
};

// Fills `plan`.  Returns why it cannot: empty on success.
inline std::string PlanLaunch(const Shape& shape, float scale, const Tiles& tiles, Plan* plan) {
  // A kernel may count a tile, or a grid, past any extent.
  static constexpr int64_t kMaxExtent = INT32_MAX - 1023;
  static constexpr int64_t kElementBytes = 2, kMaxStrideBytes = int64_t{1} << 40;
  static constexpr uint32_t kSwizzleColumns = 64;  // 128 bytes
  static constexpr int64_t kWarpgroupRows = 64;    // of a WGMMA
  auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  auto too_large = [](const std::string& what, int64_t got, int64_t limit) {
    return what + " is " + std::to_string(got) + ", the limit is " + std::to_string(limit);
  };
  auto out_of_range = [&](const char* what, int64_t got) -> std::string {
    if (got < 1) return std::string(what) + " is " + std::to_string(got) + ", wanted at least 1";
    if (got > kMaxExtent) return too_large(what, got, kMaxExtent);
    return "";
  };
  const auto& [b, s_q, h_q, h_kv, d, splits, shared_kv, source_count, sources] = shape;
  for (auto [name, extent] :
       {std::pair{"b", b}, {"s_q", s_q}, {"h_q", h_q}, {"h_kv", h_kv}, {"d", d}, {"splits", splits}}) {
    if (std::string error = out_of_range(name, extent); !error.empty()) return error;
  }
  if (h_q % h_kv != 0) {
    return "h_q is " + std::to_string(h_q) + ", wanted a multiple of h_kv = " + std::to_string(h_kv);
  }
  if (!std::isfinite(scale) || scale <= 0) return "scale is " + std::to_string(scale) + ", wanted a finite number > 0";

  // One KV head: its rows are contiguous, so tiles may span queries freely.  Several: a tile is a block of queries by
  // (a part of) the group's heads.  Keys gathered for each query: a tile has heads of one query.
  const bool gathers = std::any_of(sources, sources + source_count, [](auto& x) { return x.kind != kSpan; });
  const bool contiguous = h_kv == 1 && !gathers;
  const int64_t group = h_q / h_kv;
  const int64_t inner = contiguous ? s_q * group : group;
  const int64_t outer = contiguous ? 1 : s_q;
  if (std::string error = out_of_range("s_q * h_q", inner); !error.empty()) return error;
  const int64_t clusters = std::max(tiles.processors / tiles.cluster, 1);
  int64_t box_inner = 0, box_outer = 0, tiles_inner = 0, tiles_outer = 0, head_tiles = 0;
  for (int64_t rows = kWarpgroupRows;; rows += kWarpgroupRows) {  // as few as give no processor a second tile
    const int64_t at_most = std::min<int64_t>(rows, tiles.tile_m);
    box_inner = contiguous ? std::min(at_most, inner)
                            : ceil_div(group, ceil_div(group, at_most * tiles.cluster) * tiles.cluster);
    box_outer = contiguous || gathers ? 1 : std::min(at_most / box_inner, s_q);
    tiles_inner = ceil_div(inner, box_inner * tiles.cluster);
    tiles_outer = ceil_div(outer, box_outer);
    head_tiles = tiles_inner * tiles_outer;  // below 2^62
    if (at_most == tiles.tile_m || head_tiles <= clusters / h_kv / b / splits) break;
  }
  if (head_tiles > kMaxExtent / h_kv / b / splits) {
    return "there are too many tiles of rows: " + std::to_string(head_tiles) + " x " + std::to_string(h_kv) +
           " KV heads x " + std::to_string(b) + " sequences x " + std::to_string(splits) + " splits, the limit is " +
           std::to_string(kMaxExtent);
  }
  const int64_t row_tiles = head_tiles * h_kv * b;
  const int64_t head_bytes = d * kElementBytes, max_heads = kMaxStrideBytes / head_bytes;
  if (h_q > max_heads / s_q) return too_large("s_q * h_q", s_q * h_q, max_heads);

  auto u32 = [](int64_t x) { return static_cast<uint32_t>(x); };
  auto u64 = [](int64_t x) { return static_cast<uint64_t>(x); };
  auto i32 = [](int64_t x) { return static_cast<int32_t>(x); };
  *plan = Plan{
      u32(std::min<int64_t>(row_tiles * splits, clusters) * tiles.cluster),
      {5,
       {kSwizzleColumns, u32(box_inner), u32(box_outer), 1, 1},
       {u64(d), u64(inner), u64(outer), u64(h_kv), u64(b)},
       {u64(head_bytes), u64(h_q * head_bytes), u64(group * head_bytes), u64(s_q * h_q * head_bytes)}},
      {i32(inner), i32(outer), i32(h_kv), i32(b)},
      shared_kv != 0,
      gathers,
      static_cast<int>(source_count),
      {},
      static_cast<float>(scale * 1.4426950408889634),
      {i32(s_q), i32(group), i32(h_kv), i32(inner), i32(outer), i32(box_inner), i32(box_outer), i32(tiles_inner),
       i32(tiles_outer), i32(h_kv * b), i32(splits)},
  };
  for (int i = 0; i < source_count; ++i) {
    const auto [kind, s_kv, stride, topk] = sources[i];
    const char* const s_kv_name = i == 0 ? "s_kv" : "s_kv of the second keys";
    if (std::string error = out_of_range(s_kv_name, s_kv); !error.empty()) return error;
    if (kind != kSpan) {
      if (std::string error = out_of_range("topk", topk); !error.empty()) return error;
    } else if (!gathers && h_kv > max_heads / s_kv) {
      return too_large(std::string(s_kv_name) + " * h_kv", s_kv * h_kv, max_heads);
    }
    plan->sources[i] = SourcePlan{
        static_cast<SourceKind>(kind),
        {4,
         {kSwizzleColumns, u32(tiles.tile_n), 1, 1},
         {u64(d), u64(s_kv), u64(h_kv), u64(b)},
         {u64(h_kv * head_bytes), u64(head_bytes), u64(s_kv * h_kv * head_bytes)}},
        {i32(s_kv), i32(h_kv), i32(b)},
        i32(s_kv),
        i32(stride),
        i32(topk),
    };
  }
  return "";
}

// Where the arrays of a launch are.
struct SourceAddresses {
  void *k, *v;      // v is k where they are one array
  void *from, *to;  // start and stop of a span, indices and length of a selection
};

struct Addresses {
  void *q, *o, *sink, *lse;
  void *o_parts, *lse_parts;  // f32 [b, s_q, h_q, splits, d] and without d; unused where keys are not split
  SourceAddresses sources[kMaxSources];
};

// One parameter of the kernel.
struct Param {
  void* data;
  uint32_t bytes;
  const TensorMapSpec* map;  // what `data` is to be encoded from, with the address `tensor`; else nullptr
  void* tensor;
};

// What a kernel is handed, and the order in which it is.
class Params {
 public:
  static constexpr int kMax = 4 + kMaxSources * 7 + 4 + 11;

  Params() = default;
  Params(const Params&) = delete;

  const Param* begin() const { return params_; }
  const Param* end() const { return params_ + count_; }

 protected:
  template <typename T>
  void Add(T& value) {
    params_[count_++] = {&value, sizeof value, nullptr, nullptr};
  }

  template <typename T>
  void AddMap(const TensorMapSpec& map, T& extents, void* tensor) {
    params_[count_++] = {&maps_[map_count_++], sizeof(CUtensorMap), &map, tensor};
    Add(extents);
  }

 private:
  CUtensorMap maps_[2 + 2 * kMaxSources];
  int map_count_ = 0;
  Param params_[kMax];
  int count_ = 0;
};

// A forward kernel's.  Points into `plan` and `at`.
struct ForwardParams : Params {
  ForwardParams(Plan& plan, Addresses& at) {
    Extents& n = plan.extents;
    AddMap(plan.map, plan.map_extents, at.q);
    if (plan.shared_kv) {
      AddMap(plan.map, plan.map_extents, at.o);
    } else {
      Add(at.o);
    }
    for (int i = 0; i < plan.source_count; ++i) {
      SourcePlan& source = plan.sources[i];
      SourceAddresses& keys = at.sources[i];
      if (!plan.gathers) {
        AddMap(source.map, source.map_extents, keys.k);
        if (!plan.shared_kv) AddMap(source.map, source.map_extents, keys.v);
      }
      // where keys are loaded without TMA, all or some
      if (plan.gathers || (plan.shared_kv && plan.source_count == 1)) Add(keys.k);
      Add(keys.from), Add(keys.to), Add(source.s_kv);
      if (source.kind != kSpan) Add(source.stride), Add(source.topk);
    }
    Add(at.sink), Add(n.splits > 1 ? at.lse_parts : at.lse), Add(at.o_parts), Add(plan.scale_log2);
    for (int32_t* x : {&n.s_q, &n.group, &n.h_kv, &n.inner, &n.outer, &n.box_inner, &n.box_outer, &n.tiles_inner,
                       &n.tiles_outer, &n.pairs, &n.splits}) {
      Add(*x);
    }
  }
};

// The launch that merges what the splits of a forward launch left behind.
struct CombinePlan {
  uint32_t grid;
  int32_t rows, h_q, d, splits;
};

// A thread merges `columns` of a row.
inline CombinePlan PlanCombine(const Shape& shape, int32_t threads, int32_t columns) {
  const int64_t rows = shape.b * shape.s_q * shape.h_q, pieces = rows * (shape.d / columns);
  auto i32 = [](int64_t x) { return static_cast<int32_t>(x); };
  return {static_cast<uint32_t>((pieces + threads - 1) / threads), i32(rows), i32(shape.h_q), i32(shape.d),
          i32(shape.splits)};
}

// The combine kernel's.  Points into `plan` and `at`.
struct CombineParams : Params {
  CombineParams(CombinePlan& plan, Addresses& at) {
    Add(at.o_parts), Add(at.lse_parts), Add(at.o), Add(at.sink), Add(at.lse);
    Add(plan.rows), Add(plan.h_q), Add(plan.d), Add(plan.splits);
  }
};

}  // namespace dsv4_fmha
