// SPDX-License-Identifier: Apache-2.0
#include "cuda/sla2/mix/mix.h"

#include <algorithm>

#include "base/math.h"
#include "cuda/host/views.h"
#include "cuda/sla2/mix/jobs.h"

namespace sagebwd::cuda::sla2::mix {
namespace {

using spec::MeansProblem;
using spec::MixProblem;

static_assert(kPiece == spec::kMixPiece);

Kind kind_of(const TensorView& t, const Place& place) {
  return {t.dtype, static_cast<int>(t.shape[3]), static_cast<cudaStream_t>(place.stream)};
}

/// Of MixArgs and MixSparseArgs, without `linear`.
template <typename Args>
MixJob job_of(const MixProblem& p, const Args& a) {
  MixJob job{};
  job.batches = static_cast<int>(p.b), job.heads = static_cast<int>(p.h);
  job.tokens = static_cast<int>(p.n), job.pieces = static_cast<int>(p.pieces());
  job.d = static_cast<int>(p.d);
  job.alpha = a.alpha.data;
  job.alpha_rows = static_cast<int>(a.alpha.rows);
  // A block may be longer than the sequence.
  job.alpha_block = static_cast<int>(std::min(a.alpha.block, round_up(p.n, kPiece)));
  job.alpha_of_batch = a.alpha.batches > 1;
  job.norm = stats(a.norm);
  job.sparse = strided(a.sparse, 16);
  return job;
}

void forward(const MixProblem& p, const MixForwardArgs& a) {
  MixJob job = job_of(p, a);
  job.linear = strided(a.linear, 16), job.out = strided(a.out, 16);
  launch_forward(kind_of(a.sparse, a), job);
}

void backward(const MixProblem& p, const MixBackwardArgs& a, float* parts) {
  const spec::AlphaParts size(p, a.alpha);
  const Kind kind = kind_of(a.sparse, a);
  MixJob job = job_of(p, a);
  job.linear = strided(a.linear, 16), job.dout = strided(a.dout, 16);
  job.dsparse = strided(a.dsparse, 16), job.dlinear = strided(a.dlinear, 16);
  if (a.dalpha != nullptr) job.dalpha = size.are_results() ? a.dalpha : parts;
  launch_backward(kind, job);
  if (a.dalpha == nullptr || size.are_results()) return;
  launch_alpha_sums({.parts = parts,
                     .dalpha = a.dalpha,
                     .results = a.alpha.batches * p.h * a.alpha.rows,
                     .heads = static_cast<int>(p.h),
                     .rows = static_cast<int>(a.alpha.rows),
                     .batches = static_cast<int>(size.batches),
                     .of_row = static_cast<int>(std::min(size.of_row, size.of_head)),
                     .of_head = static_cast<int>(size.of_head)},
                    kind.stream);
}

void sparse_backward(const MixProblem& p, const MixSparseArgs& a) {
  MixJob job = job_of(p, a);
  job.dout = strided(a.dout, 16), job.dsparse = strided(a.dsparse, 16);
  job.dalpha = a.parts;
  launch_backward(kind_of(a.sparse, a), job);
}

void block_means(const MeansProblem& p, const BlockMeansArgs& a, float* raw) {
  const auto of = [](const TensorView& x, int64_t block, int64_t blocks, float* means) {
    return MeansJob::Of{.x = strided(x, 16),
                        .heads = static_cast<int>(x.shape[1]),
                        .tokens = static_cast<int>(x.shape[2]),
                        .block = static_cast<int>(block),
                        .blocks = static_cast<int>(blocks),
                        .means = means};
  };
  const Kind kind = kind_of(a.q, a);
  launch_means(kind, {.of = {of(a.q, a.block_q, p.q_blocks, a.q_means),
                             of(a.k, a.block_k, p.k_blocks, a.mean_free_keys ? raw : a.k_means)},
                      .batches = static_cast<int>(p.b),
                      .d = static_cast<int>(p.d)});
  if (!a.mean_free_keys) return;
  launch_centre({.from = raw,
                 .to = a.k_means,
                 .heads = static_cast<int>(p.b * p.hk),
                 .blocks = static_cast<int>(p.k_blocks),
                 .d = static_cast<int>(p.d),
                 .block = static_cast<int>(a.block_k),
                 .tokens = static_cast<int>(p.nk)},
                kind.stream);
}

void top_k(const TopKArgs& a) {
  launch_top_k({.scores = a.scores,
                .rows = static_cast<int>(a.rows),
                .columns = static_cast<int>(a.columns),
                .k = static_cast<int>(a.k),
                .index = a.index,
                .count = a.count},
               static_cast<cudaStream_t>(a.stream));
}

}  // namespace

const backend::Mix& calls() {
  static const backend::Mix table{Device::cuda,    forward,     backward,
                                  sparse_backward, block_means, top_k};
  return table;
}

}  // namespace sagebwd::cuda::sla2::mix
