// The XLA custom calls: each is a function that names its operands.
#include <string_view>

#include "backward.h"
#include "dense_backward.h"
#include "forward.h"
#include "index_at.h"
#include "indexer.h"
#include "probabilities.h"
#include "rope.h"
#include "target.h"

namespace dsv4_fmha {
namespace {

constexpr char kScale[] = "scale", kOp[] = "op", kDirection[] = "direction", kEps[] = "eps", kSkip[] = "skip";

using Array = ffi::AnyBuffer;
using PerQuery = ffi::Buffer<ffi::S32, 2>;
using PerQueryList = ffi::Buffer<ffi::S32, 3>;
using PerHead = ffi::Buffer<ffi::F32, 1>;
using PerRow = ffi::Buffer<ffi::F32, 3>;
using Numbers = ffi::Buffer<ffi::F32, 1>;
using Scale = ffi::Attr<float, kScale>;
using Op = ffi::Attr<std::string_view, kOp>;

Forward MhaFwd(Array q, Array k, Array v, PerQuery start, PerQuery stop, PerHead sink, Scale scale) {
  return {.op = "mha_fwd",
          .shared_kv = false,
          .kv_heads = true,
          .q = {"q", q},
          .sources = {{.kind = kSpan, .k = {"k", k}, .v = {"v", v}, .from = {"start", start}, .to = {"stop", stop}}},
          .sink = {"sink", sink},
          .scale = *scale};
}

Forward MlaSpanFwd(Array q, Array kv, PerQuery start, PerQuery stop, PerHead sink, Scale scale) {
  return {.op = "mla_span_fwd",
          .shared_kv = true,
          .kv_heads = true,
          .q = {"q", q},
          .sources = {LatentSpan({"kv", kv}, {"start", start}, {"stop", stop})},
          .sink = {"sink", sink},
          .scale = *scale};
}

// Keys of one head that are V too.
Forward OverLatents(const char* op, Array& q, Sources sources, PerHead& sink, Scale& scale) {
  return {.op = op,
          .shared_kv = true,
          .kv_heads = false,
          .q = {"q", q},
          .sources = sources,
          .sink = {"sink", sink},
          .scale = *scale};
}

Forward MlaSparseFwd(Array q, Array kv, PerQueryList indices, PerQuery length, PerHead sink, Scale scale) {
  const Source keys = LatentSelection({"kv", kv}, {"indices", indices}, {"length", length});
  return OverLatents("mla_sparse_fwd", q, {keys}, sink, scale);
}

Forward CsaFwd(Array q, Array window_kv, PerQuery start, PerQuery stop, Array kv, PerQueryList indices,
                      PerQuery length, PerHead sink, Scale scale) {
  const Source window = LatentSpan({"window_kv", window_kv}, {"start", start}, {"stop", stop});
  const Source keys = LatentSelection({"kv", kv}, {"indices", indices}, {"length", length});
  return OverLatents("csa_fwd", q, {window, keys}, sink, scale);
}

Forward HcaFwd(Array q, Array window_kv, PerQuery start, PerQuery stop, Array kv, PerQuery start2, PerQuery stop2,
                     PerHead sink, Scale scale) {
  const Source window = LatentSpan({"window_kv", window_kv}, {"start", start}, {"stop", stop});
  const Source keys = LatentSpan({"kv", kv}, {"start2", start2}, {"stop2", stop2});
  return OverLatents("hca_fwd", q, {window, keys}, sink, scale);
}

// Both pools are like q, unless the op is one over packed keys.
Forward Dsv4Decode(Array q, Array window_kv, PerQueryList window_indices, PerQuery window_length, Array kv,
                   PerQueryList indices, PerQuery length, PerHead sink, Scale scale, Op op) {
  Source window =
      LatentSelection({"window_kv", window_kv}, {"window_indices", window_indices}, {"window_length", window_length});
  Source keys = LatentSelection({"kv", kv}, {"indices", indices}, {"length", length});
  for (const PackedOp& packed : kPackedOps) {
    if (*op != packed.op) continue;
    window = PackedSelection(window.k, window.from, window.to, packed.sources[0]);
    keys = PackedSelection(keys.k, keys.from, keys.to, packed.sources[1]);
    return OverLatents(packed.op, q, {window, keys}, sink, scale);
  }
  return OverLatents("dsv4_decode", q, {window, keys}, sink, scale);
}

// ---- gradients, over latents

template <int count>
Backward<count> OfLatents(const char* op, bool kv_heads, Array& q, Array& dout, PerRow& lse, PerRow& weight,
                          PerRow& delta, Numbers& resolution, const Source (&sources)[count], Scale& scale) {
  Backward<count> call{.op = op,
                       .shared_kv = true,
                       .kv_heads = kv_heads,
                       .q = {"q", q},
                       .dout = {"do", dout},
                       .lse = {"lse", lse},
                       .weight = {"weight", weight},
                       .delta = {"delta", delta},
                       .resolution = {"resolution", resolution},
                       .sources = {},
                       .scale = *scale};
  for (const Source& source : sources) call.sources.items[call.sources.count++] = source;
  return call;
}

Backward<1> MlaSpanBwd(Array q, Array dout, PerRow lse, PerRow weight, PerRow delta, Numbers resolution, Array kv,
                PerQuery start, PerQuery stop, Scale scale) {
  const Source keys = LatentSpan({"kv", kv}, {"start", start}, {"stop", stop});
  return OfLatents("mla_span_bwd", /*kv_heads=*/true, q, dout, lse, weight, delta, resolution, {keys}, scale);
}

Backward<1> MlaSparseBwd(Array q, Array dout, PerRow lse, PerRow weight, PerRow delta, Numbers resolution, Array kv,
                      PerQueryList indices, PerQuery length, Scale scale) {
  const Source keys = LatentSelection({"kv", kv}, {"indices", indices}, {"length", length});
  return OfLatents("mla_sparse_bwd", /*kv_heads=*/false, q, dout, lse, weight, delta, resolution, {keys}, scale);
}

Backward<2> CsaBwd(Array q, Array dout, PerRow lse, PerRow weight, PerRow delta, Numbers resolution,
                          Array window_kv, PerQuery start, PerQuery stop, Array kv, PerQueryList indices,
                          PerQuery length, Scale scale) {
  const Source window = LatentSpan({"window_kv", window_kv}, {"start", start}, {"stop", stop});
  const Source keys = LatentSelection({"kv", kv}, {"indices", indices}, {"length", length});
  return OfLatents("csa_bwd", /*kv_heads=*/false, q, dout, lse, weight, delta, resolution, {window, keys},
                   scale);
}

Backward<2> HcaBwd(Array q, Array dout, PerRow lse, PerRow weight, PerRow delta, Numbers resolution,
                         Array window_kv, PerQuery start, PerQuery stop, Array kv, PerQuery start2, PerQuery stop2,
                         Scale scale) {
  const Source window = LatentSpan({"window_kv", window_kv}, {"start", start}, {"stop", stop});
  const Source keys = LatentSpan({"kv", kv}, {"start2", start2}, {"stop2", stop2});
  return OfLatents("hca_bwd", /*kv_heads=*/false, q, dout, lse, weight, delta, resolution, {window, keys},
                   scale);
}

// ---- gradients where K and V are apart, or one array that the same kernels read twice

DenseBackward<false> MhaBwd(Array q, Array dout, PerRow lse, PerRow weight, PerRow delta, Array k, Array v,
                              PerQuery start, PerQuery stop, Scale scale) {
  return {.op = "mha_bwd",
          .q = {"q", q},
          .dout = {"do", dout},
          .lse = {"lse", lse},
          .weight = {"weight", weight},
          .delta = {"delta", delta},
          .sources = {{.kind = kSpan, .k = {"k", k}, .v = {"v", v}, .from = {"start", start}, .to = {"stop", stop}}},
          .scale = *scale};
}

DenseBackward<true> MhaBwdSharedKv(Array q, Array dout, PerRow lse, PerRow weight, PerRow delta, Array kv,
                                     PerQuery start, PerQuery stop, Scale scale) {
  return {.op = "mha_bwd",
          .q = {"q", q},
          .dout = {"do", dout},
          .lse = {"lse", lse},
          .weight = {"weight", weight},
          .delta = {"delta", delta},
          .sources = {LatentSpan({"kv", kv}, {"start", start}, {"stop", stop})},
          .scale = *scale};
}

// ---- the lightning indexer

using PerKey = ffi::Buffer<ffi::F32, 2>;
using PerQueryHead = ffi::Buffer<ffi::F32, 3>;

template <typename Call>
Call OverKeys(Array& q, Array& k, PerQueryHead& weights, PerKey& k_scale, PerQuery& start, PerQuery& stop) {
  Call call;
  call.q = {"q", q}, call.k = {"k", k}, call.weights = {"weights", weights}, call.k_scale = {"k_scale", k_scale};
  call.start = {"start", start}, call.stop = {"stop", stop};
  return call;
}

Indexer LightningIndexer(Array q, Array k, PerQueryHead weights, PerKey k_scale, PerQuery start, PerQuery stop) {
  return OverKeys<Indexer>(q, k, weights, k_scale, start, stop);
}

AllScores IndexerScores(Array q, Array k, PerQueryHead weights, PerKey k_scale, PerQuery start, PerQuery stop,
                      ffi::Attr<int64_t, kSkip> skip) {
  AllScores call = OverKeys<AllScores>(q, k, weights, k_scale, start, stop);
  call.skip = *skip;
  return call;
}

Indexer PagedLightningIndexer(Array q, Array pool, PerQueryHead weights, PerQuery table, PerQuery start,
                              PerQuery stop) {
  Indexer call;
  call.q = {"q", q}, call.k = {"pool", pool}, call.weights = {"weights", weights}, call.table = {"table", table};
  call.start = {"start", start}, call.stop = {"stop", stop};
  return call;
}

ScoresAt IndexScoresAt(Array q, Array k, PerQueryHead weights, PerQueryList indices) {
  ScoresAt call;
  call.op = "indexer_scores_at";
  call.q = {"q", q}, call.k = {"k", k}, call.weights = {"weights", weights}, call.indices = {"indices", indices};
  return call;
}

ScoresAtGradient IndexScoresAtGradient(Array q, Array k, PerQueryHead weights, PerQueryList indices,
                                       ffi::Buffer<ffi::F32, 3> dscores) {
  ScoresAtGradient call;
  call.op = "indexer_scores_at_bwd";
  call.q = {"q", q}, call.k = {"k", k}, call.weights = {"weights", weights}, call.indices = {"indices", indices};
  call.scores = {"dscores", dscores};
  return call;
}

TopK ChooseTopK(ffi::Buffer<ffi::F32, 3> scores, PerQuery start, PerQuery stop) {
  TopK call;
  call.scores = {"scores", scores}, call.start = {"start", start}, call.stop = {"stop", stop};
  return call;
}

HeadSummedProbabilities Probabilities(Array q, Array k, PerRow lse, PerQueryList indices, Scale scale) {
  return {.q = {"q", q}, .k = {"k", k}, .lse = {"lse", lse}, .indices = {"indices", indices}, .scale = *scale};
}

// ---- RoPE

template <typename Call>
Call Turned(const char* op, Array& x, PerRow& table, Array& dy) {
  Call call;
  call.op = op, call.x = {"x", x}, call.table = {"table", table}, call.dy = {"dy", dy};
  return call;
}

RopeInPlace Rope(Array x, PerRow table, ffi::Attr<float, kDirection> direction) {
  RopeInPlace call = Turned<RopeInPlace>("rope", x, table, x);
  call.direction = *direction;
  return call;
}

RopeAfterNorm NormRope(Array x, PerRow table, ffi::Attr<float, kEps> eps) {
  RopeAfterNorm call = Turned<RopeAfterNorm>("norm_rope", x, table, x);
  call.eps = *eps;
  return call;
}

RopeAfterNorm NormRopeGradient(Array x, PerRow table, Array dy, ffi::Attr<float, kEps> eps) {
  RopeAfterNorm call = Turned<RopeAfterNorm>("norm_rope_bwd", x, table, dy);
  call.eps = *eps;
  return call;
}

}  // namespace
}  // namespace dsv4_fmha

