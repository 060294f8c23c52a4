// The calls of RoPE: in place, after the norm of rows, and the gradient of both.
//
// x [b, s, h, d], table f32 [b, s, dims], cos and sin by turns -> y like x, which is x itself, turned in place; or
// x and dy like x, with a norm.
#pragma once

#include "launch.h"
#include "operands.h"
#include "rope_plan.h"

namespace dsv4_fmha {

struct OfRows {
  const char* op;
  Operand x, table, dy;  // dy is x where there is none
  Operand y{};

  using Results = TypeList<ffi::Result<ffi::AnyBuffer>>;

  template <typename Y>
  void Give(Y& to_y) {
    y = {"y", *to_y};
  }

  ffi::Error Check(RopeShape* shape) const {
    const Ints rows = x.dimensions;
    if (rows.size() != 4) return Refuse(x, "shape " + Show(rows), "[b, s, h, d]");
    Expectations expect;
    expect.Shape(table, {rows[0], rows[1], table.dimensions[2]});
    for (const Operand* like : {&dy, &y}) {
      expect.Shape(*like, rows);
      expect.DtypeOf(x, *like);
    }
    for (const Operand* array : {&x, &table, &dy, &y}) expect.Aligned(*array);
    if (expect.error().failure()) return expect.error();
    if (table.dimensions[2] > rows[3]) return Refuse(table, "shape " + Show(table.dimensions), "no more than d last");
    if (rows[3] * 2 % 16 != 0) return Refuse(x, "shape " + Show(rows), "a multiple of 8 last");
    *shape = {.b = rows[0], .s = rows[1], .heads = rows[2], .d = rows[3]};
    return ffi::Error::Success();
  }

  template <typename FamilyChoices>
  ffi::Error LoadFor(int ordinal, const FamilyChoices& call) const {
    RopeShape shape;
    if (ffi::Error error = Check(&shape); error.failure()) return error;
    Launcher* launcher = nullptr;
    if (ffi::Error error = LookUp(op, GetDevice(ordinal), call, &launcher); error.failure()) return error;
    return Load(ordinal, {launcher});
  }

  // plan(shape, tile_m, addresses) is the launch.
  template <typename FamilyChoices, typename PlanOf>
  ffi::Error LaunchFor(CUstream stream, int ordinal, const FamilyChoices& call, PlanOf plan_of) const {
    RopeShape shape;
    if (ffi::Error error = Check(&shape); error.failure()) return error;
    if (Elements(x.dimensions) == 0) return ffi::Error::Success();
    if (std::string error = CheckRopeShape(shape); !error.empty()) return ffi::Error::InvalidArgument(error);
    Launcher* launcher = nullptr;
    if (ffi::Error error = LookUp(op, GetDevice(ordinal), call, &launcher); error.failure()) return error;
    const RopeAddresses at{.x = x.data, .table = table.data, .dy = dy.data, .y = y.data};
    auto plan = plan_of(shape, launcher->tile_m, at);
    return Launch(launcher, stream, ordinal, plan);
  }
};

struct RopeInPlace : OfRows {
  float direction = 1;

  RopeChoices Choices() const { return {.dims = table.dimensions[2], .dtype = x.dtype}; }

  ffi::Error Initialize(int ordinal) const { return LoadFor(ordinal, Choices()); }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    if (x.data != y.data) return ffi::Error::Internal("rope: y is not where x is");
    return LaunchFor(stream, ordinal, Choices(), [this](auto& shape, int32_t tile_m, const RopeAddresses& at) {
      return PlanRope(shape, direction, tile_m, at);
    });
  }
};

struct RopeAfterNorm : OfRows {
  float eps = 0;

  NormRopeChoices Choices() const { return {.d = x.dimensions[3], .dims = table.dimensions[2], .dtype = x.dtype}; }

  ffi::Error Initialize(int ordinal) const { return LoadFor(ordinal, Choices()); }

  ffi::Error Execute(CUstream stream, int ordinal) const {
    return LaunchFor(stream, ordinal, Choices(), [this](auto& shape, int32_t tile_m, const RopeAddresses& at) {
      return PlanNormRope(shape, eps, tile_m, at);
    });
  }
};

}  // namespace dsv4_fmha
