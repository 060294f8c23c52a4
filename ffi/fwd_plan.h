// The forward launch as a function of the shapes: no driver, no device, so that it can be tested without either.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "tensor_map.h"

namespace dsv4_fmha {

// q and o [b, s_q, h_q, d]; k and v [b, s_kv, h_kv, d].
struct FwdShape {
  int64_t b, s_q, s_kv, h_q, h_kv, d;
};

// How the rows of q and o are cut into tiles.  A row is a (query, head of one KV head's group) pair; the rows of one KV
// head form an `outer` x `inner` grid, of which a tile takes a box.  Row (o, i) is query o + i / group and head i % group
// of the group.  The kernel is handed these in this order.
struct Extents {
  int32_t s_q, group, h_kv, inner, outer, box_inner, box_outer, tiles_inner, tiles_outer;
};

struct FwdPlan {
  uint32_t grid;
  TensorMapSpec rows;        // of q and of o: [d, inner, outer, h_kv, b]
  TensorMapSpec keys;        // of k and of v: [d, s_kv, h_kv, b]
  int32_t rows_extents[4];  // the dynamic extents, which follow a descriptor in the parameter list
  int32_t keys_extents[3];
  int32_t s_kv;
  float scale_log2;  // scale * log2(e)
  Extents extents;
};

// Fills `plan`.  Returns why it cannot: empty on success.
inline std::string PlanFwd(const FwdShape& shape, float scale, int32_t tile_m, int32_t tile_n, FwdPlan* plan) {
  static constexpr int64_t kMaxExtent = INT32_MAX, kElementBytes = 2, kMaxStrideBytes = int64_t{1} << 40;
  static constexpr uint32_t kSwizzleColumns = 64;  // 128 bytes
  auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  auto too_large = [](const char* what, int64_t got, int64_t limit) {
    return std::string(what) + " is " + std::to_string(got) + ", the limit is " + std::to_string(limit);
  };
  const auto [b, s_q, s_kv, h_q, h_kv, d] = shape;
  for (auto [name, extent] : {std::pair{"b", b}, {"s_q", s_q}, {"s_kv", s_kv}, {"h_q", h_q}, {"h_kv", h_kv}, {"d", d}}) {
    if (extent < 1) return std::string(name) + " is " + std::to_string(extent) + ", wanted at least 1";
    if (extent > kMaxExtent) return too_large(name, extent, kMaxExtent);
  }
  if (h_q % h_kv != 0) {
    return "h_q is " + std::to_string(h_q) + ", wanted a multiple of h_kv = " + std::to_string(h_kv);
  }
  if (!std::isfinite(scale) || scale <= 0) return "scale is " + std::to_string(scale) + ", wanted a finite number > 0";

  // One KV head: its rows are contiguous, so tiles may span queries freely.  Several: a tile is a block of queries by
  // (a part of) the group's heads.
  const int64_t group = h_q / h_kv;
  const int64_t inner = h_kv == 1 ? s_q * group : group;
  const int64_t outer = h_kv == 1 ? 1 : s_q;
  if (inner > kMaxExtent) return too_large("s_q * h_q", inner, kMaxExtent);
  const int64_t box_inner =
      h_kv == 1 ? std::min<int64_t>(tile_m, inner) : ceil_div(group, ceil_div(group, tile_m));
  const int64_t box_outer = h_kv == 1 ? 1 : std::min(tile_m / box_inner, s_q);
  const int64_t tiles_inner = ceil_div(inner, box_inner), tiles_outer = ceil_div(outer, box_outer);
  const int64_t tiles = tiles_inner * tiles_outer;  // below 2^62
  if (tiles > kMaxExtent / h_kv / b) {
    return "the grid of " + std::to_string(tiles) + " tiles x " + std::to_string(h_kv) + " KV heads x " +
           std::to_string(b) + " sequences is too large, the limit is " + std::to_string(kMaxExtent);
  }
  const int64_t head_bytes = d * kElementBytes;
  if (h_q > kMaxStrideBytes / head_bytes / s_q) return too_large("s_q * h_q * d", s_q * h_q, kMaxStrideBytes / head_bytes);
  if (h_kv > kMaxStrideBytes / head_bytes / s_kv) {
    return too_large("s_kv * h_kv * d", s_kv * h_kv, kMaxStrideBytes / head_bytes);
  }

  auto u32 = [](int64_t x) { return static_cast<uint32_t>(x); };
  auto u64 = [](int64_t x) { return static_cast<uint64_t>(x); };
  auto i32 = [](int64_t x) { return static_cast<int32_t>(x); };
  *plan = FwdPlan{
      u32(tiles * h_kv * b),
      {5,
       {kSwizzleColumns, u32(box_inner), u32(box_outer), 1, 1},
       {u64(d), u64(inner), u64(outer), u64(h_kv), u64(b)},
       {u64(head_bytes), u64(h_q * head_bytes), u64(group * head_bytes), u64(s_q * h_q * head_bytes)}},
      {4,
       {kSwizzleColumns, u32(tile_n), 1, 1},
       {u64(d), u64(s_kv), u64(h_kv), u64(b)},
       {u64(h_kv * head_bytes), u64(head_bytes), u64(s_kv * h_kv * head_bytes)}},
      {i32(inner), i32(outer), i32(h_kv), i32(b)},
      {i32(s_kv), i32(h_kv), i32(b)},
      i32(s_kv),
      static_cast<float>(scale * 1.4426950408889634),
      {i32(s_q), i32(group), i32(h_kv), i32(inner), i32(outer), i32(box_inner), i32(box_outer), i32(tiles_inner),
       i32(tiles_outer)},
  };
  return "";
}

// Everything that the kernel is handed, and the order in which it is.
struct FwdArguments {
  CUtensorMap q, k, v, o;
  const void *start, *stop, *sink;
  void* lse;
};

struct Param {
  void* data;
  uint32_t bytes;
};

struct FwdParams {
  static constexpr int kMax = 23;
  Param params[kMax];
  int count = 0;

  FwdParams(FwdPlan& plan, FwdArguments& arguments, bool shared_kv) {
    auto add = [&](auto& value) { params[count++] = {&value, sizeof value}; };
    add(arguments.q), add(plan.rows_extents);
    add(arguments.o), add(plan.rows_extents);
    add(arguments.k), add(plan.keys_extents);
    if (!shared_kv) add(arguments.v), add(plan.keys_extents);
    add(arguments.start), add(arguments.stop), add(plan.s_kv);
    add(arguments.sink), add(arguments.lse);
    add(plan.scale_log2);
    Extents& n = plan.extents;
    for (int32_t* x : {&n.s_q, &n.group, &n.h_kv, &n.inner, &n.outer, &n.box_inner, &n.box_outer, &n.tiles_inner,
                       &n.tiles_outer}) {
      add(*x);
    }
  }
};

}  // namespace dsv4_fmha
