// The launches of the gradient of attention over one span, K and V separate, as functions of shapes: no driver, no device.
#pragma once

#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// How rows are cut into tiles of tile_m. It plans for one processor, so that tiles are full.
inline std::string CutFullTiles(const RowShape& shape, int32_t tile_m, Tiling* n) {
  return CutRows(shape, {.tile_m = tile_m, .tile_n = 0, .processors = 1, .cluster = 1, .gathers = 0}, n);
}

// Which keys the tiles of tile_m rows see; a CTA finds it for `tiles_of_cta` of them.  Returns why it cannot: empty on
// success.
inline std::string PlanTileSpans(const RowShape& shape, int32_t tile_m, int32_t tiles_of_cta,
                                 const MhaBackwardAddresses& at, Plan<TileSpansArguments>* plan) {
  Tiling n;
  TileSpansArguments& x = plan->arguments;
  if (std::string error = CutFullTiles(shape, tile_m, &n); !error.empty()) return error;
  plan->grid = U32(CeilDiv(shape.b * n.tiles_inner * n.tiles_outer, tiles_of_cta));
  SetTiling(shape, n, &x);
  x.start = at.sources[0].from, x.stop = at.sources[0].to, x.seen = at.seen;
  return "";
}

// The gradients of keys, of all, or those of rows, by a kernel with these tiles.  Returns why it cannot: empty on
// success.
inline std::string PlanMhaBackward(const RowShape& shape, int64_t s_kv, float scale, bool of_keys, const Tiles& tiles,
                                   const MhaBackwardAddresses& at, Plan<MhaBackwardArguments>* plan) {
  Tiling n;
  MhaBackwardArguments& x = plan->arguments;
  if (std::string error = CutFullTiles(shape, tiles.tile_m, &n); !error.empty()) return error;
  if (std::string error = BadScale(scale); !error.empty()) return error;
  if (std::string error = OutOfRange("s_kv", s_kv); !error.empty()) return error;
  const int64_t max_heads = kMaxStrideBytes / (shape.d * ElementBytes(shape.type));
  if (shape.h_kv > max_heads / s_kv) return TooLarge("s_kv * h_kv", s_kv * shape.h_kv, max_heads);
  if (of_keys && tiles.cluster > 1 && at.dv == nullptr) return "keys that are values too have no kernel of this d";
  const int64_t of_pair = of_keys ? CeilDiv(s_kv, tiles.tile_n) : n.tiles_inner * n.tiles_outer;
  if (of_pair > kMaxExtent / (shape.b * shape.h_kv * tiles.cluster)) {
    return TooLarge("the number of tiles", of_pair * shape.b * shape.h_kv, kMaxExtent);
  }
  const int64_t work = of_pair * shape.b * shape.h_kv;
  plan->grid = U32(of_keys ? work * tiles.cluster : std::min<int64_t>(work, tiles.processors));
  SetTiling(shape, n, &x);
  x.q = Rows(shape, n, shape.d, at.q), x.dout = Rows(shape, n, shape.d, at.dout);
  x.k = Keys(shape, s_kv, tiles.tile_n, at.sources[0].k);
  x.v = Keys(shape, s_kv, tiles.tile_n, at.sources[0].v);
  x.lse = at.lse, x.sink_factor = at.sink_factor, x.delta = at.delta;
  x.start = at.sources[0].from, x.stop = at.sources[0].to, x.seen = at.seen;
  x.dq = at.dq, x.dk = at.dk, x.dv = at.dv;
  x.sums = at.dq;  // of a kernel that makes all gradients
  x.shared_kv = at.dv == nullptr;
  x.s_kv = I32(s_kv);
  x.scale = scale;
  return "";
}

}  // namespace dsv4_fmha
