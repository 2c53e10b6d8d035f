// SPDX-License-Identifier: Apache-2.0
// Forward and backward as a sequence of kernels on the caller's stream: nothing here waits for the
// device, and nothing on the host has to outlive the call, so a call can be captured into a graph.
#include "cuda/sm80/run.h"

#include <cstdint>

#include "cuda/host/arena.h"
#include "cuda/host/views.h"
#include "cuda/lists/job.h"
#include "cuda/sm80/bwd/bwd.h"
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/quantize/operands.h"
#include "cuda/sm80/tiles.h"
#include "cuda/sm80/workspace.h"
#include "cuda/tuned/call.h"
#include "cuda/tuned/max_logit.h"
#include "cuda/tuned/query_sums.h"

namespace sagebwd::cuda::sm80 {
namespace {

using spec::Problem;
using tuned::Call;

ListJob list_job(const Call& call, const SharedSpace& ws, const backend::Tiles& tiles) {
  return cuda::list_job(call.p, call.sequences(ws), call.plan.tq, call.plan.tk, kListedQueries,
                        tiles.k);
}

/// What both directions say of their operands.
OperandJob operand_job(const Call& call, const SharedSpace& ws, const backend::Tiles& tiles,
                       const tuned::Zeros::Piece& zeros = {}) {
  const Recipe& recipe = call.p.recipe;
  OperandJob job{};
  call.describe(job, ws, ws.items, zeros);
  job.paper = recipe.scheme == Scheme::paper;
  job.folds_v = spec::folds_v(recipe);
  job.q_tokens = tiles.q, job.k_tokens = tiles.k;
  // Elsewhere the tiles of a block share what there is.
  job.tile_k = job.paper ? tiles.k : kBlock;
  job.k_scale = ws.k_scale;
  return job;
}

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
  const backend::Tiles tiles = tiles_of(p);
  const auto p_levels = static_cast<float>(tiles.p_levels);
  const Plan& plan = call.plan;
  Arena arena(aligned(workspace));
  const ForwardSpace ws(p, plan, arena);
  if (plan.num_sequences == 0) return;
  call.start(ws);
  OperandJob job = operand_job(call, ws, tiles);
  job.v8t = ws.v8t, job.v_tile_scale = ws.v_tile_scale;
  job.folded = ws.folded, job.v_scale = ws.v_scale, job.v16 = ws.v16,
  job.v16_is_v = p.lifted(kMatmulO), job.leads = p.lead() != 0;
  job.logit_factor = ws.logit_factor, job.mean_logit = ws.mean_logit;
  if (!job.paper) call.make_centres(ws);
  launch_operands(job, p.dtype, call.stream);
  if (p.has_lists()) launch_key_lists(list_job(call, ws, tiles), ws.lists, call.stream);

