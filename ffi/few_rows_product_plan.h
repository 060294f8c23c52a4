// The launch of a product of few rows with a matrix, as a function of shapes: no driver, no device.
#pragma once

#include <string>
#include <tuple>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// x [rows, groups, k], w [groups, k, n] and y [rows, groups, n], x and w of a TensorMapDataType; or w is packed.
struct FewRowsProductShape {
  int64_t rows, groups, k, n, type;
  int64_t makes_heads;      // whether columns are heads, each of a cluster's CTAs; else each CTA has a part of k
  int64_t takes_heads;      // whether rows are heads, whose RoPE is turned back
  int64_t indexes;          // whether columns are an indexer's heads
  int64_t low_columns;      // of y, the first, which are a low-rank query
  int64_t square_tiles;     // sums of squares of a row of it; where x is one that is left to be normed, of x
  int64_t columns, column;  // of an array with the weights of an indexer's heads, and the first of these
  int64_t parts;            // into which CTAs cut k; none may be empty
  int64_t is_packed;        // whether w is packed, bytes [groups, tiles, slabs, slab_bytes]
  int64_t tiles, slabs, slab_bytes;
};

constexpr int64_t kHead = 512, kIndexHead = 128;
constexpr uint32_t kSlab = 64;        // of k at a time, and columns of a box
constexpr int64_t kPackedSlabs = 2;   // tiles and slabs of a packed matrix are even in number
constexpr int64_t kSquared = 128;     // numbers of a row whose squares are added up by one CTA
constexpr int64_t kSquareTiles = 32;  // a lane of a warp takes one

// Returns why it cannot be: empty if it can.
inline std::string CheckFewRowsProductShape(const FewRowsProductShape& shape) {
  const auto& [rows, groups, k, n, type, makes_heads, takes_heads, indexes, low, squares, columns, column, parts,
               is_packed, tiles, slabs, slab_bytes] = shape;
  for (auto [name, extent] : {std::pair{"rows", rows}, {"groups", groups}, {"k", k}, {"n", n}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  for (auto [name, extent] : {std::pair{"k", k}, {"n", n}}) {
    if (extent % 8 != 0) return std::string(name) + " is " + std::to_string(extent) + ", wanted a multiple of 8";
  }
  const int64_t at_once = is_packed != 0 ? kPackedSlabs * kSlab : kSlab;
  if (const int64_t most = CeilDiv(k, at_once); parts > most) {
    return "parts is " + std::to_string(parts) + ", wanted at most " + std::to_string(most) + ", one for " +
           std::to_string(at_once) + " of k";
  }
  if (is_packed != 0) {
    for (auto [name, got, wanted] : {std::tuple{"tiles", tiles, CeilDiv(n, at_once) * kPackedSlabs},
                                     {"slabs", slabs, CeilDiv(k, at_once) * kPackedSlabs},
                                     {"slab_bytes", slab_bytes, kBytesOfSlabOfE4m3}}) {
      if (got != wanted) {
        return std::string(name) + " is " + std::to_string(got) + ", wanted " + std::to_string(wanted);
      }
    }
  }
  if (takes_heads != 0 && k % kHead != 0) return "k is " + std::to_string(k) + ", wanted heads of 512";
  if (low % kSquared != 0 || low > n) {
    return "low_columns is " + std::to_string(low) + ", wanted a multiple of 128, at most n = " + std::to_string(n);
  }
  if (low > 0 && groups != 1) return "groups is " + std::to_string(groups) + ", wanted 1 with a low-rank query";
  const int64_t squared = low > 0 ? low : k;
  if (squares * kSquared != squared && (low > 0 || squares != 0)) {
    return "n_squares is " + std::to_string(squares) + ", wanted one for 128 of " + std::to_string(squared);
  }
  if (squares > kSquareTiles) return TooLarge("n_squares", squares, kSquareTiles);
  if (indexes != 0 && (column < 0 || column > columns - n / kIndexHead)) {
    return "column is " + std::to_string(column) + ", wanted one with " + std::to_string(n / kIndexHead) + " of " +
           std::to_string(columns) + " from there on";
  }
  const int64_t limit = kMaxExtent / groups / 64;
  if (k > limit || n > limit) return "groups * k or groups * n is more than " + std::to_string(kMaxExtent / 64);
  return rows > limit ? TooLarge("rows * groups", rows * groups, kMaxExtent / 64) : "";
}

inline Plan<FewRowsProductArguments> PlanFewRowsProduct(const FewRowsProductShape& shape, float eps, float scale,
                                                        const Tiles& tiles, const FewRowsProductAddresses& at) {
  const int64_t rows = shape.rows, groups = shape.groups, k = shape.k, n = shape.n, type = shape.type;
  const int64_t bytes = ElementBytes(type);
  const TensorMapSpec x{.rank = 3,
                        .type = U32(type),
                        .swizzle = kSwizzle128B,
                        .box = {kSlab, U32(tiles.tile_m), 1},
                        .extents = {U64(k), U64(rows), U64(groups)},
                        .strides = {U64(groups * k * bytes), U64(k * bytes)}};
  const TensorMapSpec w{.rank = 3,
                        .type = U32(type),
                        .swizzle = kSwizzle128B,
                        .box = {kSlab, kSlab, 1},
                        .extents = {U64(n), U64(k), U64(groups)},
                        .strides = {U64(n * bytes), U64(k * n * bytes)}};
  const int64_t count = CeilDiv(rows, tiles.tile_m) * CeilDiv(n, tiles.tile_n) * groups;
  return {.grid = U32(shape.makes_heads != 0 ? count : count * tiles.cluster),
          .arguments = {.x = {.map = x, .extents = {I32(rows), I32(k), I32(groups)}, .address = at.x},
                        .w = {.map = w, .extents = {I32(k), I32(n), I32(groups)}, .address = at.w},
                        .y = at.y,
                        .gain = at.gain,
                        .low = at.low,
                        .squares = at.squares,
                        .low_columns = I32(shape.low_columns),
                        .rows = I32(rows),
                        .k = I32(k),
                        .n = I32(n),
                        .groups = I32(groups),
                        .table = at.table,
                        .eps = eps,
                        .square_tiles = I32(shape.square_tiles),
                        .given = at.given,
                        .weights = at.weights,
                        .columns = I32(shape.columns),
                        .column = I32(shape.column),
                        .scale = scale}};
}

}  // namespace dsv4_fmha