#pragma GCC visibility push(default)
extern "C" {

DSV4_FMHA_TARGET(mha_fwd, MhaFwd)
DSV4_FMHA_TARGET(mla_span_fwd, MlaSpanFwd)
DSV4_FMHA_TARGET(mla_sparse_fwd, MlaSparseFwd)
DSV4_FMHA_TARGET(csa_fwd, CsaFwd)
DSV4_FMHA_TARGET(hca_fwd, HcaFwd)
DSV4_FMHA_TARGET(dsv4_decode, Dsv4Decode)
DSV4_FMHA_TARGET(mla_span_bwd, MlaSpanBwd)
DSV4_FMHA_TARGET(mla_sparse_bwd, MlaSparseBwd)
DSV4_FMHA_TARGET(csa_bwd, CsaBwd)
DSV4_FMHA_TARGET(hca_bwd, HcaBwd)
DSV4_FMHA_TARGET(mha_bwd, MhaBwd)
DSV4_FMHA_TARGET(mha_bwd_shared_kv, MhaBwdSharedKv)
DSV4_FMHA_TARGET(lightning_indexer, LightningIndexer)
DSV4_FMHA_TARGET(paged_lightning_indexer, PagedLightningIndexer)
DSV4_FMHA_TARGET(indexer_scores, IndexerScores)
DSV4_FMHA_TARGET(indexer_topk, ChooseTopK)
DSV4_FMHA_TARGET(head_summed_probabilities, Probabilities)
DSV4_FMHA_TARGET(indexer_scores_at, IndexScoresAt)
DSV4_FMHA_TARGET(indexer_scores_at_bwd, IndexScoresAtGradient)
DSV4_FMHA_TARGET(rope, Rope)
DSV4_FMHA_TARGET(norm_rope, NormRope)
DSV4_FMHA_TARGET(norm_rope_bwd, NormRopeGradient)

}  // extern "C"
#pragma GCC visibility pop
