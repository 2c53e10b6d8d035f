// SPDX-License-Identifier: Apache-2.0
// Forward and backward as a sequence of kernels on the caller's stream: nothing here waits for the
// device, and nothing on the host has to outlive the call, so a call can be captured into a graph.
#include "cuda/sm90/run.h"

#include <algorithm>

#include "cuda/host/arena.h"
#include "cuda/host/device.h"
#include "cuda/host/tensor_map.h"
#include "cuda/lists/job.h"
#include "cuda/sm90/bwd/bwd.h"
#include "cuda/sm90/bwd/operands.h"
#include "cuda/sm90/fwd/fwd.h"
#include "cuda/sm90/quantize/codes.h"
#include "cuda/tuned/max_logit.h"
#include "cuda/tuned/query_sums.h"

namespace sagebwd::cuda::sm90 {

using spec::Problem;
using tuned::Call;

/// Whether some queries see more keys than others, as under a causal mask.
bool is_uneven(const Problem& p) { return p.left < 0 && p.right >= 0; }

/// Query heads whose pieces of the forward are done side by side, so that what comes last is short:
/// as many as have their keys and values of one sequence in a part of the second-level cache. Where
/// all pieces are equally long, one by one, because then more thread blocks read the same keys.
int heads_together(const Problem& p, const Plan& plan) {
  if (!is_uneven(p)) return 1;
  constexpr int64_t kBytes = 16 << 20;
  const int64_t keys = plan.tk / plan.num_sequences,
                heads = std::max<int64_t>(kBytes / std::max<int64_t>(2 * keys * p.d, 1), 1);
  return static_cast<int>(std::min(heads * p.group(), p.h));
}

/// Key heads, of all sequences, that the backward visits side by side at its end. That helps where
/// some keys have more queries than others. Packed sequences differ in their blocks, too.
int mixed_heads(const Problem& p, const Plan& plan) {
  if (p.packed() || !is_uneven(p)) return 0;
  // As many as run at the same time: more would only compete for the cache.
  const int64_t each = plan.k_blocks / plan.num_sequences,
                running = (multiprocessors() + each - 1) / each;
  return static_cast<int>(std::min(running, p.hk * p.b));
}

/// The backward reads codes. Where the caller has saved none, it makes them first, as the forward
/// does.
Problem with_codes(Problem p) {
  p.has_codes = true;
  return p;
}
Problem making_codes(Problem p) {
  p.direction = spec::Direction::forward, p.has_codes = true;
  return p;
}

CodesJob codes_job(const Call& call, const tuned::SharedSpace& ws, const CentreRows& centre_rows,
                   tuned::Item* items) {
  CodesJob job{};
  call.describe(job, ws, items);
  job.centre_rows = centre_rows, job.centres_are_zero = !call.p.recipe.smooth_k;
  return job;
}

size_t workspace_of(const Problem& p) {
  Arena arena(nullptr);
  if (p.direction == spec::Direction::forward) {
    ForwardSpace(p, Plan(p), arena);
  } else {
    if (!p.has_codes) CodesSpace(making_codes(p), Plan(p), arena);
    const Problem read = with_codes(p);
    BackwardSpace(read, Plan(read), arena);
  }
  return arena.used() + kDeviceAlign;
}

void forward(const Problem& p, const ForwardArgs& args, void* workspace) {
  const Call call(p, args);
  const Plan& plan = call.plan;
  Arena arena(aligned(workspace));
  const ForwardSpace ws(p, plan, arena);
  if (plan.num_sequences == 0) return;
  call.start(ws);
  CodesJob job = codes_job(call, ws, ws.centre_rows, ws.items);
  // Before the operands, because the kernels from there on start early, one after the other.
  if (p.has_lists())
    launch_key_lists(list_job(p, job.seq, plan.tq, plan.tk, kBlock, listed_keys(p)), ws.lists,
                     call.stream);
  job.v8t = ws.v8t, job.numbers = ws.numbers, job.logit_factor = ws.logit_factor;
  job.value_columns = ws.value_columns;
  launch_codes(job, p.dtype, call.stream);

  const int d = plan.padded_d, queries = p.has_lists() ? kListedForwardQueries : kForwardQueries,
            keys = p.has_lists() ? kListedForwardKeys : kForwardKeys;
  const ForwardParams params{
      .q8 = byte_matrix(call.q8(ws), p.h * plan.tq, d, queries),
      .k8 = byte_matrix(call.k8(ws), p.hk * plan.tk, d, keys),
      .v8t = byte_matrix(ws.v8t, p.hk * plan.tk / kSlab * d, kSlab, keys / kSlab * d),
      .seq = job.seq,
      .mask = mask_of(p),
      .h = job.h,
      .group = job.group,
      .q_blocks = plan.q_blocks,
      .heads_together = heads_together(p, plan),
      .tq = plan.tq,
      .tk = plan.tk,
      .logit_factor = ws.logit_factor,
      .centre8 = byte_matrix(ws.centre_rows.codes, plan.num_sequences * p.hk * kCentreRows, d,
                             kCentreRows),
      .centre_scale = ws.centre_rows.scale,
      .value_centres =
          byte_matrix(ws.value_columns.codes, plan.num_sequences * p.hk * d, kCentreRows * 2, d),
      .value_centre_scale = ws.value_columns.scale,
      .numbers = ws.numbers,
      .o = output(args.o),
      .o_chunks = input(args.o).vector,
      .lse = stats(args.lse),
      .max_logit = args.max_logit != nullptr ? ws.max_logit : nullptr,
      .next = ws.tickets};
  if (p.has_lists())
    launch_listed_forward({params, ws.lists, listed_keys(p) == kBlock}, p.dtype, call.stream);
  else
    launch_forward(params, p.dtype, d, call.stream);
  call.finish(ws, {call.rows_of(args.o, true)}, stats(args.lse));
  if (args.max_logit != nullptr)
    tuned::launch_decode_max(ws.max_logit, args.max_logit, plan.num_sequences * p.h, call.stream);
}

void make_codes(const Problem& p, const AttentionArgs& args, const CodesSpace& ws) {
  const Call call(p, args);
  call.start(ws);
  CodesJob job = codes_job(call, ws, ws.centre_rows, ws.items);
  job.k8 = job.q8 = nullptr;
  launch_codes(job, p.dtype, call.stream);
}

void backward_of_codes(const Problem& p, const BackwardArgs& args, Arena& arena,
                       const CodesSpace* made) {
  const Call call(p, args);
  const Plan& plan = call.plan;
  const BackwardSpace ws(p, plan, arena);
  if (plan.num_sequences == 0) return;
  if (made != nullptr) make_codes(making_codes(p), args, *made);
  call.start(ws);
  const Parts& parts = ws.parts;
  // Where tokens of a head lie side by side dO needs no copy. In packed sequences others lie behind
  // the last query, and they might hold NaN.
  const Strided dout = input(args.dout);
  CUtensorMap do16;
  const bool is_given = !p.packed() && dout.token == p.d && dout.head > 0 &&
                        (p.b == 1 || dout.batch > 0) &&
                        token_map(do16, dout, p.b, p.h, p.nq, static_cast<int>(p.d),
                                  backward_queries(static_cast<int>(p.d)));
  if (!is_given)
    do16 = panel_matrix(ws.do16, p.h * plan.tq, static_cast<int>(p.d),
                        backward_queries(static_cast<int>(p.d)));
  const BackwardJob job{.seq = call.sequences(ws),
                        .d = static_cast<int>(p.d),
                        .h = static_cast<int>(p.h),
                        .hk = static_cast<int>(p.hk),
                        .group = static_cast<int>(p.group()),
                        .k_blocks = plan.k_blocks,
                        .tq = plan.tq,
                        .tk = plan.tk,
                        .zeros = call.zeros(ws, {ws.parts_done, parts.done_words()}),
                        .saved = call.codes(),
                        .o = input(args.o),
                        .dout = dout,
                        .lse = stats(args.lse),
                        .dlse = stats(args.dlse),
                        .logit_scale = p.scale,
                        .v_top = ws.v_top,
                        .k_top = ws.k_top,
                        .keys_are_ready = plan.k8_is_saved,
                        .k8 = ws.k8,
                        .v8 = ws.v8,
                        .k_scale = ws.k_scale,
                        .v_scale = ws.v_scale,
                        .q8 = ws.q8,
                        .q8t = ws.q8t,
                        .do8t = ws.do8t,
                        .do16 = is_given ? nullptr : ws.do16,
                        .row = ws.row,
                        .stats = ws.stats,
                        .dq_lift = ws.dq_lift,
                        .dq_sum = ws.dq_sum,
                        .dq_halves = ws.dq_halves,
                        .centre8 = call.saved.centre8(),
                        .centre_scale = call.saved.centre_scale(),
                        .v_centre8 = call.saved.v_centre8(),
                        .v_centre_scale = call.saved.v_centre_scale(),
                        .dq_mean = ws.dq_mean,
                        .dq_mean_back = ws.dq_mean_back,
                        .rotation = call.rotation(),
                        .octave_stats = ws.octave_stats};
  launch_operands(job, p.dtype, call.stream);

  const int d = job.d;
  const int64_t queries = p.h * plan.tq, keys = p.hk * plan.tk;
  const int tile = backward_queries(d), slab_rows = tile / kSlab * d;
  const BackwardParams params{.q8 = byte_matrix(call.q8(ws), queries, d, tile),
                              .q8t = byte_matrix(ws.q8t, queries / kSlab * d, kSlab, slab_rows),
                              .do16 = do16,
                              .do16_is_given = is_given,
                              .heads_of_rows = tuned::Divisor(plan.tq),
                              .do8t = byte_matrix(ws.do8t, queries / kSlab * d, kSlab, slab_rows),
                              .k8 = byte_matrix(call.k8(ws), keys, d, kBackwardKeys),
                              .seq = job.seq,
                              .mask = mask_of(p),
                              .hk = job.hk,
                              .group = job.group,
                              .k_blocks = plan.k_blocks,
                              .mixed_heads = parts.parted > 0 ? 0 : mixed_heads(p, plan),
                              .parted = parts.parted,
                              .parts = parts.count,
                              .tq = plan.tq,
                              .tk = plan.tk,
                              .stats = ws.stats,
                              .k_scale = plan.k8_is_saved ? call.saved.k_scale() : ws.k_scale,
                              .v8 = plan.k8_is_saved ? call.saved.v8() : ws.v8,
                              .v_scale = plan.k8_is_saved ? call.saved.v_scale() : ws.v_scale,
                              .rotation = call.rotation(),
                              .k_top = ws.k_top,
                              .dq_lift = ws.dq_lift,
                              .dq_sum = ws.dq_sum,
                              .dq_halves = ws.dq_halves,
                              .dk = output(args.dk),
                              .dv = output(args.dv),
                              .dk_chunks = input(args.dk).vector,
                              .dv_chunks = input(args.dv).vector,
                              .tickets = ws.tickets,
                              .turns = ws.turns,
                              .part_sums = ws.part_sums,
                              .parts_done = ws.parts_done,
                              .row_sum = ws.row_sum,
                              .octave_stats = ws.octave_stats,
                              .slabs = queries / kSlab,
                              .centre8 = call.saved.centre8(),
                              .centre_scale = call.saved.centre_scale(),
                              .key_blocks = call.saved.layout.key_blocks,
                              .dq_mean = ws.dq_mean};
  launch_backward(params, p.dtype, d, call.stream);

  tuned::launch_query_sums({.seq = job.seq,
                            .d = d,
                            .h = job.h,
                            .hk = job.hk,
                            .group = job.group,
                            .tq = plan.tq,
                            .scale = p.scale,
                            .rotation = params.rotation,
                            .rows = ws.row,
                            .sums = ws.dq_sum,
                            .halves = ws.dq_halves,
                            .k_top = ws.k_top,
                            .k_mean = ws.dq_mean_back,
                            .k_mean_d = d,
                            .dlse = stats(args.dlse),
                            .row_sum = ws.row_sum,
                            .sums_what_cap_takes = false,
                            .dq = output(args.dq),
                            .chunks = input(args.dq).vector},
                           p.dtype, d, plan.q_blocks, call.stream, Start::early);
  call.finish(
      ws, {call.rows_of(args.dq, true), call.rows_of(args.dk, false), call.rows_of(args.dv, false)},
      {});
}

void backward(const Problem& p, const BackwardArgs& args, void* workspace) {
  Arena arena(aligned(workspace));
  if (p.has_codes) return backward_of_codes(p, args, arena, nullptr);
  const CodesSpace made(making_codes(p), Plan(p), arena);
  BackwardArgs with = args;
  with.codes = made.codes;
  backward_of_codes(with_codes(p), with, arena, &made);
}

}  // namespace sagebwd::cuda::sm90
