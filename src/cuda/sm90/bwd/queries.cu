// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/sm90/bwd/queries.cuh"
#include "cuda/sm90/bwd/queries.h"
#include "cuda/sm90/bwd/tops.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D>
void run(const QueryJob& job, cudaStream_t stream) {
  using Piece = QueryPiece<T, D>;
  launch(query_piece_kernel<T, D>, dim3(static_cast<unsigned>(job.tq / Piece::kTokens * job.h)),
         Piece::kThreads, static_cast<int>(sizeof(typename Piece::Shared)), job, stream,
         Start::early);
}

template <typename T>
void run(const QueryJob& job, cudaStream_t stream) {
  job.padded_d == 64 ? run<T, 64>(job, stream) : run<T, 128>(job, stream);
}

/// Not early: neither this kernel nor what the next one reads before it waits may be ahead of the
/// kernel that makes codes.
void launch_tops(const OperandJob& job, cudaStream_t stream) {
  int64_t words = 0;
  for (const Zeros::Piece& piece : job.zeros.piece) words = std::max(words, piece.words);
  const int64_t heads = static_cast<int64_t>(job.seq.count) * job.hk,
                for_zeros = std::min((words + kTopThreads - 1) / kTopThreads, kMostZeroBlocks);
  launch(tops_kernel, dim3(static_cast<unsigned>(std::max(heads, for_zeros))), kTopThreads, 0, job,
         stream);
}

}  // namespace

void launch_queries(const OperandJob& operands, Dtype dtype, cudaStream_t stream) {
  launch_tops(operands, stream);
  QueryJob job{operands, Divisor(operands.h), Divisor(operands.group)};
  job.q_blocks_each = Divisor(job.seq.q_blocks);
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(job, stream) : run<__half>(job, stream);
}

}  // namespace sagebwd::cuda::sm90
