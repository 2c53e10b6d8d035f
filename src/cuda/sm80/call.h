// SPDX-License-Identifier: Apache-2.0
// What forward and backward share on the host, here and in sm90.
#pragma once

#include "backend/implementation.h"
#include "cuda/host/check.h"
#include "cuda/host/documents.h"
#include "cuda/host/views.h"
#include "cuda/quantize/quantize.h"
#include "cuda/sm80/plan.h"
#include "cuda/sm80/workspace.h"
#include "numerics/rotate.h"
#include "spec/codes.h"

namespace sagebwd::cuda::sm80 {

/// One call on its way: its sizes, its stream, and the steps both directions share.
struct Call {
  Call(const spec::Problem& problem, const AttentionArgs& a, const backend::Tiles& t)
      : p(problem),
        plan(problem),
        args(a),
        tiles(t),
        stream(static_cast<cudaStream_t>(a.stream)),
        saved(problem, a.codes) {}

  bool reads_codes() const { return p.has_codes && p.direction == spec::Direction::backward; }
  const int8_t* q8(const SharedSpace& ws) const { return plan.q8_is_saved ? saved.q8() : ws.q8; }
  const int8_t* k8(const SharedSpace& ws) const { return plan.k8_is_saved ? saved.k8() : ws.k8; }

  float p_levels() const { return static_cast<float>(tiles.p_levels); }

  Sequences sequences(const SharedSpace& ws) const {
    return plan.blocks.sequences(p, ws.documents);
  }

  UncoveredJob::Rows rows_of(const TensorView& x, bool queries) const {
    return {output(x), queries ? p.nq : p.nk, static_cast<int>(queries ? p.h : p.hk), queries};
  }
  /// Results of tokens that no document holds. With offsets on the host there are none.
  void finish(const SharedSpace& ws, const UncoveredJob::Rows (&rows)[3],
              const StridedStats& lse) const {
    if (!p.packed() || !p.documents.on_device) return;
    launch_uncovered({.documents = ws.documents,
                      .count = plan.num_sequences,
                      .d = static_cast<int>(p.d),
                      .rows = {rows[0], rows[1], rows[2]},
                      .lse = lse},
                     stream);
  }

  /// Says what both directions make, and what has to be zero before, in the backward also `lists`.
  OperandJob start(const SharedSpace& ws, const Zeros::Piece& lists = {}) const {
    write_documents(p, plan.blocks, ws.documents, stream);
    OperandJob job{};
    Zeros& zeros = job.zeros;
    zeros.piece[0] = {reinterpret_cast<uint32_t*>(ws.zeros),
                      static_cast<int64_t>(ws.zero_bytes / sizeof(uint32_t))};
    zeros.piece[1] = lists;
    job.seq = sequences(ws);
    job.d = static_cast<int>(p.d), job.padded_d = plan.padded_d;
    job.h = static_cast<int>(p.h), job.hk = static_cast<int>(p.hk);
    job.group = static_cast<int>(p.group());
    job.q_blocks = plan.q_blocks, job.k_blocks = plan.k_blocks;
    job.tq = plan.tq, job.tk = plan.tk;
    job.scheme = p.recipe.scheme;
    job.k_per_token = p.recipe.k_per_token;
    job.rotation = p.recipe.rotate ? numerics::rotation_block(static_cast<int>(p.d)) : 0;
    job.folds_v = spec::folds_v(p.recipe);
    // In `vectorwise` tiles share the scales of their block.
    job.tile_k = p.recipe.scheme == Scheme::paper ? tiles.k : kBlock;
    job.q_tokens = tiles.q, job.k_tokens = tiles.k;
    job.items = static_cast<Item*>(ws.items), job.next = ws.next;
    if (p.has_codes)
      job.saved = {.queries = p.b * p.nq,
                   .keys = p.b * p.nk,
                   .key_blocks = saved.layout.key_blocks,
                   .q8 = saved.q8(),
                   .k8 = saved.k8(),
                   .v8 = saved.v8(),
                   .q_scale = saved.q_scale(),
                   .mean_logit = saved.mean_logit(),
                   .k_scale = saved.k_scale(),
                   .v_scale = saved.v_scale(),
                   .v_mean = saved.v_mean()};
    if (!reads_codes()) {
      job.k = input(args.k), job.v = input(args.v), job.q = input(args.q);
      if (p.recipe.smooth_k)
        job.k_mean = {ws.k_mean, ws.k_part, ws.k_part_tokens, ws.k_arrived, ws.k_turned};
      if (p.recipe.smooth_v && ws.v_mean != nullptr)
        job.v_mean = {ws.v_mean, ws.v_part, ws.v_part_tokens, ws.v_arrived};
    }
    job.k8 = ws.k8, job.k_scale = ws.k_scale;
    job.q8 = ws.q8, job.logit_scale = p.scale;
    if (p.has_codes && !reads_codes()) {
      job.k_mean.saved = saved.k_mean(), job.v_mean.saved = saved.v_mean();
      // Sequences without keys, and recipes without smoothing, have means of zero. Nobody else
      // writes those.
      const bool all_are_made =
          job.k_mean.mean != nullptr && job.v_mean.mean != nullptr && !p.packed() && p.nk > 0;
      const int64_t words = p.num_sequences() * p.hk * p.d;
      if (!all_are_made) {
        zeros.piece[1] = {reinterpret_cast<uint32_t*>(saved.k_mean()), words};
        zeros.piece[2] = {reinterpret_cast<uint32_t*>(saved.v_mean()), words};
      }
    }
    return job;
  }

  const spec::Problem& p;
  Plan plan;
  const AttentionArgs& args;
  backend::Tiles tiles;
  cudaStream_t stream;
  spec::CodesView saved;
};

}  // namespace sagebwd::cuda::sm80
