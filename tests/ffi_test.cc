// Calls of ffi/ against stand_in_driver.cc, each scenario in a process of its own: ffi_test SCENARIO [FUNCTION].
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "all_reduce.h"
#include "forward.h"
#include "fused_moe_plan.h"
#include "indexer_scores_at.h"
#include "rope.h"
#include "target.h"

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

  ForwardCall Call(int offset_of_k = 0) {
    ForwardCall call;
    call.target = &kMhaFwdTarget;
    call.q = Of("q", q, ffi::BF16), call.sink = Of("sink", heads, ffi::F32), call.scale = 1;
    call.sources[0] = {.k = Of("k", k, ffi::BF16, offset_of_k),
                       .v = Of("v", k, ffi::BF16),
                       .from = Of("start", rows, ffi::S32),
                       .to = Of("stop", rows, ffi::S32),
                       .k_pages = {},
                       .v_pages = {},
                       .scales = {}};
    call.o = Of("o", q, ffi::BF16), call.lse = Of("lse", lse, ffi::F32);
    call.o_parts = Of("o_parts", o_parts, ffi::F32), call.lse_parts = Of("lse_parts", parts, ffi::F32);
    return call;
  }
};

bool Hopper(int ordinal) { return ordinal < 4; }

// The steps that XLA takes for one call: empty on success.
std::string Run(int ordinal) {
  Arrays arrays(Hopper(ordinal) ? 2 : 0);
  const ForwardCall call = arrays.Call();
  if (ffi::Error error = Initialize<Forward>(call, ordinal); error.failure()) return error.message();
  ffi::Error error = Execute<Forward>(call, nullptr, ordinal);
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
  const ffi::Error error = Execute<Forward>(arrays.Call(/*offset_of_k=*/8), nullptr, 0);
  EXPECT(error.failure());
  EXPECT(error.message() == "k: got an address of remainder 8, wanted a multiple of 16");
  EXPECT(Execute<Forward>(arrays.Call(/*offset_of_k=*/16), nullptr, 0).success());
}

