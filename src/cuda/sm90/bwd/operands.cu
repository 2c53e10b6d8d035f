// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm90/bwd/operands.h"
#include "cuda/sm90/bwd/pad_keys.cuh"
#include "cuda/sm90/bwd/queries.cuh"
#include "cuda/sm90/bwd/tops.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

/// Not early: none of these kernels may be ahead of the kernel that makes codes.
void launch_tops(const BackwardJob& job, cudaStream_t stream) {
  int64_t words = 0;
  for (const tuned::Zeros::Piece& piece : job.zeros.piece) words = std::max(words, piece.words);
  const int64_t heads = static_cast<int64_t>(job.seq.count) * job.hk,
                for_zeros = std::min((words + kTopThreads - 1) / kTopThreads, kMostZeroBlocks);
  launch(tops_kernel, dim3(static_cast<unsigned>(std::max(heads, for_zeros))), kTopThreads, 0, job,
         stream);
}

void launch_pad_keys(const BackwardJob& job, cudaStream_t stream) {
  launch(pad_keys_kernel, dim3(static_cast<unsigned>(job.k_blocks), static_cast<unsigned>(job.hk)),
         kPadThreads, 0, job, stream, Start::early);
}

template <typename T, int D, Form kForm>
void launch_queries(const QueryJob& job, cudaStream_t stream) {
  using Piece = QueryPiece<T, D, kForm>;
  launch(query_piece_kernel<T, D, kForm>,
         dim3(static_cast<unsigned>(job.tq / Piece::kTokens * job.h)), Piece::kThreads,
         static_cast<int>(sizeof(typename Piece::Shared)), job, stream, Start::early);
}

}  // namespace

void launch_operands(const BackwardJob& operands, Dtype dtype, cudaStream_t stream) {
  launch_tops(operands, stream);
  if (!operands.keys_are_ready) launch_pad_keys(operands, stream);
  const bool regular =
      operands.seq.documents == nullptr && operands.dout.vector && operands.o.vector;
  const QueryJob job(operands);
  with_instance(dtype, job.d, [&]<typename T, int D>() {
    regular ? launch_queries<T, D, Form::regular>(job, stream)
            : launch_queries<T, D, Form::any>(job, stream);
  });
}

}  // namespace sagebwd::cuda::sm90
