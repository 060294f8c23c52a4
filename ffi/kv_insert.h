// The calls that make new entries of a cache from a step's rows, in place: each row is an entry, or rows are pooled,
// with a state of earlier rows, or with sums of them besides.
#pragma once

#include "kv_insert_plan.h"
#include "target.h"

namespace dsv4_fmha {

struct KvInsert {
  using Call = KvInsertCall;
  using Shape = KvInsertShape;
  using Kernels = std::array<Launcher*, 1>;

  static constexpr int64_t kDims = 64;  // numbers that RoPE turns

  // The numbers of an entry that is not pooled: those under the norm, and RoPE's where they follow.
  static int64_t Entry(const Call& call) { return call.norm.dimensions[0] + (call.rope != 0 ? kDims : 0); }

  static bool IsRunning(const Call& call) { return call.sums.dimensions.size() > 0; }

  static ffi::Error Check(const Call& call, const Axes& n, Shape* shape) {
    const int64_t ring = std::max<int64_t>(n.ring, 0), n_ape = std::max<int64_t>(n.n_ape, 0);
    *shape = {.b = n.b,
              .s = n.s_q,
              .n = n.n,
              .width = ring > 0 ? n.width : Entry(call),
              .columns = n.columns,
              .column = call.column,
              .n_ape = n_ape,
              .n_bounds = n.n_bounds,
              .ratio = call.ratio,
              .ring = ring,
              .pages = n.pages,
              .page = n.page,
              .page_bytes = 0,
              .table_width = n.table_width};
    const int64_t d = call.norm.dimensions[0];
    Expectations expect;
    expect.Shape(call.table, {n.b, n.n, kDims});
    if (n_ape > 0) expect.Shape(call.ape, {call.ratio, shape->width / 2});
    if (expect.error().failure()) return expect.error();
    const bool running = IsRunning(call);
    if (running) {
      expect.Shape(call.sums, {n.b, 3, d});
      expect.Shape(call.folded, {n.b, 1});
      expect.Shape(call.state, {n.b, std::max(ring, n.s_q), 2 * d});
      if (expect.error().failure()) return expect.error();
      if (n.n != 1 || ring > call.ratio)
        return Refuse(call.state, Show(ring) + " rows", "at most ratio, and one entry");
    }
    const bool fits = ring > 0 ? n.width == 2 * d || n.width == 4 * d : n.n == n.s_q;
    if (!fits) return Refuse(call.state, "shape " + Show(call.state.dimensions), "one or two pairs of d last, or d");
    if (ring > 0 && call.rope != 0) return ffi::Error::InvalidArgument("rope: got 1, wanted 0 where rows are pooled");
    if (n.n_bounds > 2) return Refuse(call.bounds, "shape " + Show(call.bounds.dimensions), "1 or 2 numbers last");
    if (call.ratio < 1) return ffi::Error::InvalidArgument("ratio: got " + Show(call.ratio));
    if (call.column < 0 || call.column % 4 != 0 || n.columns % 4 != 0 || call.column + shape->width > n.columns) {
      return Refuse(call.rows, "shape " + Show(call.rows.dimensions) + " and column " + Show(call.column),
                    Show(shape->width) + " columns from a multiple of 4 on");
    }
    const int64_t reach = ring > 0 ? n.width / (2 * d) * call.ratio : 0;
    if (ring > 0 && !running && ring < reach + n.s_q - 1) {
      return Refuse(call.state, Show(ring) + " rows", Show(reach + n.s_q - 1) + " at least");
    }
    if (ffi::Error error = CheckPacking(call, shape); error.failure()) return error;
    if (n.table_width == 0 && n.pages != n.b) return Refuse(call.cache, Show(n.pages) + " pages", "a page for each b");
    if (shape->page * std::max<int64_t>(n.table_width, 1) < n.n) {
      return Refuse(call.cache, "room for " + Show(shape->page) + " entries", "room for all new ones");
    }
    return ffi::Error::Success();
  }

  // Entries are packed as the call says, or numbers of the cache's dtype.
  static ffi::Error CheckPacking(const Call& call, Shape* shape) {
    if (call.packing.empty() && call.cache.dimensions.size() == 3) {
      if (call.cache.dimensions[2] == Entry(call)) return ffi::Error::Success();
      return Refuse(call.cache, "shape " + Show(call.cache.dimensions), Show(Entry(call)) + " numbers last");
    }
    for (const Packing& known : kPackings) {
      if (known.name != call.packing || call.cache.dimensions.size() != 2) continue;
      shape->page_bytes = call.cache.dimensions[1];
      shape->page = PackedEntries(known, shape->page_bytes);
      if (shape->page == 0) return Refuse(call.cache, "shape " + Show(call.cache.dimensions), Show(known));
      return ffi::Error::Success();
    }
    return ffi::Error::InvalidArgument("packing: got " + std::string(call.packing));
  }

  static ffi::Error Find(const Call& call, const Device& device, Shape* shape, Kernels* kernels) {
    const KvInsertChoices choices{.d = call.norm.dimensions[0],
                                  .dtype = call.packing.empty() ? call.cache.dtype : ffi::BF16,
                                  .packing = call.packing,
                                  .pooled = shape->ring > 0,
                                  .hadamard = call.hadamard != 0,
                                  .running = IsRunning(call),
                                  .rope = call.rope != 0};
    return LookUp("kv_insert", device, choices, &kernels->front());
  }

  static ffi::Error Run(const Call& call, const Shape& shape, const Kernels& kernels, const Stream& stream) {
    Call there = call;
    Operand* in_place[][2] = {{&there.cache, &there.new_cache},
                              {&there.state, &there.new_state},
                              {&there.sums, &there.new_sums},
                              {&there.folded, &there.new_folded}};
    for (const auto& [operand, result] : in_place) {
      if (ffi::Error error = CopyUnlessThere(*operand, *result, stream); error.failure()) return error;
      operand->data = result->data;
    }
    const auto at = AddressesOf<KvInsertAddresses>(there);
    Plan<KvInsertArguments> plan;
    if (std::string error = PlanKvInsert(shape, call.eps, kernels.front()->tile_m, at, &plan); !error.empty()) {
      return ffi::Error::InvalidArgument("kv_insert: " + error);
    }
    return Launch(kernels.front(), stream, plan);
  }
};

}  // namespace dsv4_fmha
