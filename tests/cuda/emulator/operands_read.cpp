// SPDX-License-Identifier: Apache-2.0
#include "emulator/operands_read.h"

#include "cuda/quantize/operands.cuh"

namespace sagebwd::emulator {
namespace {

template <typename T, int D>
void run(const cuda::OperandJob& job) {
  cuda::run_operands<T, D, true, Scheme::vectorwise, cuda::Reader::sm90>(job, nullptr);
}
template <typename T>
void run(const cuda::OperandJob& job) {
  job.d == 64 ? run<T, 64>(job) : run<T, 128>(job);
}

}  // namespace

void launch_operands_read(const cuda::OperandJob& job, Dtype dtype) {
  dtype == Dtype::bf16 ? run<__nv_bfloat16>(job) : run<__half>(job);
}

}  // namespace sagebwd::emulator
