// Calls of ffi/ against stand_in_driver.cc, each scenario in a process of its own: ffi_test SCENARIO [FUNCTION].
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "forward.h"
#include "indexer_scores_at.h"
#include "rope.h"

extern "C" {
void stand_in_fail(const char* name, int times);
int stand_in_calls(const char* name);
int stand_in_pushed();
}

using namespace dsv4_fmha;

#define EXPECT(condition)                                                   \
  if (!(condition)) {                                                       \
    fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
    exit(1);                                                                \
  }

namespace {

// Operands whose keys are split in two, so there are two launches; Blackwell has no kernel to merge, and gets whole
// keys.
struct Arrays {
  alignas(64) char data[4096];
  std::vector<int64_t> q{2, 3, 8, 64}, k{2, 5, 1, 64}, rows{2, 3}, heads{8}, lse{2, 3, 8}, parts, o_parts;

  explicit Arrays(int splits) : parts{2, 3, 8, splits}, o_parts{2, 3, 8, splits, 64} {}

  Operand Of(const char* name, const std::vector<int64_t>& shape, ffi::DataType dtype, int offset = 0) {
    Operand x;
    x.name = name, x.data = data + offset, x.dimensions = Ints(shape.data(), shape.size()), x.dtype = dtype;
    return x;
  }

