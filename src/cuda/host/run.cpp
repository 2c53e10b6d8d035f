// SPDX-License-Identifier: Apache-2.0
// Forward and backward as a sequence of kernels on the caller's stream: nothing here waits for the
// device, and nothing on the host has to outlive the call, so a call can be captured into a graph.
#include <algorithm>
#include <cstdint>

#include "cuda/host/check.h"
#include "cuda/host/plan.h"
#include "cuda/quantize/quantize.h"
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/fwd/fwd.h"

namespace sagebwd::cuda {
namespace {

using spec::Problem;

constexpr int64_t kAllTiles = int64_t{1} << 60;

/// Leading key tiles whose P·V runs in 16 bit.
int64_t pv16_tiles(const Problem& p) {
  return p.recipe.pv16_tiles < 0 || p.lifted(kMatmulO) ? kAllTiles : p.recipe.pv16_tiles;
}

/// `bytes`: what loads and stores of the rows want to be aligned to.
Strided strided(const TensorView& t, uintptr_t bytes) {
  const auto aligned = [&](int64_t stride) {
    return stride * 2 % static_cast<int64_t>(bytes) == 0;
  };
  return {t.data, t.stride[0], t.stride[1], t.stride[2],
          reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && aligned(t.stride[0]) &&
              aligned(t.stride[1]) && aligned(t.stride[2])};
}
Strided input(const TensorView& t) { return strided(t, 16); }
Strided output(const TensorView& t) { return strided(t, 4); }

StridedStats stats(const StatsView& s) { return {s.data, s.stride[0], s.stride[1], s.stride[2]}; }

MaskParams mask(const Problem& p) { return {p.align == Align::bottom_right, p.left, p.right}; }

/// Pieces of the workspace that both directions have.
struct SharedSpace {
  SharedSpace(const Problem& p, const Plan& plan, Arena& arena) {
    documents = arena.take<DocumentStart>(static_cast<int64_t>(plan.documents.size()));
    mean_part = arena.take<double>(p.hk * plan.k_blocks * plan.padded_d);
    mean_tokens = arena.take<int>(p.hk * plan.k_blocks);
    k_mean = arena.take<float>(plan.num_sequences * p.hk * plan.padded_d);
    q8 = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    k8 = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
    k_scale = arena.take<KeyScale>(p.hk * plan.tk);
    v16 = arena.take<uint16_t>(p.hk * plan.tk * plan.padded_d);
  }
  DocumentStart* documents;
  double* mean_part;
  int* mean_tokens;
  float* k_mean;
  KeyScale* k_scale;
  int8_t *q8, *k8;
  uint16_t* v16;
};

struct ForwardSpace : SharedSpace {
  ForwardSpace(const Problem& p, const Plan& plan, Arena& arena) : SharedSpace(p, plan, arena) {
    v_mean = arena.take<float>(plan.num_sequences * p.hk * plan.padded_d);
    v8t = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
    v_scale = arena.take<float>(p.hk * plan.tk / kGroup);
    lane = arena.take<float>(p.h * plan.tq);
    mean_logit = arena.take<float>(p.h * plan.tq);
    max_logit = arena.take<uint32_t>(plan.num_sequences * p.h);
  }
  float *v_mean, *v_scale, *lane, *mean_logit;
  int8_t* v8t;
  uint32_t* max_logit;
};

struct BackwardSpace : SharedSpace {
  BackwardSpace(const Problem& p, const Plan& plan, Arena& arena) : SharedSpace(p, plan, arena) {
    q8t = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    k8t = arena.take<int8_t>(p.hk * plan.tk * plan.padded_d);
    do8t = arena.take<int8_t>(p.h * plan.tq * plan.padded_d);
    do16 = arena.take<uint16_t>(p.h * plan.tq * plan.padded_d);
    row = arena.take<QueryRow>(p.h * plan.tq);
    exponent = arena.take<QueryExponent>(p.h * plan.tq);
    gradient = arena.take<QueryGradient>(p.h * plan.tq);
    dq_sum = fused(p) ? arena.take<float>(dq_sums(p, plan)) : nullptr;
  }
  int8_t *q8t, *k8t, *do8t;
  uint16_t* do16;
  QueryRow* row;
  QueryExponent* exponent;
  QueryGradient* gradient;
  float* dq_sum;
  static int64_t dq_sums(const Problem& p, const Plan& plan) {
    return p.h * plan.tq * plan.padded_d;
  }
};

/// The workspace has a smaller alignment than the kernels want.
void* aligned(void* workspace) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(workspace);
  return reinterpret_cast<void*>((at + kDeviceAlign - 1) / kDeviceAlign * kDeviceAlign);
}

/// One call on its way: its sizes, its stream, and the steps both directions share.
struct Call {
  Call(const Problem& problem, const AttentionArgs& a)
      : p(problem),
        plan(problem),
        args(a),
        tiles(tiles_of(problem)),
        stream(static_cast<cudaStream_t>(a.stream)) {}

