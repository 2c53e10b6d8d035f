// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/host/tensor_map.h"
#include "cuda/quantize/operands.cuh"
#include "cuda/sm90/bwd/queries.h"
#include "cuda/sm90/operands.h"
#include "cuda/sm90/quantize/kernel.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D>
void make_codes(const OperandJob& operands, cudaStream_t stream) {
  using Shape = codes::Shape<D>;
  CodesJob job{};
  static_cast<OperandJob&>(job) = operands;
  // A thread block has a piece at work, two in its stages, and knows the next. Twice as many are
  // handed out while a mean is made. With means further ahead K and V would leave the cache.
  const int64_t places = int64_t{multiprocessors()} * Shape::kResident,
                items = launch_prepare(job, places * 2 * (codes::kStages + 2), stream),
                b = job.seq.documents == nullptr ? job.seq.count : 1;
  job.q_mapped = token_map(job.q_map, job.q, b, job.h, job.seq.nq, D, kBlock);
  job.k_mapped = token_map(job.k_map, job.k, b, job.hk, job.seq.nk, D, kBlock);
  job.v_mapped = token_map(job.v_map, job.v, b, job.hk, job.seq.nk, D, kBlock);
  launch(codes_kernel<T, D>, dim3(static_cast<unsigned>(std::min(items, places))), Shape::kThreads,
         static_cast<int>(sizeof(codes::SharedPlan<T, D>)), job, stream, Start::early);
}

template <typename T, int D>
void run(const OperandJob& job, cudaStream_t stream) {
  if (job.backward)
    run_operands<T, D, true, Scheme::vectorwise, Reader::sm90>(job, stream);
  else
    make_codes<T, D>(job, stream);
}

template <typename T>
void run(const OperandJob& job, cudaStream_t stream) {
  job.padded_d == 64 ? run<T, 64>(job, stream) : run<T, 128>(job, stream);
}

}  // namespace

void launch_operands(const OperandJob& job, Dtype dtype, cudaStream_t stream) {
  if (has_only_queries(job)) return launch_queries(job, dtype, stream);
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(job, stream) : run<__half>(job, stream);
}

}  // namespace sagebwd::cuda::sm90
