// SPDX-License-Identifier: Apache-2.0
// The operands of these kernels.
#include "cuda/quantize/operands.cuh"
#include "cuda/sm90/operands.h"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D>
void run(const OperandJob& job, cudaStream_t stream) {
  job.backward ? run_operands<T, D, true, Scheme::vectorwise, Reader::sm90>(job, stream)
               : run_operands<T, D, false, Scheme::vectorwise, Reader::sm90>(job, stream);
}

template <typename T>
void run(const OperandJob& job, cudaStream_t stream) {
  job.padded_d == 64 ? run<T, 64>(job, stream) : run<T, 128>(job, stream);
}

}  // namespace

void launch_operands(const OperandJob& job, Dtype dtype, cudaStream_t stream) {
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(job, stream) : run<__half>(job, stream);
}

}  // namespace sagebwd::cuda::sm90
