// The launch of a product of rows by group, as training has them, as a function of shapes: no driver, no device.
#pragma once

#include <algorithm>
#include <string>

#include "abi.h"
#include "rows.h"

namespace dsv4_fmha {

// kernels/abi/experts.py says what each is.
enum ExpertProductForm : int64_t { kOfRows, kGated, kTurned, kGatedBack, kOuter };

// a [rows, m]; b [groups, n, m], [groups, m, n] or [rows, n]; of a TensorMapDataType.
struct ExpertProductShape {
  int64_t form, rows, m, n, groups, type;
  int64_t tiles;  // room for tiles of rows; of a form that has them

  bool is_turned() const { return form == kTurned || form == kGatedBack; }
};

constexpr int64_t kSummedAtOnce = 64;                       // of what is summed over, and columns of a box
constexpr int64_t kResultRows = 128, kResultColumns = 256;  // of a tile

// Returns why it cannot be: empty if it can.
inline std::string CheckExpertProductShape(const ExpertProductShape& x) {
  for (auto [name, extent] : {std::pair{"rows", x.rows}, {"m", x.m}, {"n", x.n}, {"groups", x.groups}}) {
    if (std::string error = OutOfRange(name, extent); !error.empty()) return error;
  }
  for (auto [name, extent, of] :
       {std::tuple{"m", x.m, x.form == kOuter ? kResultRows : kSummedAtOnce}, {"n", x.n, kResultColumns}}) {
    if (extent % of != 0) {
      return std::string(name) + " is " + std::to_string(extent) + ", wanted a multiple of " + std::to_string(of);
    }
  }
  const int64_t parts = (x.form == kOuter ? x.m / kResultRows * x.groups : x.tiles) * (x.n / kResultColumns);
  return parts > kMaxExtent ? TooLarge("the number of tiles", parts, kMaxExtent) : "";
}

// An array [outer, rows, columns] in boxes of so many rows and 64 columns.
inline TensorArgument InBoxes(int64_t type, int64_t box, int64_t columns, int64_t rows, int64_t outer, void* address) {
  const uint64_t pitch = U64(columns * ElementBytes(type));
  TensorArgument made{.map = {.rank = 2,
                              .type = U32(type),
                              .swizzle = kSwizzle128B,
                              .box = {kSummedAtOnce, U32(box)},
                              .extents = {U64(columns), U64(rows)},
                              .strides = {pitch}},
                      .extents = {I32(rows), I32(columns), I32(outer)},
                      .address = address};
  if (outer > 0) {
    made.map.rank = 3;
    made.map.box[2] = 1;
    made.map.extents[2] = U64(outer);
    made.map.strides[1] = pitch * U64(rows);
  }
  return made;
}

inline Plan<ExpertProductArguments> PlanExpertProduct(const ExpertProductShape& x, const Tiles& tiles, float limit,
                                                      const ExpertProductAddresses& at) {
  const bool outer = x.form == kOuter;
  const int64_t most = outer ? x.groups * (x.m / kResultRows) : x.tiles;
  const int64_t work = most * (x.n / kResultColumns);
  const int64_t box = x.form == kGated ? kResultColumns / 2 : kResultColumns;  // gates and up projections lie apart
  return {.grid = U32(std::min<int64_t>(work, tiles.processors)),
          .arguments = {.a = InBoxes(x.type, outer ? kSummedAtOnce : kResultRows, x.m, x.rows, 0, at.a),
                        .b = outer           ? InBoxes(x.type, kSummedAtOnce, x.n, x.rows, 0, at.b)
                             : x.is_turned() ? InBoxes(x.type, kSummedAtOnce, x.n, x.m, x.groups, at.b)
                                             : InBoxes(x.type, box, x.m, x.n, x.groups, at.b),
                        .y = at.y,
                        .list = at.list,
                        .tiles = at.tiles,
                        .count = at.count,
                        .m = I32(x.m),
                        .n = I32(x.n),
                        .groups = I32(x.groups),
                        .inner = at.inner,
                        .weights = at.weights,
                        .limit = limit,
                        .made = at.made,
                        .of_weights = at.of_weights,
                        .first = at.first,
                        .sizes = at.sizes}};
}

}  // namespace dsv4_fmha
