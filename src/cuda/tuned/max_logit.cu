// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launch.h"
#include "cuda/tile/ordered.cuh"
#include "cuda/tuned/max_logit.h"

namespace sagebwd::cuda::tuned {
namespace {

struct DecodeParams {
  const uint32_t* codes;
  float* out;
  int64_t count;
};

__global__ void decode_max_kernel(DecodeParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.count) p.out[i] = tile::from_ordered(p.codes[i]);
}

}  // namespace

void launch_decode_max(const uint32_t* codes, float* out, int64_t count, cudaStream_t stream) {
  launch(decode_max_kernel, dim3(static_cast<unsigned>((count + 255) / 256)), 256, 0,
         DecodeParams{codes, out, count}, stream);
}

}  // namespace sagebwd::cuda::tuned