  const ForwardParams params{.seq = call.sequences(ws),
                             .mask = mask_of(p),
                             .d = static_cast<int>(p.d),
                             .group = static_cast<int>(p.group()),
                             .tq = plan.tq,
                             .tk = plan.tk,
                             .q8 = call.q8(ws),
                             .logit_factor = ws.logit_factor,
                             .q_mean_logit = ws.mean_logit,
                             .k8 = call.k8(ws),
                             .k_scale = ws.k_scale,
                             .centres = job.centres,
                             .value_centres = job.folds_v ? job.value_centres : tuned::Centres{},
                             .v8t = ws.v8t,
                             .v_tile_scale = ws.v_tile_scale,
                             .folded = ws.folded,
                             .v_scale = ws.v_scale,
                             .v16 = ws.v16,
                             .v16_is_v = p.lifted(kMatmulO),
                             .p_levels = p_levels,
                             .p_unit = 1.0f / p_levels,
                             .o = output(args.o),
                             .lse = stats(args.lse),
                             .max_logit = args.max_logit != nullptr ? ws.max_logit : nullptr,
                             .lists = ws.lists,
                             .cap = numerics::softcap_of(p.softcap)};
  launch_forward({.params = params,
                  .paper = job.paper,
                  .dtype = p.dtype,
                  .padded_d = plan.padded_d,
                  .tile_k = tiles.k,
                  .q_blocks = plan.q_blocks,
                  .heads = static_cast<int>(p.h),
                  .stream = call.stream});
  call.finish(ws, {call.rows_of(args.o, true)}, stats(args.lse));
  if (args.max_logit != nullptr)
    tuned::launch_decode_max(ws.max_logit, args.max_logit, plan.num_sequences * p.h, call.stream);
}

void backward(const Problem& p, const BackwardArgs& args, void* workspace) {
  const Call call(p, args);
  const backend::Tiles tiles = tiles_of(p);
  const auto p_levels = static_cast<float>(tiles.p_levels);
  const Plan& plan = call.plan;
  Arena arena(aligned(workspace));
  const BackwardSpace ws(p, plan, arena);
  if (plan.num_sequences == 0) return;

  // The kernel takes V as it is, if its rows are aligned and need no padding; at d 64 dO too, if
  // the distance of its rows, times as many as a copy covers, is a number of 32 bits, and there are
  // no lists.
  constexpr int64_t kFarApart = int64_t{1} << 26;
  const Strided v = input(args.v), dout = input(args.dout);
  const bool v_as_is = !spec::folds_v(p.recipe) && (p.d == 64 || p.d == 128) && v.vector,
             dout_as_is = p.d == 64 && dout.vector && dout.token < kFarApart && !p.has_lists();
  call.start(ws);
  OperandJob job = operand_job(call, ws, tiles, {ws.lists.bits, ws.lists.zero_words});
  job.k8t = ws.k8t;
  job.o = input(args.o), job.dout = dout;
  job.lse = stats(args.lse), job.dlse = stats(args.dlse);
  job.q8t = ws.q8t, job.do8t = ws.do8t, job.do16 = ws.do16;
  job.makes_values = !v_as_is, job.v16 = v_as_is ? nullptr : ws.v16;
  job.v_scale = ws.v_scale;
  if (dout_as_is) job.do16 = nullptr;
  job.dq_keys = ws.dq_keys;
  job.row = ws.row, job.exponent = ws.exponent, job.gradient = ws.gradient;
  job.dq_sum = ws.dq_sum;
  job.centre_logit = ws.centre_logit;
  if (!job.paper) {
    call.make_centres(ws);
    launch_dq_means(job, p.dtype, call.stream);
  }
  launch_operands(job, p.dtype, call.stream);
  if (p.has_lists()) launch_query_lists(list_job(call, ws, tiles), ws.lists, call.stream);

  const BackwardParams params{.seq = call.sequences(ws),
                              .mask = mask_of(p),
                              .d = static_cast<int>(p.d),
                              .h = static_cast<int>(p.h),
                              .hk = static_cast<int>(p.hk),
                              .group = static_cast<int>(p.group()),
                              .tq = plan.tq,
                              .tk = plan.tk,
                              .p_unit = 1.0f / p_levels,
                              .q8 = call.q8(ws),
                              .q8t = ws.q8t,
                              .q_exponent = ws.exponent,
                              .q_gradient = ws.gradient,
                              .k8 = call.k8(ws),
                              .k8t = ws.k8t,
                              .k_scale = ws.k_scale,
                              .dq_scale = ws.dq_keys.scale,
                              .v16 = job.v16,
                              .v_scale = ws.v_scale,
                              .rotation = job.rotation,
                              .do16 = job.do16,
                              .v = v,
                              .dout = dout,
                              .do8t = ws.do8t,
                              .dq_sum = ws.dq_sum,
                              .row_sum = ws.row_sum,
                              .dk = output(args.dk),
                              .dv = output(args.dv),
                              .seed = p.recipe.seed,
                              .tickets = ws.tickets,
                              .turns = ws.turns,
                              .lists = ws.lists,
                              .cap = numerics::softcap_of(p.softcap),
                              .q_centre_logit = ws.centre_logit,
                              .sums_what_cap_takes = p.sums_what_cap_takes()};
  launch_backward(params, p.dtype, job.paper, p.recipe.dithers(kMatmulDQ), plan.padded_d,
                  plan.k_blocks, call.stream);
  tuned::launch_query_sums({.seq = params.seq,
                            .d = params.d,
                            .h = params.h,
                            .hk = params.hk,
                            .group = params.group,
                            .tq = plan.tq,
                            .scale = p.scale,
                            .rotation = job.rotation,
                            .rows = ws.row,
                            .sums = ws.dq_sum,
                            .halves = false,
                            .k_top = nullptr,
                            .k_mean = job.paper ? ws.k_mean : ws.dq_keys.mean,
                            .k_mean_d = plan.padded_d,
                            .dlse = stats(args.dlse),
                            .row_sum = ws.row_sum,
                            .sums_what_cap_takes = params.sums_what_cap_takes,
                            .dq = output(args.dq),
                            .chunks = input(args.dq).vector},
                           p.dtype, plan.padded_d, plan.q_blocks, call.stream);
  call.finish(
      ws, {call.rows_of(args.dq, true), call.rows_of(args.dk, false), call.rows_of(args.dv, false)},
      {});
}

}  // namespace sagebwd::cuda::sm80