  float p_levels() const { return static_cast<float>(tiles.p_levels); }

  Sequences sequences(const SharedSpace& ws) const {
    Sequences s{};
    s.count = plan.num_sequences;
    s.nq = p.nq, s.nk = p.nk;
    s.q_blocks = static_cast<int>((p.nq + kBlock - 1) / kBlock);
    s.k_blocks = static_cast<int>((p.nk + kBlock - 1) / kBlock);
    s.documents = p.packed() ? ws.documents : nullptr;
    return s;
  }

  void write_documents(const SharedSpace& ws) const {
    const int total = static_cast<int>(plan.documents.size());
    for (int first = 0; first < total; first += kDocumentsPerLaunch) {
      const int count = std::min(kDocumentsPerLaunch, total - first);
      DocumentChunk chunk{};
      std::copy_n(plan.documents.begin() + first, count, chunk.start);
      launch_documents(chunk, ws.documents + first, count, stream);
    }
  }

  /// Mean of K or V, or zeros where the recipe does not smooth.
  void mean(const SharedSpace& ws, const TensorView& x, bool smooth, float* to) const {
    const int64_t count = plan.num_sequences * p.hk * plan.padded_d;
    if (count == 0) return;
    if (!smooth) {
      SAGE_CUDA(cudaMemsetAsync(to, 0, static_cast<size_t>(count) * sizeof(float), stream));
      return;
    }
    launch_mean({.seq = sequences(ws),
                 .d = static_cast<int>(p.d),
                 .padded_d = plan.padded_d,
                 .hk = static_cast<int>(p.hk),
                 .num_blocks = plan.k_blocks,
                 .x = input(x),
                 .part = ws.mean_part,
                 .tokens = ws.mean_tokens,
                 .mean = to},
                p.dtype, stream);
  }

  TokenJob query_job(const SharedSpace& ws, const TensorView& x) const {
    return {.seq = sequences(ws),
            .d = static_cast<int>(p.d),
            .padded_d = plan.padded_d,
            .heads = static_cast<int>(p.h),
            .num_blocks = plan.q_blocks,
            .tokens = plan.tq,
            .x = input(x),
            .tokens_per_scale = p.recipe.scheme == Scheme::paper ? tiles.q : 1};
  }
  TokenJob key_job(const SharedSpace& ws, const TensorView& x) const {
    return {.seq = sequences(ws),
            .d = static_cast<int>(p.d),
            .padded_d = plan.padded_d,
            .heads = static_cast<int>(p.hk),
            .num_blocks = plan.k_blocks,
            .tokens = plan.tk,
            .x = input(x),
            .tokens_per_scale = p.recipe.scheme == Scheme::paper ? tiles.k : 1};
  }

  /// Codes of K, and of Q with what its rows need.
  void keys(const SharedSpace& ws, int8_t* transposed) const {
    KeyJob job{key_job(ws, args.k), ws.k_scale};
    job.codes = ws.k8, job.codes_t = transposed, job.mean = ws.k_mean;
    job.for_turned = transposed != nullptr && fused(p);
    launch_keys(job, p.dtype, stream);
  }
  QueryJob queries(const SharedSpace& ws) const {
    QueryJob job{};
    static_cast<TokenJob&>(job) = query_job(ws, args.q);
    job.codes = ws.q8;
    job.group = static_cast<int>(p.group());
    job.logit_scale = p.scale;
    job.k_mean = p.recipe.smooth_k ? ws.k_mean : nullptr;
    return job;
  }

  const Problem& p;
  Plan plan;
  const AttentionArgs& args;
  dispatch::Tiles tiles;
  cudaStream_t stream;
};

}  // namespace

size_t workspace_of(const Problem& p) {
  const Plan plan(p);
  Arena arena(nullptr);
  if (p.direction == spec::Direction::forward)
    ForwardSpace(p, plan, arena);
  else
    BackwardSpace(p, plan, arena);
  return arena.used() + kDeviceAlign;
}

