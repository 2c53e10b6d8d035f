// SPDX-License-Identifier: Apache-2.0
// Sizes of a call and the layout of its workspace.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "cuda/host/params.h"
#include "dispatch/implementation.h"
#include "spec/problem.h"

namespace sagebwd::cuda {

/// Hands out aligned pieces of a workspace; with a null base it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlign = 128;
  std::byte* base_;
  size_t used_ = 0;
};

/// Aligned start inside the caller's workspace, whose own alignment is smaller.
inline constexpr size_t kDeviceAlign = 128;

/// Blocks of tokens, and the padded totals.
struct Plan {
  explicit Plan(const spec::Problem& p);

  int padded_d;
  int num_sequences;
  int q_blocks, k_blocks;                // of kBlock tokens, all sequences
  int64_t tq, tk;                        // padded tokens
  std::vector<DocumentStart> documents;  // [count + 1] when packed
};

/// Whether dQ is added up in memory by the kernel that makes dK and dV, rather than by its own.
bool fused(const spec::Problem& p);

dispatch::Tiles tiles_of(const spec::Problem& p);
size_t workspace_of(const spec::Problem& p);
void forward(const spec::Problem& p, const ForwardArgs& args, void* workspace);
void backward(const spec::Problem& p, const BackwardArgs& args, void* workspace);

}  // namespace sagebwd::cuda
