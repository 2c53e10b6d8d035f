// SPDX-License-Identifier: Apache-2.0
// The forward as a sequence of kernels on the caller's stream.
#include "cuda/sm90/run.h"

#include "cuda/host/arena.h"
#include "cuda/host/check.h"
#include "cuda/host/documents.h"
#include "cuda/host/tensor_map.h"
#include "cuda/host/views.h"
#include "cuda/quantize/quantize.h"
#include "cuda/sm80/plan.h"
#include "cuda/sm80/workspace.h"
#include "cuda/sm90/fwd/fwd.h"
#include "numerics/rotate.h"

namespace sagebwd::cuda::sm90 {
namespace {

using sm80::Plan;
using spec::Problem;

struct ForwardSpace : sm80::ForwardSpace {
  ForwardSpace(const Problem& p, const Plan& plan, Arena& arena)
      : sm80::ForwardSpace(p, plan, arena) {
    v_share = arena.take<uint16_t>(p.hk * plan.tk);
    block_scales = arena.take<BlockScales>(p.hk * plan.tk / kBlock);
    work = arena.take<uint32_t>(1);
  }
  uint16_t* v_share;
  BlockScales* block_scales;
  uint32_t* work;
};

}  // namespace

size_t workspace_of(const Problem& p) {
  const Plan plan(p);
  Arena arena(nullptr);
  ForwardSpace(p, plan, arena);
  return arena.used() + kDeviceAlign;
}

void forward(const Problem& p, const ForwardArgs& args, void* workspace) {
  const Plan plan(p);
  Arena arena(aligned(workspace));
  const ForwardSpace ws(p, plan, arena);
  if (plan.num_sequences == 0) return;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  write_documents(p, plan.blocks, ws.documents, stream);
  SAGE_CUDA(cudaMemsetAsync(ws.zeros, 0, ws.zero_bytes, stream));
  SAGE_CUDA(cudaMemsetAsync(ws.work, 0, sizeof(*ws.work), stream));
  OperandJob job{};
  job.seq = plan.blocks.sequences(p, ws.documents);
  job.d = static_cast<int>(p.d), job.padded_d = plan.padded_d;
  job.h = static_cast<int>(p.h), job.hk = static_cast<int>(p.hk);
  job.group = static_cast<int>(p.group());
  job.q_blocks = plan.q_blocks, job.k_blocks = plan.k_blocks;
  job.tq = plan.tq, job.tk = plan.tk;
  job.scheme = p.recipe.scheme;
  job.rotation = p.recipe.rotate ? numerics::rotation_block(static_cast<int>(p.d)) : 0;
  job.folds_v = true;
  job.tile_k = kForwardKeys, job.q_tokens = 64, job.k_tokens = kForwardKeys;
  job.next = ws.next;
  job.k = input(args.k), job.v = input(args.v), job.q = input(args.q);
  if (p.recipe.smooth_k) job.k_mean = {ws.k_mean, ws.k_part, ws.k_part_tokens, ws.k_arrived};
  if (p.recipe.smooth_v) job.v_mean = {ws.v_mean, ws.v_part, ws.v_part_tokens, ws.v_arrived};
  job.k8 = ws.k8, job.k_scale = ws.k_scale, job.v16 = ws.v16;
  job.q8 = ws.q8, job.logit_scale = p.scale;
  job.v8t = ws.v8t, job.tile_v_scale = ws.tile_v_scale;
  job.v_share = ws.v_share, job.block_scales = ws.block_scales;
  job.logit_factor = ws.logit_factor, job.mean_logit = ws.mean_logit;
  launch_operands(job, p.dtype, stream);

  const int d = static_cast<int>(p.d);
  const ForwardParams params{.q8 = byte_matrix(ws.q8, p.h * plan.tq, d, kForwardQueries),
                             .k8 = byte_matrix(ws.k8, p.hk * plan.tk, d, kForwardKeys),
                             .v8t = byte_matrix(ws.v8t, p.hk * plan.tk / kSlab * d, kSlab,
                                                kForwardKeys / kSlab * d),
                             .seq = job.seq,
                             .mask = mask_of(p),
                             .h = job.h,
                             .group = job.group,
                             .q_blocks = plan.q_blocks,
                             .tq = plan.tq,
                             .tk = plan.tk,
                             .logit_factor = ws.logit_factor,
                             .q_mean_logit = ws.mean_logit,
                             .scales = ws.block_scales,
                             .v_share = reinterpret_cast<const __half*>(ws.v_share),
                             .k_scale = ws.k_scale,
                             .v_mean = ws.v_mean,
                             .o = output(args.o),
                             .o_chunks = input(args.o).vector,
                             .lse = stats(args.lse),
                             .max_logit = args.max_logit != nullptr ? ws.max_logit : nullptr,
                             .next = ws.work};
  launch_forward(params, p.dtype, d, stream);
  if (p.packed() && p.documents.on_device)
    launch_uncovered({.documents = ws.documents,
                      .count = plan.num_sequences,
                      .d = d,
                      .rows = {{output(args.o), p.nq, static_cast<int>(p.h), true}, {}, {}},
                      .lse = stats(args.lse)},
                     stream);
  if (args.max_logit != nullptr)
    launch_decode_max(ws.max_logit, args.max_logit, plan.num_sequences * p.h, stream);
}

void backward(const Problem&, const BackwardArgs&, void*) {
  SAGE_THROW(ErrorKind::internal, "cuda-sm90 has no backward");
}

}  // namespace sagebwd::cuda::sm90
