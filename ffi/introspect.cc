// What this library holds and what it would launch, for Python and for the tests.  Plain C, no device needed.
#include <cstdio>
#include <cstring>

#include "fwd_plan.h"
#include "registry.h"

using namespace dsv4_fmha;

namespace {

// The parameters as the kernel receives them, in order; tensor maps are left as zeros.
struct FwdParamBytes {
  uint32_t count;
  uint32_t sizes[FwdParams::kMax];
  unsigned char bytes[FwdParams::kMax][sizeof(CUtensorMap)];
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

// What `fwd` launches for a shape: 0, or -1 with the reason in `error`.  `pointers` are start, stop, sink and lse.
int dsv4_fmha_plan_fwd(const FwdShape* shape, float scale, int32_t tile_m, int32_t tile_n, int32_t shared_kv,
                       void* const* pointers, FwdPlan* plan, FwdParamBytes* out, char* error, size_t error_bytes) {
  if (std::string reason = PlanFwd(*shape, scale, tile_m, tile_n, plan); !reason.empty()) {
    snprintf(error, error_bytes, "%s", reason.c_str());
    return -1;
  }
  FwdArguments arguments{{}, {}, {}, {}, pointers[0], pointers[1], pointers[2], pointers[3]};
  FwdParams params(*plan, arguments, shared_kv != 0);
  out->count = static_cast<uint32_t>(params.count);
  for (int i = 0; i < params.count; ++i) {
    out->sizes[i] = params.params[i].bytes;
    memcpy(out->bytes[i], params.params[i].data, params.params[i].bytes);
  }
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
