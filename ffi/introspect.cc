// What this library holds and what it would launch, for Python and for the tests.  Plain C, no device needed.
#include <cstdio>
#include <cstring>

#include "launch_plan.h"
#include "registry.h"

using namespace dsv4_fmha;

namespace {

// What a kernel receives, in order.  A tensor map is shown as its address, and what else it says is in `maps`.
struct ShownLaunch {
  uint32_t grid, count;
  uint32_t sizes[Params::kMax];
  unsigned char bytes[Params::kMax][sizeof(CUtensorMap)];
  TensorMapSpec maps[Params::kMax];  // of rank 0 where the parameter is none

  ShownLaunch(uint32_t grid, const Params& params) : grid(grid), count(0), sizes{}, bytes{}, maps{} {
    for (const Param& param : params) {
      const uint32_t i = count++;
      sizes[i] = param.bytes;
      if (param.map != nullptr) {
        memcpy(bytes[i], &param.tensor, sizeof param.tensor);
        maps[i] = *param.map;
      } else {
        memcpy(bytes[i], param.data, param.bytes);
      }
    }
  }
};

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

// The key of the variant that a call with so many heads gets, where all else is as in this variant; nullptr for none.
const char* dsv4_fmha_called(const char* key, int64_t heads) {
  for (const Launcher& launcher : Launchers()) {
    if (std::string_view(launcher.name) != key) continue;
    const Launcher* found = Find(launcher.key, heads);
    return found != nullptr ? found->name : nullptr;
  }
  return nullptr;
}

// What a forward target launches for a shape: 0, or -1 with the reason in `error`.
int dsv4_fmha_plan(const Shape* shape, float scale, const Tiles* tiles, const Addresses* addresses, ShownLaunch* out,
                   char* error, size_t error_bytes) {
  Plan plan;
  if (std::string reason = PlanLaunch(*shape, scale, *tiles, &plan); !reason.empty()) {
    snprintf(error, error_bytes, "%s", reason.c_str());
    return -1;
  }
  Addresses at = *addresses;
  *out = ShownLaunch(plan.grid, ForwardParams(plan, at));
  return 0;
}

// What it launches after that where keys are split, with this many threads of which each merges `columns` of a row.
void dsv4_fmha_plan_combine(const Shape* shape, int32_t threads, int32_t columns, const Addresses* addresses,
                            ShownLaunch* out) {
  CombinePlan plan = PlanCombine(*shape, threads, columns);
  Addresses at = *addresses;
  *out = ShownLaunch(plan.grid, CombineParams(plan, at));
}

}  // extern "C"
#pragma GCC visibility pop
