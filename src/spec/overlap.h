// SPDX-License-Identifier: Apache-2.0
// Whether two strided tensors share memory. A call that writes over what it still has to read would
// give wrong results without a word, so the API refuses that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "spec/linear.h"
#include "spec/mix.h"
#include "spec/problem.h"

namespace sagebwd::spec {

/// The memory of a strided tensor: rows of bytes at begin + i0·step[0] + i1·step[1] + i2·step[2].
struct Region {
  const char* name = "";
  uintptr_t begin = 0;
  int64_t row = 0;                 // bytes of a row; 0: no memory at all
  std::array<int64_t, 3> count{};  // rows along each dimension; 0: no memory at all
  std::array<int64_t, 3> step{};   // in bytes, not negative
};

Region region(const char* name, const TensorView& t);

/// Whether two regions share a byte. Layouts that interleave, such as views of one packed QKV
/// buffer, do not. Finding out is a search; where strides are so odd that it takes too long, the
/// answer is no.
bool overlap(const Region& a, const Region& b);

/// Throws Error(invalid_argument) when an output shares memory with another tensor of the call, or
/// the workspace with any.
void check_overlap(const Problem& p, const ForwardArgs& args, const void* workspace, size_t bytes);
void check_overlap(const Problem& p, const BackwardArgs& args, const void* workspace, size_t bytes);
void check_overlap(const LinearProblem& p, const LinearForwardArgs& args, const void* workspace,
                   size_t bytes);
void check_overlap(const LinearProblem& p, const LinearBackwardArgs& args, const void* workspace,
                   size_t bytes);
void check_overlap(const MixProblem& p, const MixForwardArgs& args);
void check_overlap(const MixProblem& p, const MixBackwardArgs& args, const void* workspace,
                   size_t bytes);
void check_overlap(const MixProblem& p, const MixSparseArgs& args);
void check_overlap(const MeansProblem& p, const BlockMeansArgs& args, const void* workspace,
                   size_t bytes);
void check_overlap(const TopKArgs& args);

}  // namespace sagebwd::spec
