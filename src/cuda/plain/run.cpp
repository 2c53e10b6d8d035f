// SPDX-License-Identifier: Apache-2.0
// Forward and backward as a sequence of kernels on the caller's stream: nothing here waits for the
// device, and nothing on the host has to outlive the call, so a call can be captured into a graph.
#include "cuda/plain/run.h"

#include <cstdint>
#include <limits>

#include "base/math.h"
#include "cuda/host/arena.h"
#include "cuda/host/blocks.h"
#include "cuda/host/documents.h"
#include "cuda/host/views.h"
#include "cuda/plain/backward.h"
#include "cuda/plain/forward.h"
#include "cuda/plain/prepare.h"

namespace sagebwd::cuda::plain {
namespace {

using spec::Problem;

/// The workspace of a call, and the parameters that point into it.
struct Space {
  Space(const Problem& p, void* base) : arena(base), blocks(p, kBlock) {
    pitch = round_up(p.d, 16);
    tq = p.b * p.nq, tk = p.b * p.nk;
    forward = p.direction == spec::Direction::forward;
    const Recipe& r = p.recipe;
    if (p.packed()) documents = arena.take<DocumentStart>(p.documents.count + 1);
    const bool mean_v = forward && r.smooth_v;
    if (r.smooth_k || mean_v) {
      mean_part = arena.take<double>(p.hk * blocks.k * p.d);
      mean_counted = arena.take<int>(p.hk * blocks.k);
    }
    if (r.smooth_k) k_mean = arena.take<float>(p.num_sequences() * p.hk * p.d);
    if (mean_v) v_mean = arena.take<float>(p.num_sequences() * p.hk * p.d);
    if (r.smooth_q) q_mean = arena.take<float>(p.h * blocks.q * p.d);
    mean_logit = arena.take<double>(p.h * tq);
    const bool lifted_s = p.lifted(forward ? kMatmulS : kMatmulSRecompute);
    q = operand(p.h, tq, blocks.q, true, lifted_s || (!forward && p.lifted(kMatmulDK)));
    k = operand(p.hk, tk, blocks.k, true,
                lifted_s || r.smooth_q || (!forward && p.lifted(kMatmulDQ)));
    v = operand(p.hk, tk, blocks.k, forward, true);
    if (forward) {
      v_scale = arena.take<float>(p.hk * blocks.k);
      block_max = arena.take<float>(p.h * blocks.q);
    } else {
      dout = operand(p.h, tq, blocks.q, true, true);
      lse2 = arena.take<float>(p.h * tq);
      delta = arena.take<float>(p.h * tq);
    }
  }

  Operand operand(int64_t heads, int64_t tokens, int64_t token_blocks, bool codes, bool values) {
    Operand o{};
    if (codes) o.codes = arena.take<int8_t>(heads * tokens * pitch);
    if (codes) o.scale = arena.take<float>(heads * tokens);
    if (values) o.values = arena.take<float>(heads * tokens * pitch);
    o.poisoned = arena.take<int>(heads * token_blocks);
    return o;
  }

  Arena arena;
  Blocks blocks;
  int64_t pitch, tq, tk;
  bool forward;
  DocumentStart* documents = nullptr;
  double *mean_part = nullptr, *mean_logit = nullptr;
  int* mean_counted = nullptr;
  float *k_mean = nullptr, *v_mean = nullptr, *q_mean = nullptr;
  Operand q{}, k{}, v{}, dout{};
  float *v_scale = nullptr, *block_max = nullptr, *lse2 = nullptr, *delta = nullptr;
};

/// One call on its way: the steps both directions share.
struct Call {
  Call(const Problem& problem, const AttentionArgs& a, void* workspace)
      : p(problem),
        args(a),
        ws(problem, aligned(workspace)),
        tiles(tiles_of(problem)),
        stream(static_cast<cudaStream_t>(a.stream)) {
    batch = {ws.blocks.sequences(p, ws.documents), ws.blocks.q, ws.blocks.k, p.dtype};
  }

  /// Mean of K or V, where `to` asks for it.
  void mean(const TensorView& x, float* to) const {
    if (to == nullptr) return;
    launch_mean({.batch = batch,
                 .heads = static_cast<int>(p.hk),
                 .d = static_cast<int>(p.d),
                 .x = input(x),
                 .part = ws.mean_part,
                 .counted = ws.mean_counted,
                 .mean = to},
                stream);
  }