// Keys of the last sequence alone split: a launch for the others, one for the last, which a third one merges.
void LastSplit() {
  Arrays arrays(2);
  arrays.parts[0] = arrays.o_parts[0] = 1;
  const ForwardCall call = arrays.Call();
  EXPECT(Initialize<Forward>(call, 0).success() && Execute<Forward>(call, nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 0") == 2 && stand_in_calls("cuLaunchKernelEx 2") == 1);
  EXPECT(stand_in_calls("cuLaunchKernelEx 0 early") == 0 && stand_in_calls("cuLaunchKernelEx 2 early") == 1);
  const auto at = AddressesOf<ForwardAddresses>(call, 1);
  const auto& source = at.sources[0];
  EXPECT(source.k == arrays.data + 5 * 64 * 2 && source.v == source.k);
  EXPECT(source.from == arrays.data + 3 * 4 && source.to == source.from);
  EXPECT(at.q == arrays.data + 3 * 8 * 64 * 2 && at.sink == arrays.data && at.o_parts == arrays.data);
  arrays.parts[0] = arrays.o_parts[0] = 3;
  const ffi::Error error = Execute<Forward>(arrays.Call(), nullptr, 0);
  EXPECT(error.message() == "o_parts: got shape [3, 3, 8, 2, 64], wanted [2, 3, 8, 2, 64]");
  arrays.parts[0] = 0;
  EXPECT(Execute<Forward>(arrays.Call(), nullptr, 0).failure());
}

// The same of a kernel that gathers keys, and so may begin before the launch for the others has ended.
void LastSplitOverlaps() {
  Arrays arrays(2);
  arrays.q[3] = arrays.o_parts[4] = 512, arrays.k = {2, 5, 512}, arrays.parts[0] = arrays.o_parts[0] = 1;
  const std::vector<int64_t> indices{2, 3, 7};
  ForwardCall call = arrays.Call();
  call.target = &kMlaSparseFwdTarget;
  call.sources[0].from = arrays.Of("indices", indices, ffi::S32);
  EXPECT(Execute<Forward>(call, nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 7") == 2 && stand_in_calls("cuLaunchKernelEx 7 early") == 1);
  EXPECT(stand_in_calls("cuLaunchKernelEx 2") == 1 && stand_in_calls("cuLaunchKernelEx 2 early") == 1);
}

// The canonical order of sums is one launch over whole keys, of a kernel that has it; all else is refused.
void Order() {
  Arrays split(2), whole(0);
  const std::vector<int64_t> indices{2, 3, 7};
  for (Arrays* x : {&split, &whole}) x->q[3] = x->o_parts[4] = 512, x->k = {2, 5, 512};
  auto of = [&](Arrays& arrays, int64_t order) {
    ForwardCall call = arrays.Call();
    call.target = &kMlaSparseFwdTarget, call.order = order;
    call.sources[0].from = arrays.Of("indices", indices, ffi::S32);
    return call;
  };
  EXPECT(Execute<Forward>(of(whole, 2), nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 7") == 1 && stand_in_calls("cuLaunchKernelEx 2") == 0);
  auto refusal = [](const ForwardCall& call, int ordinal) {
    EXPECT(Initialize<Forward>(call, ordinal).failure());
    return std::string(Execute<Forward>(call, nullptr, ordinal).message());
  };
  EXPECT(refusal(of(whole, 3), 0) == "order: got 3, wanted 2, which this library has, or 0");
  EXPECT(refusal(of(split, 2), 0) == "order: got 2 with 2 splits, wanted whole keys");
  EXPECT(refusal(of(whole, 2), 5) == "order: got 2 on sm_100f, wanted sm_90a");
  Arrays arrays(0);
  ForwardCall dense = arrays.Call();
  dense.order = 2, dense.target = &kMlaSpanFwdTarget;
  EXPECT(refusal(dense, 0) ==
         "order: got 2 of mla_span_fwd with 8 heads and 1 KV heads, wanted a multiple of 64, and 1");
  const std::vector<int64_t> table{2, 3, 64};
  dense.target = &kMlaSpanFwdTurnedTarget, dense.table = arrays.Of("table", table, ffi::F32);
  EXPECT(refusal(dense, 0) == "order: got 2 of mla_span_fwd_turned, wanted a call whose kernels have it");
}

// Scores at given entries, and their gradients, whose dk is cleared before the single launch.
void Entries() {
  alignas(64) static char data[4096];
  const std::vector<int64_t> q{2, 3, 32, 128}, k{2, 5, 128}, weights{2, 3, 32}, indices{2, 3, 7};
  auto of = [](const char* name, const std::vector<int64_t>& shape, ffi::DataType dtype) {
    Operand x;
    x.name = name, x.data = data, x.dimensions = Ints(shape.data(), shape.size()), x.dtype = dtype;
    return x;
  };
  IndexerScoresAtCall scores;
  scores.target = &kIndexerScoresAtTarget, scores.q = of("q", q, ffi::BF16), scores.k = of("k", k, ffi::BF16);
  scores.weights = of("weights", weights, ffi::F32), scores.indices = of("indices", indices, ffi::S32);
  scores.scores = of("scores", indices, ffi::F32);
  EXPECT(Initialize<IndexerScoresAt>(scores, 0).success() && Execute<IndexerScoresAt>(scores, nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 3") == 1 && stand_in_calls("cuMemsetD32Async") == 0);
  IndexerScoresAtCall gradient = scores;
  gradient.target = &kIndexerScoresAtBwdTarget;
  gradient.dq = of("dq", q, ffi::BF16), gradient.dk = of("dk", k, ffi::F32);
  gradient.dweights = of("dweights", weights, ffi::F32);
  EXPECT(Initialize<IndexerScoresAt>(gradient, 0).success());
  EXPECT(Execute<IndexerScoresAt>(gradient, nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 4") == 1 && stand_in_calls("cuMemsetD32Async") == 1);
  gradient.dq.dtype = ffi::F32;
  EXPECT(Execute<IndexerScoresAt>(gradient, nullptr, 0).message() == "dq: got F32, wanted BF16 like q");
  scores.k.dtype = ffi::F16;
  EXPECT(Initialize<IndexerScoresAt>(scores, 0).message() == "k: got F16, wanted BF16 like q");
  EXPECT(Initialize<IndexerScoresAt>(scores, 5).message().find("k: got") == 0);
}

// RoPE in place, which copies x where it has another place, and after a norm; a call of no rows launches nothing.
void Rows() {
  alignas(64) static char data[2][4096];
  const std::vector<int64_t> rows{1, 2, 1, 512}, table{1, 2, 64}, none{0, 2, 1, 512}, no_table{0, 2, 64};
  auto of = [](const char* name, char* at, const std::vector<int64_t>& shape, ffi::DataType dtype) {
    Operand x;
    x.name = name, x.data = at, x.dimensions = Ints(shape.data(), shape.size()), x.dtype = dtype;
    return x;
  };
  RopeCall in_place;
  in_place.target = &kRopeTarget, in_place.direction = 1;
  in_place.x = in_place.dy = of("x", data[0], rows, ffi::BF16), in_place.y = of("y", data[0], rows, ffi::BF16);
  in_place.table = of("table", data[1], table, ffi::F32);
  EXPECT(Initialize<Rope>(in_place, 0).success() && Execute<Rope>(in_place, nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 5") == 1);
  in_place.y.data = data[1];
  EXPECT(stand_in_calls("cuMemcpyDtoDAsync") == 0 && Execute<Rope>(in_place, nullptr, 0).success());
  EXPECT(stand_in_calls("cuMemcpyDtoDAsync") == 1 && stand_in_calls("cuLaunchKernelEx 5") == 2);
  RopeCall after_norm = in_place;
  after_norm.target = &kNormRopeTarget, after_norm.direction = 0, after_norm.eps = 1e-6f;
  EXPECT(Initialize<Rope>(after_norm, 0).success() && Execute<Rope>(after_norm, nullptr, 0).success());
  EXPECT(stand_in_calls("cuLaunchKernelEx 6") == 1);
  after_norm.y.dtype = ffi::F16;
  EXPECT(Execute<Rope>(after_norm, nullptr, 0).message() == "y: got F16, wanted BF16 like x");
  for (Operand* x : {&after_norm.x, &after_norm.dy, &after_norm.y}) x->dimensions = Ints(none.data(), none.size());
  after_norm.y.dtype = ffi::BF16, after_norm.table.dimensions = Ints(no_table.data(), no_table.size());
  EXPECT(Execute<Rope>(after_norm, nullptr, 0).success() && stand_in_calls("cuLaunchKernelEx 6") == 1);
}

// Devices that share a state: each makes its memory once, waits for the other, and learns where that one has its lines.
void Exchanges() {
  alignas(64) static char data[2][4096];
  const std::vector<int64_t> shape{12};
  AllReduceCall call;
  call.target = &kAllReduceTarget, call.devices = 2;
  for (Operand* x : {&call.x, &call.y}) {
    x->name = "x", x->data = data[x == &call.y], x->dimensions = Ints(shape.data(), shape.size());
    x->dtype = ffi::BF16;
  }
  Exchange alone(std::chrono::milliseconds(30));
  EXPECT(Initialize<AllReduce>(call, 1, &alone).message() ==
         "all_reduce: got 1 devices, wanted all 2 of the mesh: the others have not begun the program");
  EXPECT(Execute<AllReduce>(call, nullptr, 1, &alone).message().find("before it has joined") != std::string::npos);
  for (const char* function : {"cuMemAlloc", "cuMemsetD32"}) {
    stand_in_fail(function, 1);
    Exchange short_of_memory(std::chrono::milliseconds(30));
    EXPECT(Initialize<AllReduce>(call, 0, &short_of_memory).message().find(function) != std::string::npos);
  }
  Exchange state;
  auto join = [&](int ordinal) {
    for (int i = 0; i < 3; ++i) {
      EXPECT(Initialize<AllReduce>(call, ordinal, &state).success());
      EXPECT(Execute<AllReduce>(call, nullptr, ordinal, &state).success());
    }
  };
  const int made = stand_in_calls("cuMemAlloc");
  std::thread first(join, 3), second(join, 1);
  first.join(), second.join();
  EXPECT(stand_in_calls("cuMemAlloc") == made + 2 && stand_in_calls("cuMemcpyHtoD") == 2);
  EXPECT(stand_in_calls("cuCtxEnablePeerAccess") == 2 && stand_in_calls("cuLaunchKernelEx 8") == 6);
  const Exchange::Member low = state.Of(1), high = state.Of(3);
  EXPECT(low.number == 0 && high.number == 1 && state.Of(2).memory == nullptr);
  const AllReduceShape sizes{.bytes = 24, .device = 0, .devices = 2, .tile_n = 4};
  char* inbox = static_cast<char*>(high.memory) + InboxAt(sizes);
  EXPECT(static_cast<char**>(low.memory)[1] == inbox);  // the lines of device 0 come first
  EXPECT(static_cast<char**>(high.memory)[0] == static_cast<char*>(low.memory) + InboxAt(sizes) + 3 * kLineBytes);
  for (int64_t i = 0; i < BytesKept(sizes) - InboxAt(sizes); ++i) EXPECT(inbox[i] == 0);
  call.devices = 1;
  EXPECT(Initialize<AllReduce>(call, 0, &state).message() == "all_reduce: devices is 1, wanted 2 to 8");
  EXPECT(stand_in_pushed() == 0);
}

// A device has half of the experts, so half of the choices are of others: a tile of 16 rows has twice the rows of one.
void CountsRowsOfExperts() {
  FusedMoeShape x = {};
  x.tokens = 256, x.chosen = 6, x.experts = 128, x.num_experts = 256;
  EXPECT(RowsOfTile(x) == 12);
  x.num_experts = 128;
  EXPECT(RowsOfTile(x) == 24);
}

// What XLA hands over becomes a call: arrays by their order, attributes by their names.
ffi::Error ReadScaleAndOrder(ffi::Dictionary x, ForwardCall* call) {
  return Read(x, "scale", &call->scale, "order", &call->order);
}

void Decodes() {
  using Decoder = Handlers<Forward, kMlaSpanFwdTarget, ReadScaleAndOrder>;
  alignas(64) static char data[9][64];
  int64_t dims[9][5] = {{2, 3, 8, 64}, {2, 5, 1, 64}, {2, 3}, {2, 3}, {8}, {2, 3, 8, 64}, {2, 3, 8}, {}, {}};
  const int64_t ranks[9] = {4, 4, 2, 2, 1, 4, 3, 5, 4};
  XLA_FFI_Buffer buffers[9];
  void* arrays[9];
  XLA_FFI_ArgType operand_types[9] = {};
  XLA_FFI_RetType result_types[9] = {};
  for (int i = 0; i < 9; ++i) {
    buffers[i] = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, data[i], ranks[i], dims[i]};
    arrays[i] = &buffers[i], operand_types[i] = XLA_FFI_ArgType_BUFFER, result_types[i] = XLA_FFI_RetType_BUFFER;
  }
  buffers[0].dtype = XLA_FFI_DataType_BF16;
  int64_t order = 7;
  float scale = 0.5f;
  XLA_FFI_Scalar numbers[3] = {
      {XLA_FFI_DataType_S64, &order}, {XLA_FFI_DataType_F32, &scale}, {XLA_FFI_DataType_F32, &scale}};
  XLA_FFI_ByteSpan names[3] = {{"order", 5}, {"scale", 5}, {"unknown", 7}};
  XLA_FFI_AttrType kinds[3] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_SCALAR};
  XLA_FFI_ByteSpan* named[3] = {&names[0], &names[1], &names[2]};
  void* values[3] = {&numbers[0], &numbers[1], &numbers[2]};
  auto decode = [&](int operands, int results, int attributes, ForwardCall* call) {
    const XLA_FFI_Args x{XLA_FFI_Args_STRUCT_SIZE, nullptr, operands, operand_types, arrays};
    const XLA_FFI_Rets y{XLA_FFI_Rets_STRUCT_SIZE, nullptr, results, result_types, arrays + operands};
    const XLA_FFI_Attrs z{XLA_FFI_Attrs_STRUCT_SIZE, nullptr, attributes, kinds, named, values};
    return Decoder::Decode(ffi::RemainingArgs(&x, 0), ffi::RemainingRets(&y, 0), ffi::Dictionary(&z), call);
  };
  ForwardCall call;
  EXPECT(decode(5, 4, 2, &call).success());
  EXPECT(call.target == &kMlaSpanFwdTarget && call.order == 7 && call.scale == 0.5f);
  EXPECT(call.q.data == data[0] && call.q.dtype == ffi::BF16 && call.q.dimensions.size() == 4);
  EXPECT(call.sources[0].k.data == data[1] && call.sources[0].v.data == data[1]);  // V is K
  EXPECT(call.sources[0].from.data == data[2] && call.sources[0].to.data == data[3] && call.sink.data == data[4]);
  EXPECT(call.o.data == data[5] && call.lse.data == data[6] && std::string(call.lse.name) == "lse");
  EXPECT(call.o_parts.data == data[7] && call.lse_parts.data == data[8]);
  EXPECT(decode(5, 3, 2, &call).message() == "mla_span_fwd: got 8 arrays, wanted 9");
  EXPECT(decode(5, 4, 1, &call).message() == "got 1 attributes, wanted 2");
  EXPECT(decode(5, 4, 3, &call).message() == "got 3 attributes, wanted 2");
  names[1] = {"stale", 5};
  EXPECT(decode(5, 4, 2, &call).failure());
  names[1] = {"scale", 5}, numbers[1].dtype = XLA_FFI_DataType_F64;
  EXPECT(decode(5, 4, 2, &call).failure());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string scenario = argv[1];
  if (scenario == "threads") Threads();
  if (scenario == "fails for some") FailsForSome();
  if (scenario == "refusals") Refusals();
  if (scenario == "last split") LastSplit();
  if (scenario == "last split overlaps") LastSplitOverlaps();
  if (scenario == "order") Order();
  if (scenario == "entries") Entries();
  if (scenario == "rows") Rows();
  if (scenario == "exchanges") Exchanges();
  if (scenario == "experts") CountsRowsOfExperts();
  if (scenario == "decodes") Decodes();
  if (scenario == "fails") {
    EXPECT(argc == 4);
    Fails(argv[2], atoi(argv[3]));
  }
  puts("passed");
}
