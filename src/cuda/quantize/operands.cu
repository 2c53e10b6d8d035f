// SPDX-License-Identifier: Apache-2.0
// The operands of sm80's kernels.
#include "cuda/quantize/operands.cuh"

namespace sagebwd::cuda {
namespace {

template <typename T, int D, bool kBackward>
void run(const OperandJob& job, cudaStream_t stream) {
  job.scheme == Scheme::paper
      ? run_operands<T, D, kBackward, Scheme::paper, Reader::sm80>(job, stream)
      : run_operands<T, D, kBackward, Scheme::vectorwise, Reader::sm80>(job, stream);
}

template <typename T, int D>
void run(const OperandJob& job, cudaStream_t stream) {
  job.backward ? run<T, D, true>(job, stream) : run<T, D, false>(job, stream);
}

template <typename T>
void run(const OperandJob& job, cudaStream_t stream) {
  job.padded_d == 64 ? run<T, 64>(job, stream) : run<T, 128>(job, stream);
}

}  // namespace

void launch_operands(const OperandJob& job, Dtype dtype, cudaStream_t stream) {
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(job, stream) : run<__half>(job, stream);
}

}  // namespace sagebwd::cuda
