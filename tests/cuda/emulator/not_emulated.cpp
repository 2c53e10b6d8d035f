// SPDX-License-Identifier: Apache-2.0
// The plain kernels have instructions of their own outside cuda/arch, and are held against the same
// oracle on the GPU. Nobody who pins the tuned kernels gets here.
#include "base/check.h"
#include "cuda/plain/backward.h"
#include "cuda/plain/forward.h"
#include "cuda/plain/prepare.h"

namespace sagebwd::cuda::plain {
namespace {

[[noreturn]] void decline() {
  SAGE_THROW(ErrorKind::unsupported, "the plain kernels are not emulated");
}

}  // namespace

void launch_backward(const BackwardParams&, cudaStream_t) { decline(); }
void launch_documents(const DocumentJob&, cudaStream_t) { decline(); }
void launch_forward(const ForwardParams&, cudaStream_t) { decline(); }
void launch_max(const MaxJob&, cudaStream_t) { decline(); }
void launch_mean(const MeanJob&, cudaStream_t) { decline(); }
void launch_rows(const RowJob&, cudaStream_t) { decline(); }
void launch_tokens(const TokenJob&, cudaStream_t) { decline(); }

}  // namespace sagebwd::cuda::plain
