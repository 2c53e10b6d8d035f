// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/host/device.h"
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/sm90/quantize/codes.h"
#include "cuda/sm90/quantize/kernel.cuh"

namespace sagebwd::cuda::sm90 {
namespace {

template <typename T, int D>
void run(CodesJob& job, Dtype dtype, cudaStream_t stream) {
  using Shape = codes::Shape<D>;
  const int64_t places = int64_t{multiprocessors()} * Shape::kResident,
                items = launch_prepare(job, 0, stream),
                b = job.seq.documents == nullptr ? job.seq.count : 1;
  tuned::launch_centres({.seq = job.seq,
                         .d = D,
                         .hk = job.hk,
                         .octaves = numerics::octaves_of(job.seq.nk),
                         .rotation = job.rotation,
                         .zero = job.centres_are_zero,
                         .k = job.k,
                         .v = job.v,
                         .of_k = job.centres,
                         .of_v = job.value_centres,
                         .rows = job.centre_rows,
                         .columns = job.value_columns},
                        dtype, D, stream, Start::early);
  job.q_mapped = token_map(job.q_map, job.q, b, job.h, job.seq.nq, D, kBlock);
  job.k_mapped = token_map(job.k_map, job.k, b, job.hk, job.seq.nk, D, kBlock);
  job.v_mapped = token_map(job.v_map, job.v, b, job.hk, job.seq.nk, D, kBlock);
  launch(codes_kernel<T, D>, dim3(static_cast<unsigned>(std::min(items, places))), Shape::kThreads,
         static_cast<int>(sizeof(codes::SharedPlan<T, D>)), job, stream, Start::early);
}

}  // namespace

void launch_codes(const CodesJob& operands, Dtype dtype, cudaStream_t stream) {
  CodesJob job = operands;
  with_instance(dtype, job.padded_d, [&]<typename T, int D>() { run<T, D>(job, dtype, stream); });
}

}  // namespace sagebwd::cuda::sm90
