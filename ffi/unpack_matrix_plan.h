// The launch that writes matrices in FP8 as arrays, as a function of shapes: no driver, no device.
#pragma once

#include <string>
#include <tuple>
#include <utility>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// Matrices [rows, columns] of bytes [tiles, slabs, slab_bytes]: a tile has 64 rows, and a slab of it 64 columns.
struct UnpackMatrixShape {
  int64_t matrices, rows, columns, tiles, slabs, slab_bytes;
};

// Returns why it cannot be: empty if it can.
inline std::string CheckUnpackMatrixShape(const UnpackMatrixShape& x) {
  static constexpr int64_t kSide = 64, kAtOnce = 8;  // numbers of a row that are written at once
  for (auto [name, extent, most] : {std::tuple{"m", x.matrices, kMaxExtent},
                                    {"tiles", x.tiles, kMaxExtent / kSide},
                                    {"slabs", x.slabs, kMaxExtent / kSide},
                                    {"rows", x.rows, x.tiles * kSide},
                                    {"columns", x.columns, x.slabs * kSide}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
    if (extent > most) return TooLarge(name, extent, most);
  }
  if (x.columns % kAtOnce != 0) return "columns is " + std::to_string(x.columns) + ", wanted a multiple of 8";
  if (x.slab_bytes != kBytesOfSlabOfE4m3) {
    return "slab_bytes is " + std::to_string(x.slab_bytes) + ", wanted " + std::to_string(kBytesOfSlabOfE4m3);
  }
  const int64_t places = x.tiles * x.slabs;
  return places > kMaxExtent / x.matrices ? TooLarge("m * tiles * slabs", places * x.matrices, kMaxExtent) : "";
}

// For CTAs that take tile_m rows and tile_n columns each.
inline Plan<UnpackMatrixArguments> PlanUnpackMatrix(const UnpackMatrixShape& x, int32_t tile_m, int32_t tile_n,
                                                    const UnpackMatrixAddresses& at) {
  return {.grid = U32(x.matrices * CeilDiv(x.rows, tile_m) * CeilDiv(x.columns, tile_n)),
          .arguments = {.data = at.data,
                        .w = at.w,
                        .matrices = I32(x.matrices),
                        .rows = I32(x.rows),
                        .columns = I32(x.columns),
                        .tiles = I32(x.tiles),
                        .slabs = I32(x.slabs)}};
}

}  // namespace dsv4_fmha