void forward(const Problem& p, const ForwardArgs& args, void* workspace) {
  const Call call(p, args);
  const Plan& plan = call.plan;
  Arena arena(aligned(workspace));
  const ForwardSpace ws(p, plan, arena);
  if (p.h == 0 || plan.num_sequences == 0) return;
  call.write_documents(ws);
  call.mean(ws, args.k, p.recipe.smooth_k, ws.k_mean);
  call.mean(ws, args.v, p.recipe.smooth_v, ws.v_mean);
  call.keys(ws, nullptr);

  ValueJob values{call.key_job(ws, args.v), ws.v_scale, pv16_tiles(p)};
  values.tokens_per_scale = call.tiles.k;
  values.codes_t = ws.v8t, values.raw = ws.v16, values.mean = ws.v_mean;
  launch_values(values, p.dtype, call.stream);

  QueryJob queries = call.queries(ws);
  queries.lane = ws.lane, queries.mean_logit = ws.mean_logit;
  launch_queries(queries, p.dtype, call.stream);

  const int64_t rows = plan.num_sequences * p.h;
  if (args.max_logit != nullptr)
    SAGE_CUDA(cudaMemsetAsync(ws.max_logit, 0, static_cast<size_t>(rows) * sizeof(uint32_t),
                              call.stream));
  const ForwardParams params{.seq = call.sequences(ws),
                             .mask = mask(p),
                             .d = static_cast<int>(p.d),
                             .group = static_cast<int>(p.group()),
                             .tq = plan.tq,
                             .tk = plan.tk,
                             .q8 = ws.q8,
                             .lane = ws.lane,
                             .q_mean_logit = ws.mean_logit,
                             .k8 = ws.k8,
                             .k_scale = ws.k_scale,
                             .v8t = ws.v8t,
                             .v_scale = ws.v_scale,
                             .v16 = ws.v16,
                             .v_mean = ws.v_mean,
                             .pv16_tiles = pv16_tiles(p),
                             .p_levels = call.p_levels(),
                             .p_unit = 1.0f / call.p_levels(),
                             .o = output(args.o),
                             .lse = stats(args.lse),
                             .max_logit = args.max_logit != nullptr ? ws.max_logit : nullptr};
  sm80::launch_forward(params, p.dtype, plan.padded_d, call.tiles.k, plan.q_blocks,
                       static_cast<int>(p.h), call.stream);
  if (args.max_logit != nullptr) launch_decode_max(ws.max_logit, args.max_logit, rows, call.stream);
}

void backward(const Problem& p, const BackwardArgs& args, void* workspace) {
  const Call call(p, args);
  const Plan& plan = call.plan;
  Arena arena(aligned(workspace));
  const BackwardSpace ws(p, plan, arena);
  if (p.h == 0 || plan.num_sequences == 0) return;
  call.write_documents(ws);
  call.mean(ws, args.k, p.recipe.smooth_k, ws.k_mean);
  call.keys(ws, ws.k8t);

  // At d 64 the kernel takes V and dO as they are, if their rows are aligned.
  const bool direct = fused(p) && p.d == 64 && input(args.v).vector && input(args.dout).vector;
  if (!direct) {
    ValueJob values{call.key_job(ws, args.v), nullptr, 0};
    values.raw = ws.v16;
    launch_values(values, p.dtype, call.stream);
  }

  QueryJob queries = call.queries(ws);
  queries.codes_t = ws.q8t, queries.row = ws.row, queries.lse = stats(args.lse);
  launch_queries(queries, p.dtype, call.stream);

  DoutJob dout{};
  static_cast<TokenJob&>(dout) = call.query_job(ws, args.dout);
  dout.codes_t = ws.do8t, dout.raw = direct ? nullptr : ws.do16;
  dout.o = input(args.o), dout.dlse = stats(args.dlse);
  dout.row = ws.row, dout.exponent = ws.exponent, dout.gradient = ws.gradient;
  launch_dout(dout, p.dtype, call.stream);

  const BackwardParams params{.seq = call.sequences(ws),
                              .mask = mask(p),
                              .d = static_cast<int>(p.d),
                              .h = static_cast<int>(p.h),
                              .hk = static_cast<int>(p.hk),
                              .group = static_cast<int>(p.group()),
                              .tq = plan.tq,
                              .tk = plan.tk,
                              .scale = p.scale,
                              .p_levels = call.p_levels(),
                              .p_unit = 1.0f / call.p_levels(),
                              .q8 = ws.q8,
                              .q8t = ws.q8t,
                              .q_row = ws.row,
                              .q_exponent = ws.exponent,
                              .q_gradient = ws.gradient,
                              .k8 = ws.k8,
                              .k8t = ws.k8t,
                              .k_scale = ws.k_scale,
                              .v16 = ws.v16,
                              .do16 = ws.do16,
                              .direct = direct,
                              .v = input(args.v),
                              .dout = input(args.dout),
                              .do8t = ws.do8t,
                              .dq_sum = ws.dq_sum,
                              .k_mean = ws.k_mean,
                              .dlse = stats(args.dlse),
                              .partial_kv = p.partial_kv,
                              .dq = output(args.dq),
                              .dk = output(args.dk),
                              .dv = output(args.dv),
                              .dq_chunks = input(args.dq).vector};
  if (ws.dq_sum != nullptr)
    SAGE_CUDA(cudaMemsetAsync(ws.dq_sum, 0,
                              static_cast<size_t>(BackwardSpace::dq_sums(p, plan)) * sizeof(float),
                              call.stream));
  sm80::launch_backward(params, p.dtype, p.recipe.scheme, plan.padded_d, plan.q_blocks,
                        plan.k_blocks, call.stream);
}

}  // namespace sagebwd::cuda