  Forward Call(int offset_of_k = 0) {
    const Operand keys = Of("k", k, ffi::BF16, offset_of_k), start = Of("start", rows, ffi::S32);
    return {.op = "mha_fwd",
            .shared_kv = false,
            .kv_heads = true,
            .q = Of("q", q, ffi::BF16),
            .sources = {{.kind = kSpan, .k = keys, .v = Of("v", k, ffi::BF16), .from = start, .to = start}},
            .sink = Of("sink", heads, ffi::F32),
            .scale = 1,
            .o = Of("o", q, ffi::BF16),
            .lse = Of("lse", lse, ffi::F32),
            .o_parts = Of("o_parts", o_parts, ffi::F32),
            .lse_parts = Of("lse_parts", parts, ffi::F32)};
  }
};

bool Hopper(int ordinal) { return ordinal < 4; }

// The steps that XLA takes for one call: empty on success.
std::string Run(int ordinal) {
  Arrays arrays(Hopper(ordinal) ? 2 : 0);
  const Forward call = arrays.Call();
  if (ffi::Error error = call.Initialize(ordinal); error.failure()) return error.message();
  ffi::Error error = call.Execute(nullptr, ordinal);
  return error.failure() ? error.message() : "";
}

// First calls on every device, from many threads: each kernel is loaded once.
void Threads() {
  constexpr int kThreads = 16, kCalls = 8;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([i] {
      for (int j = 0; j < kCalls; ++j) EXPECT(Run((i + j) % 8) == "");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(stand_in_calls("cuInit") == 1);
  EXPECT(stand_in_calls("cuLibraryLoadData") == 3);  // a kernel for either architecture, and one that merges
  EXPECT(stand_in_calls("cuLibraryGetKernel") == 3);
  EXPECT(stand_in_calls("cuKernelGetFunction") == 4 * 2 + 4);
  EXPECT(stand_in_calls("cuLaunchKernelEx 0") == kThreads * kCalls / 2);  // Hopper's
  EXPECT(stand_in_calls("cuLaunchKernelEx 1") == kThreads * kCalls / 2);  // Blackwell's
  EXPECT(stand_in_calls("cuLaunchKernelEx 2") == kThreads * kCalls / 2);  // the merges
}

// An error names the function that failed, and the next call tries again; what has been loaded stays.
void Fails(const char* function, int times) {
  stand_in_fail(function, times);
  for (int i = 0; i < times; ++i) {
    const std::string error = Run(0);
    EXPECT(error == std::string(function) + ": CUDA_ERROR_OUT_OF_MEMORY");
    EXPECT(stand_in_pushed() == 0);
  }
  EXPECT(Run(0) == "");
  EXPECT(Run(1) == "");
  EXPECT(stand_in_calls("cuLibraryLoadData") == 2 + (function == std::string("cuLibraryLoadData") ? times : 0));
  EXPECT(Run(5) == "");
  // a late failure on another device does not spoil a device that works
  stand_in_fail(function, times);
  const std::string error = Run(2);
  EXPECT(error.empty() || error == std::string(function) + ": CUDA_ERROR_OUT_OF_MEMORY");
  stand_in_fail(function, 0);
  EXPECT(Run(2) == "");
  EXPECT(stand_in_pushed() == 0);
}

// Threads that arrive while the first one fails.
void FailsForSome() {
  stand_in_fail("cuLibraryLoadData", 3);
  std::atomic<int> failed = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] { failed += Run(0) != ""; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(failed == 3);
  EXPECT(Run(0) == "");
}

void Refusals() {
  EXPECT(Run(8).find("cuDeviceGet: CUDA_ERROR_INVALID_VALUE") == 0);
  for (int ordinal : {-1, kMaxDevices}) EXPECT(Run(ordinal).find("the device is beyond the 64") == 0);
  Arrays arrays(0);
  const ffi::Error error = arrays.Call(/*offset_of_k=*/8).Execute(nullptr, 0);
  EXPECT(error.failure());
  EXPECT(error.message() == "k: got an address of remainder 8, wanted a multiple of 16");
  EXPECT(arrays.Call(/*offset_of_k=*/16).Execute(nullptr, 0).success());
}

// Keys of the last sequence alone split: a launch for the others, one for the last, which a third one merges.
void LastSplit() {
  Arrays arrays(2);
  arrays.parts[0] = arrays.o_parts[0] = 1;
  const Forward call = arrays.Call();
  EXPECT(call.Initialize(0).success() && call.Execute(nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 0") == 2 && stand_in_calls("cuLaunchKernelEx 2") == 1);
  EXPECT(stand_in_calls("cuLaunchKernelEx 0 early") == 0 && stand_in_calls("cuLaunchKernelEx 2 early") == 1);
  const SourceAddresses at = call.sources.items[0].at(1);
  EXPECT(at.k == arrays.data + 5 * 64 * 2 && at.v == at.k && at.from == arrays.data + 3 * 4 && at.to == at.from);
  arrays.parts[0] = arrays.o_parts[0] = 3;
  const ffi::Error error = arrays.Call().Execute(nullptr, 0);
  EXPECT(error.message() == "o_parts: got shape [3, 3, 8, 2, 64], wanted [2, 3, 8, 2, 64]");
  arrays.parts[0] = 0;
  EXPECT(arrays.Call().Execute(nullptr, 0).failure());
}

// The same of a kernel that gathers keys, and so may begin before the launch for the others has ended.
void LastSplitOverlaps() {
  Arrays arrays(2);
  arrays.q[3] = arrays.o_parts[4] = 512, arrays.k = {2, 5, 512}, arrays.parts[0] = arrays.o_parts[0] = 1;
  const std::vector<int64_t> indices{2, 3, 7};
  Forward call = arrays.Call();
  call.op = "mla_sparse_fwd", call.shared_kv = true, call.kv_heads = false;
  call.sources = {LatentSelection(call.sources.items[0].k, arrays.Of("indices", indices, ffi::S32),
                                  arrays.Of("length", arrays.rows, ffi::S32))};
  EXPECT(call.Execute(nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 7") == 2 && stand_in_calls("cuLaunchKernelEx 7 early") == 1);
  EXPECT(stand_in_calls("cuLaunchKernelEx 2") == 1 && stand_in_calls("cuLaunchKernelEx 2 early") == 1);
}

// Scores at given entries, and their gradients, whose dk is cleared before the single launch.
void Entries() {
  alignas(64) static char data[4096];
  const std::vector<int64_t> q{2, 3, 16, 128}, k{2, 5, 128}, weights{2, 3, 16}, indices{2, 3, 7};
  auto of = [](const char* name, const std::vector<int64_t>& shape, ffi::DataType dtype) {
    Operand x;
    x.name = name, x.data = data, x.dimensions = Ints(shape.data(), shape.size()), x.dtype = dtype;
    return x;
  };
  auto fill = [&](auto& call, const char* op) {
    call.op = op, call.q = of("q", q, ffi::BF16), call.k = of("k", k, ffi::BF16);
    call.weights = of("weights", weights, ffi::F32), call.indices = of("indices", indices, ffi::S32);
    call.scores = of("scores", indices, ffi::F32);
  };
  ScoresAt scores;
  fill(scores, "indexer_scores_at");
  EXPECT(scores.Initialize(0).success() && scores.Execute(nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 3") == 1 && stand_in_calls("cuMemsetD32Async") == 0);
  ScoresAtGradient gradient;
  fill(gradient, "indexer_scores_at_bwd");
  gradient.dq = of("dq", q, ffi::BF16), gradient.dk = of("dk", k, ffi::F32);
  gradient.dweights = of("dweights", weights, ffi::F32);
  EXPECT(gradient.Initialize(0).success() && gradient.Execute(nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 4") == 1 && stand_in_calls("cuMemsetD32Async") == 1);
  gradient.dq.dtype = ffi::F32;
  EXPECT(gradient.Execute(nullptr, 0).message() == "dq: got F32, wanted BF16 like q");
  scores.k.dtype = ffi::F16;
  EXPECT(scores.Initialize(0).message() == "k: got F16, wanted BF16 like q");
  EXPECT(scores.Initialize(5).message().find("k: got") == 0);
}

// RoPE in place, which refuses another place than x's, and after a norm; a call of no rows launches nothing.
void Rows() {
  alignas(64) static char data[2][4096];
  const std::vector<int64_t> rows{1, 2, 1, 512}, table{1, 2, 64}, none{0, 2, 1, 512}, no_table{0, 2, 64};
  auto of = [](const char* name, char* at, const std::vector<int64_t>& shape, ffi::DataType dtype) {
    Operand x;
    x.name = name, x.data = at, x.dimensions = Ints(shape.data(), shape.size()), x.dtype = dtype;
    return x;
  };
  auto fill = [&](auto& call, const char* op, char* y) {
    call.op = op, call.x = of("x", data[0], rows, ffi::BF16), call.table = of("table", data[1], table, ffi::F32);
    call.dy = call.x, call.y = of("y", y, rows, ffi::BF16);
  };
  RopeInPlace in_place;
  fill(in_place, "rope", data[0]);
  EXPECT(in_place.Initialize(0).success() && in_place.Execute(nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 5") == 1);
  in_place.y.data = data[1];
  EXPECT(in_place.Execute(nullptr, 0).message() == "rope: y is not where x is");
  RopeAfterNorm after_norm;
  fill(after_norm, "norm_rope", data[1]);
  EXPECT(after_norm.Initialize(0).success() && after_norm.Execute(nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 6") == 1);
  after_norm.y.dtype = ffi::F16;
  EXPECT(after_norm.Execute(nullptr, 0).message() == "y: got F16, wanted BF16 like x");
  for (Operand* x : {&after_norm.x, &after_norm.dy, &after_norm.y}) x->dimensions = Ints(none.data(), none.size());
  after_norm.y.dtype = ffi::BF16, after_norm.table.dimensions = Ints(no_table.data(), no_table.size());
  EXPECT(after_norm.Execute(nullptr, 0).success() && stand_in_calls("cuLaunchKernelEx 6") == 1);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string scenario = argv[1];
  if (scenario == "threads") Threads();
  if (scenario == "fails for some") FailsForSome();
  if (scenario == "refusals") Refusals();
  if (scenario == "last split") LastSplit();
  if (scenario == "last split overlaps") LastSplitOverlaps();
  if (scenario == "entries") Entries();
  if (scenario == "rows") Rows();
  if (scenario == "fails") {
    EXPECT(argc == 4);
    Fails(argv[2], atoi(argv[3]));
  }
  puts("passed");
}