  TokenJob tokens(const TensorView& x, bool queries, const Operand& to) const {
    return {.batch = batch,
            .queries = queries,
            .heads = static_cast<int>(queries ? p.h : p.hk),
            .d = static_cast<int>(p.d),
            .pitch = static_cast<int>(ws.pitch),
            .tokens = queries ? ws.tq : ws.tk,
            .x = input(x),
            .mean = nullptr,
            .tile = queries ? tiles.q : tiles.k,
            .scale_by_tile = p.recipe.scheme == Scheme::paper,
            .tile_mean = nullptr,
            .to = to,
            .tile_scale = nullptr};
  }
  void queries_and_keys() const {
    TokenJob q = tokens(args.q, true, ws.q), k = tokens(args.k, false, ws.k);
    q.tile_mean = ws.q_mean;
    k.mean = ws.k_mean;
    launch_tokens(q, stream);
    launch_tokens(k, stream);
  }

  RowJob rows() const {
    RowJob job{};
    job.batch = batch;
    job.h = static_cast<int>(p.h), job.d = static_cast<int>(p.d);
    job.group = group();
    job.tq = ws.tq;
    job.scale = p.scale;
    job.q = input(args.q);
    job.k_mean = ws.k_mean;
    job.mean_logit = ws.mean_logit;
    return job;
  }

  Params params() const {
    const Recipe& r = p.recipe;
    return {.batch = batch,
            .mask = mask_of(p),
            .h = static_cast<int>(p.h),
            .hk = static_cast<int>(p.hk),
            .group = group(),
            .d = static_cast<int>(p.d),
            .pitch = static_cast<int>(ws.pitch),
            .tq = ws.tq,
            .tk = ws.tk,
            .tile_q = tiles.q,
            .tile_k = tiles.k,
            .scheme = r.scheme,
            .rounding = r.rounding,
            .seed = r.seed,
            .lifted = r.high_precision,
            .scale = p.scale,
            .p_levels = static_cast<float>(tiles.p_levels),
            .exact_inputs = p.dtype != Dtype::f32,
            .q = ws.q,
            .k = ws.k,
            .q_mean = ws.q_mean,
            .k_mean = ws.k_mean,
            .mean_logit = ws.mean_logit};
  }

  int group() const { return p.hk > 0 ? static_cast<int>(p.group()) : 1; }

  const Problem& p;
  const AttentionArgs& args;
  Space ws;
  backend::Tiles tiles;
  cudaStream_t stream;
  Batch batch{};
};

}  // namespace

backend::Tiles tiles_of(const Problem& p) { return backend::any_tiles(p.recipe, 255); }

size_t workspace_of(const Problem& p) { return Space(p, nullptr).arena.used() + kDeviceAlign; }

void forward(const Problem& p, const ForwardArgs& args, void* workspace) {
  const Call call(p, args, workspace);
  const Space& ws = call.ws;
  write_documents(p, ws.blocks, ws.documents, call.stream);
  call.mean(args.k, ws.k_mean);
  call.mean(args.v, ws.v_mean);
  call.queries_and_keys();

  TokenJob values = call.tokens(args.v, false, ws.v);
  values.scale_by_tile = true;
  values.mean = ws.v_mean;
  values.tile_scale = ws.v_scale;
  launch_tokens(values, call.stream);
  launch_rows(call.rows(), call.stream);

  ForwardParams params{};
  static_cast<Params&>(params) = call.params();
  params.v = ws.v;
  params.v_scale = ws.v_scale;
  params.v_mean = ws.v_mean;
  params.pv16_tiles = p.recipe.pv16_tiles < 0 || p.lifted(kMatmulO)
                          ? std::numeric_limits<int64_t>::max()
                          : p.recipe.pv16_tiles;
  params.o = output(args.o);
  params.lse = stats(args.lse);
  params.block_max = ws.block_max;
  launch_forward(params, call.stream);
  if (args.max_logit != nullptr)
    launch_max({.batch = call.batch,
                .h = static_cast<int>(p.h),
                .block_max = ws.block_max,
                .max_logit = args.max_logit},
               call.stream);
}

void backward(const Problem& p, const BackwardArgs& args, void* workspace) {
  const Call call(p, args, workspace);
  const Space& ws = call.ws;
  write_documents(p, ws.blocks, ws.documents, call.stream);
  call.mean(args.k, ws.k_mean);
  call.queries_and_keys();
  launch_tokens(call.tokens(args.v, false, ws.v), call.stream);
  launch_tokens(call.tokens(args.dout, true, ws.dout), call.stream);

  RowJob rows = call.rows();
  rows.lse2 = ws.lse2, rows.delta = ws.delta;
  rows.lse = stats(args.lse), rows.dlse = stats(args.dlse);
  rows.o = input(args.o), rows.dout = input(args.dout);
  launch_rows(rows, call.stream);

  BackwardParams params{};
  static_cast<Params&>(params) = call.params();
  params.v = ws.v, params.dout = ws.dout;
  params.lse2 = ws.lse2, params.delta = ws.delta;
  params.dlse = stats(args.dlse);
  params.partial_kv = p.partial_kv;
  params.dq = output(args.dq), params.dk = output(args.dk), params.dv = output(args.dv);
  launch_backward(params, call.stream);
}

}  // namespace sagebwd::cuda::plain
