// SPDX-License-Identifier: Apache-2.0
// What forward and backward of either architecture share on the host.
#pragma once

#include "cuda/host/check.h"
#include "cuda/host/documents.h"
#include "cuda/host/views.h"
#include "cuda/tuned/centres.h"
#include "cuda/tuned/operands.h"
#include "cuda/tuned/plan.h"
#include "cuda/tuned/workspace.h"
#include "numerics/octaves.h"
#include "numerics/rotate.h"
#include "spec/codes.h"

namespace sagebwd::cuda::tuned {

/// One call on its way: its sizes, its stream, and the steps both directions share.
struct Call {
  Call(const spec::Problem& problem, const AttentionArgs& a)
      : p(problem),
        plan(problem),
        args(a),
        stream(static_cast<cudaStream_t>(a.stream)),
        saved(problem, a.codes) {}

  bool reads_codes() const { return p.has_codes && p.direction == spec::Direction::backward; }
  const int8_t* q8(const SharedSpace& ws) const { return plan.q8_is_saved ? saved.q8() : ws.q8; }
  const int8_t* k8(const SharedSpace& ws) const { return plan.k8_is_saved ? saved.k8() : ws.k8; }

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

  /// What has to be zero before the first kernel that adds to it, and `more`.
  Zeros zeros(const SharedSpace& ws, const Zeros::Piece& more = {}) const {
    return {{{reinterpret_cast<uint32_t*>(ws.zeros),
              static_cast<int64_t>(ws.zero_bytes / sizeof(uint32_t))},
             more}};
  }

  SavedCodes codes() const {
    return {.queries = p.b * p.nq,
            .keys = p.b * p.nk,
            .key_blocks = saved.layout.key_blocks,
            .q8 = saved.q8(),
            .k8 = saved.k8(),
            .v8 = saved.v8(),
            .q_scale = saved.q_scale(),
            .k_scale = saved.k_scale(),
            .v_scale = saved.v_scale()};
  }

  /// The centres of K, and of V; not in `paper`.
  Centres centres(const SharedSpace& ws) const {
    return p.has_codes ? Centres{saved.centre8(), saved.centre_scale(), saved.layout.key_blocks}
                       : ws.centres;
  }
  Centres value_centres(const SharedSpace& ws) const {
    return p.has_codes ? Centres{saved.v_centre8(), saved.v_centre_scale(), saved.layout.key_blocks}
                       : ws.value_centres;
  }
  /// Makes them, unless the forward has.
  void make_centres(const SharedSpace& ws) const {
    if (reads_codes()) return;
    launch_centres({.seq = sequences(ws),
                    .d = static_cast<int>(p.d),
                    .hk = static_cast<int>(p.hk),
                    .octaves = numerics::octaves_of(p.nk),
                    .rotation = rotation(),
                    .zero = !p.recipe.smooth_k,
                    .k = input(args.k),
                    .v = input(args.v),
                    .of_k = centres(ws),
                    .of_v = value_centres(ws)},
                   p.dtype, plan.padded_d, stream);
  }

  /// The table of documents, which every other kernel of the call reads.
  void start(const SharedSpace& ws) const { write_documents(p, plan.blocks, ws.documents, stream); }

  /// What both directions say of their operands.
  void describe(OperandJob& job, const SharedSpace& ws, Item* items,
                const Zeros::Piece& more = {}) const {
    job.zeros = zeros(ws, more);
    job.seq = sequences(ws);
    job.d = static_cast<int>(p.d), job.padded_d = plan.padded_d;
    job.h = static_cast<int>(p.h), job.hk = static_cast<int>(p.hk);
    job.group = static_cast<int>(p.group());
    job.q_blocks = plan.q_blocks, job.k_blocks = plan.k_blocks;
    job.tq = plan.tq, job.tk = plan.tk;
    job.backward = p.direction == spec::Direction::backward, job.makes_values = true;
    job.rotation = rotation();
    job.items = items, job.next = ws.next;
    job.q8 = ws.q8, job.k8 = ws.k8, job.logit_scale = p.scale;
    if (p.has_codes) job.saved = codes();
    if (!reads_codes()) job.k = input(args.k), job.v = input(args.v), job.q = input(args.q);
    if (p.recipe.scheme != Scheme::paper)
      job.centres = centres(ws), job.value_centres = value_centres(ws);
    else if (p.recipe.smooth_k)
      job.k_mean = {ws.k_mean, ws.k_part, ws.k_part_tokens, ws.k_arrived, ws.k_turned};
  }

  /// Channels that the rotation of Q and K mixes; 0: none.
  int rotation() const {
    return p.recipe.rotate ? numerics::rotation_block(static_cast<int>(p.d)) : 0;
  }

  const spec::Problem& p;
  Plan plan;
  const AttentionArgs& args;
  cudaStream_t stream;
  spec::CodesView saved;
};

}  // namespace sagebwd::cuda::tuned
