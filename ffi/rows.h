// How the rows of q are cut into tiles, and where the keys of a source are, as functions of shapes: no driver, no
// device, so tests need neither.  The arguments that kernels of all attention families share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "layout.h"

namespace dsv4_fmha {

// q [b, s_q, h_q, d] of a TensorMapDataType, and o [b, s_q, h_q, d_v].  The keys of a tile of rows are split into
// `splits` parts.
struct RowShape {
  int64_t b, s_q, h_q, h_kv, d, d_v, splits, type;
};

// What the variant and the device add to these.
struct Tiles {
  int32_t tile_m, tile_n;
  int32_t processors;  // or CTAs that run at a time: the number of tiles of rows in work
  int32_t cluster;     // CTAs that take tiles with heads of the same queries
  int32_t gathers;     // a tile of rows has heads of one query
};

// A row is a (query, head of one KV head's group) pair; the rows of one KV head form an `outer` x `inner` grid, of
// which a tile takes a box.  Row (o, i) is query o + i / group and head i % group of the group.
struct Tiling {
  int64_t inner, outer, box_inner, box_outer, tiles_inner, tiles_outer;
  uint32_t grid;
};

// Where keys come from.  A span is one interval of keys per query, pages are the same of keys in pages of a pool, like q
// or as codes of e4m3.  A selection is a list of keys per query, gathered by index.  A packed source is a selection of
// keys of 8 bits or fewer.  TMA loads a span if all sources are spans; otherwise the kernel gathers it too.
enum SourceKind : int64_t { kSpan, kSelection, kPacked, kPages, kPagesE4M3, kPagesWindow, kPagesE4M3Window };

inline bool IsInPages(int64_t kind) { return kind >= kPages; }
inline bool IsWindow(int64_t kind) { return kind >= kPagesWindow; }
inline bool IsCodes(int64_t kind) { return kind == kPagesE4M3 || kind == kPagesE4M3Window; }

constexpr int kMaxSources = 2;

struct SourceShape {
  int64_t kind, s_kv;
  // Distance in keys between batch entries: s_kv, or 0 for a pool; for packed keys and those in pages, between pages.
  int64_t s_batch;
  int64_t topk;    // entries of a selection
  int64_t pages;   // of a pool, where keys are in pages
  int64_t window;  // of a step over such keys, whose kernel finds what a query sees
};

// What attention is over: the keys of each source are [b, s_kv, h_kv, d], like q. Their first d_v numbers are values.
struct AttentionShape {
  RowShape rows;
  int64_t source_count;
  SourceShape sources[kMaxSources];
};

constexpr int64_t kMaxExtent = INT32_MAX - 1023;  // a kernel may count a tile, or a grid, past any extent
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;

inline int64_t ElementBytes(int64_t type) { return type == kUInt8 ? 1 : type == kFloat32 ? 4 : 2; }

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline uint32_t U32(int64_t x) { return static_cast<uint32_t>(x); }

inline uint64_t U64(int64_t x) { return static_cast<uint64_t>(x); }

inline int32_t I32(int64_t x) { return static_cast<int32_t>(x); }

inline std::string TooLarge(const std::string& what, int64_t got, int64_t limit) {
  return what + " is " + std::to_string(got) + ", the limit is " + std::to_string(limit);
}

// Of a slab of a tile of a matrix in FP8: 64 by 64 codes, and their scales.
constexpr int64_t kBytesOfSlabOfE4m3 = 4112;

// Empty if it can be an extent, else why not.
inline std::string OutOfRange(const std::string& what, int64_t got) {
  if (got < 1) return what + " is " + std::to_string(got) + ", wanted at least 1";
  return got > kMaxExtent ? TooLarge(what, got, kMaxExtent) : "";
}

// Empty if it can be a scale of logits, else why not.
inline std::string BadScale(float scale) {
  if (std::isfinite(scale) && scale > 0) return "";
  return "scale is " + std::to_string(scale) + ", wanted a finite number > 0";
}

// Returns why it cannot cut the rows: empty on success.
inline std::string CutRows(const RowShape& shape, const Tiles& tiles, Tiling* tiling) {
  static constexpr int64_t kWarpgroupRows = 64;  // rows of a WGMMA
  const auto& [b, s_q, h_q, h_kv, d, d_v, splits, type] = shape;
  for (auto [name, extent] :
       {std::pair{"b", b}, {"s_q", s_q}, {"h_q", h_q}, {"h_kv", h_kv}, {"d", d}, {"splits", splits}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  if (h_q % h_kv != 0) {
    return "h_q is " + std::to_string(h_q) + ", wanted a multiple of h_kv = " + std::to_string(h_kv);
  }
  // One KV head: its rows are contiguous, so tiles may span queries freely.  Several KV heads: a tile is a block of
  // queries by (a part of) the group's heads.  Keys gathered for each query: a tile has heads of one query.
  const bool contiguous = h_kv == 1 && !tiles.gathers;
  const int64_t group = h_q / h_kv;
  const int64_t inner = contiguous ? s_q * group : group;
  const int64_t outer = contiguous ? 1 : s_q;
  if (std::string error = OutOfRange("s_q * h_q", inner); !error.empty()) return error;
  const int64_t clusters = std::max(tiles.processors / tiles.cluster, 1);
  int64_t box_inner = 0, box_outer = 0, tiles_inner = 0, tiles_outer = 0, head_tiles = 0;
  for (int64_t rows = kWarpgroupRows;; rows += kWarpgroupRows) {  // the fewest that give no processor a second tile
    const int64_t at_most = std::min<int64_t>(rows, tiles.tile_m);
    box_inner =
        contiguous ? std::min(at_most, inner) : CeilDiv(group, CeilDiv(group, at_most * tiles.cluster) * tiles.cluster);
    box_outer = contiguous || tiles.gathers ? 1 : std::min(at_most / box_inner, s_q);
    tiles_inner = CeilDiv(inner, box_inner * tiles.cluster);
    tiles_outer = CeilDiv(outer, box_outer);
    head_tiles = tiles_inner * tiles_outer;  // below 2^62
    if (at_most == tiles.tile_m || head_tiles <= clusters / h_kv / b / splits) break;
  }
  if (head_tiles > kMaxExtent / h_kv / b / splits) {
    return "there are too many tiles of rows: " + std::to_string(head_tiles) + " x " + std::to_string(h_kv) +
           " KV heads x " + std::to_string(b) + " sequences x " + std::to_string(splits) + " splits, the limit is " +
           std::to_string(kMaxExtent);
  }
  const int64_t max_heads = kMaxStrideBytes / (d * ElementBytes(type));
  if (h_q > max_heads / s_q) return TooLarge("s_q * h_q", s_q * h_q, max_heads);
  const int64_t work = head_tiles * h_kv * b * splits;
  *tiling = {.inner = inner,
             .outer = outer,
             .box_inner = box_inner,
             .box_outer = box_outer,
             .tiles_inner = tiles_inner,
             .tiles_outer = tiles_outer,
             .grid = U32(std::min(work, clusters) * tiles.cluster)};
  return "";
}

// abi.TILING.
template <typename FamilyArguments>
void SetTiling(const RowShape& shape, const Tiling& n, FamilyArguments* x) {
  x->s_q = I32(shape.s_q);
  x->group = I32(shape.h_q / shape.h_kv);
  x->h_kv = I32(shape.h_kv);
  x->inner = I32(n.inner);
  x->outer = I32(n.outer);
  x->box_inner = I32(n.box_inner);
  x->box_outer = I32(n.box_outer);
  x->tiles_inner = I32(n.tiles_inner);
  x->tiles_outer = I32(n.tiles_outer);
  x->pairs = I32(shape.h_kv * shape.b);
  x->splits = I32(shape.splits);
}

// abi.rows: an array like q, [columns, inner, outer, h_kv, b].
inline TensorArgument Rows(const RowShape& shape, const Tiling& n, int64_t columns, void* address) {
  const auto& [b, s_q, h_q, h_kv, d, d_v, splits, type] = shape;
  const int64_t element = ElementBytes(type), head = columns * element;
  return {.map = {.rank = 5,
                  .type = U32(type),
                  .swizzle = kSwizzle128B,
                  .box = {U32(128 / element), U32(n.box_inner), U32(n.box_outer), 1, 1},
                  .extents = {U64(columns), U64(n.inner), U64(n.outer), U64(h_kv), U64(b)},
                  .strides = {U64(head), U64(h_q * head), U64(h_q / h_kv * head), U64(s_q * h_q * head)}},
          .extents = {I32(n.inner), I32(n.outer), I32(h_kv), I32(b)},
          .address = address};
}

// abi.keys: an array like k, [d, s_kv, h_kv, b], of which a tile has tile_n keys.
inline TensorArgument Keys(const RowShape& shape, int64_t s_kv, int64_t tile_n, void* address) {
  const auto& [b, s_q, h_q, h_kv, d, d_v, splits, type] = shape;
  const int64_t element = ElementBytes(type), head = d * element;
  return {.map = {.rank = 4,
                  .type = U32(type),
                  .swizzle = kSwizzle128B,
                  .box = {U32(128 / element), U32(tile_n), 1, 1},
                  .extents = {U64(d), U64(s_kv), U64(h_kv), U64(b)},
                  .strides = {U64(h_kv * head), U64(head), U64(s_kv * h_kv * head)}},
          .extents = {I32(s_kv), I32(h_kv), I32(b)},
          .address = address};
}

// abi.params_of_pages: an array [pages, page, h_kv, d] as [d, page, h_kv, pages], of which a box has some keys of a page.
// Codes come as they lie, and threads put their numbers where products want them.
inline TensorArgument Pages(RowShape shape, const SourceShape& source, int64_t box, void* address) {
  shape.b = source.pages;
  if (!IsCodes(source.kind)) return Keys(shape, source.s_batch, box, address);
  shape.type = kUInt8;
  TensorArgument codes = Keys(shape, source.s_batch, box, address);
  codes.map.swizzle = kNoSwizzle, codes.map.box[0] = U32(shape.d);
  return codes;
}

// The keys of such a box: as many as divide a page and a tile, up to one of swizzled rows.
inline int64_t BoxOfPage(int64_t page, int64_t tile_n) {
  return std::min({page & -page, tile_n & -tile_n, int64_t{64}});
}

// The same array as tiles of tile_n keys, which overlap: [d, tile_n, s_kv + 1, h_kv, b]. Row i of tile t is key
// t + i - tile_n, so keys `key` to `key + n` are a box of tile key + n from row tile_n - n on, and then there are zeros.
inline TensorArgument CutKeys(const RowShape& shape, int64_t s_kv, int64_t tile_n, void* address) {
  const auto& [b, s_q, h_q, h_kv, d, d_v, splits, type] = shape;
  const int64_t element = ElementBytes(type), head = d * element, key = h_kv * head;
  return {.map = {.rank = 5,
                  .type = U32(type),
                  .swizzle = kSwizzle128B,
                  .box = {U32(128 / element), U32(tile_n), 1, 1, 1},
                  .extents = {U64(d), U64(tile_n), U64(s_kv + 1), U64(h_kv), U64(b)},
                  .strides = {U64(key), U64(key), U64(head), U64(s_kv * key)}},
          .extents = {I32(s_kv + 1), I32(h_kv), I32(b)},
          .address = static_cast<char*>(address) - tile_n * key};
}

// The same keys as rows [d, rows] that TMA gathers, each by its number; those of all batch entries, or of a pool.
inline TensorArgument GatheredKeys(const RowShape& shape, const SourceShape& source, void* address) {
  const int64_t element = ElementBytes(shape.type);
  const int64_t rows = std::max(source.s_kv, shape.b * source.s_batch);
  return {.map = {.rank = 2,
                  .type = U32(shape.type),
                  .swizzle = kSwizzle128B,
                  .box = {U32(128 / element), 1},
                  .extents = {U64(shape.d), U64(rows)},
                  .strides = {U64(shape.d * element)}},
          .extents = {},
          .address = address};
}

// abi.source_blocks, or a source of abi.MlaBackward: one of several sources.  Returns why it cannot: empty on success.
template <typename Addresses, typename Source>
std::string SetSource(const RowShape& shape, const Tiles& tiles, const SourceShape& source, const Addresses& at,
                      bool first, Source* x) {
  const std::string s_kv = first ? "s_kv" : "s_kv of the second keys";
  const int64_t max_heads = kMaxStrideBytes / (shape.d * ElementBytes(shape.type));
  if (std::string error = OutOfRange(s_kv, source.s_kv); !error.empty()) return error;
  if (tiles.gathers && source.s_batch > kMaxExtent / shape.b) {  // rows are counted in 32 bits
    return TooLarge("b * " + s_kv, shape.b * source.s_batch, kMaxExtent);
  }
  static constexpr int64_t kLeastBox = 8;  // this many rows are swizzled alike
  const int64_t box = BoxOfPage(source.s_batch, tiles.tile_n);
  if (IsInPages(source.kind)) {
    if (box < kLeastBox) return "page is " + std::to_string(source.s_batch) + ", wanted a multiple of 8";
    if (std::string error = OutOfRange("pages", source.pages); !error.empty()) return error;
    if (IsWindow(source.kind) && (shape.s_q != 1 || source.window < 1 || source.window > 31 * box + 1)) {
      return "window is " + std::to_string(source.window) + " for s_q " + std::to_string(shape.s_q) + ", wanted 1 to " +
             std::to_string(31 * box + 1) + " for a single query";
    }
    if (shape.h_kv > max_heads / source.s_batch) {
      return TooLarge("page * h_kv", source.s_batch * shape.h_kv, max_heads);
    }
  } else if (source.kind != kSpan) {
    if (std::string error = OutOfRange("topk", source.topk); !error.empty()) return error;
  } else if (!tiles.gathers && shape.h_kv > max_heads / source.s_kv) {
    return TooLarge(s_kv + " * h_kv", source.s_kv * shape.h_kv, max_heads);
  }
  if constexpr (requires { x->k.map; }) {
    const bool in_pages = IsInPages(source.kind);
    const auto keys = [&](void* address) {
      return in_pages ? Pages(shape, source, box, address) : Keys(shape, source.s_kv, tiles.tile_n, address);
    };
    x->k = tiles.gathers ? GatheredKeys(shape, source, at.k) : keys(at.k);
    x->v = keys(at.v);
    x->cut_k = CutKeys(shape, source.s_kv, tiles.tile_n, at.k);
    x->cut_v = CutKeys(shape, source.s_kv, tiles.tile_n, at.v);
  } else {
    x->k = at.k;
  }
  x->start = x->indices = at.from;  // a kernel takes one of them
  x->stop = x->length = at.to;
  x->s_batch = I32(source.s_batch), x->topk = I32(source.topk);
  x->s_kv = I32(source.s_kv);
  if constexpr (requires { x->k_pages; }) {
    x->k_pages = at.k_pages, x->v_pages = at.v_pages;
    x->page = I32(source.s_batch), x->box = I32(box);
    x->width = I32(source.s_kv / std::max<int64_t>(source.s_batch, 1));
    x->pages = I32(source.pages), x->window = I32(source.window);
    x->scales = at.scales;
  }
  return "";
}

}  // namespace dsv4_fmha
