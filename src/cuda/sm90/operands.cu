// SPDX-License-Identifier: Apache-2.0
// The operands of these kernels.
#include "cuda/quantize/operands.cuh"
#include "cuda/sm90/bwd/queries.h"
#include "cuda/sm90/operands.h"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D, bool kBackward, Codes kCodes>
void run(const OperandJob& job, cudaStream_t stream) {
  run_operands<T, D, kBackward, Scheme::vectorwise, Reader::sm90, kCodes>(job, stream);
}

template <typename T, int D>
void run(const OperandJob& job, cudaStream_t stream) {
  if (!job.backward)
    run<T, D, false, Codes::made>(job, stream);
  else if (job.saved.q8 == nullptr)
    run<T, D, true, Codes::made>(job, stream);
  else
    run<T, D, true, Codes::read>(job, stream);
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
