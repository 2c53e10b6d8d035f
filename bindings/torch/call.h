// SPDX-License-Identifier: Apache-2.0
// How an operator calls the library.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "sagebwd/error.h"

/// The namespace of the operators. A build for HF Kernels has one of its own, so that it can be
/// loaded beside an installed package.
#ifndef SAGEBWD_OPERATORS
#define SAGEBWD_OPERATORS sagebwd
#endif
/// A macro of PyTorch that does not expand its arguments.
#define SAGEBWD_EXPANDED(macro, ...) macro(__VA_ARGS__)

namespace sagebwd::binding {

/// The current device for the time of a CUDA call; nothing on the CPU.
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor& t) {
    if (t.is_cuda()) guard.emplace(t.get_device_index());
  }
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
};

/// PyTorch turns every exception into RuntimeError. The first word of the message therefore gives
/// the kind, and python/sagebwd/_ops/call.py reads it.
template <typename F>
auto translated(F&& call) {
  try {
    return call();
  } catch (const Error& e) {
    const char* kind = e.kind() == ErrorKind::invalid_argument ? "sagebwd.ValueError: "
                       : e.kind() == ErrorKind::unsupported    ? "sagebwd.NotImplementedError: "
                                                               : "sagebwd.RuntimeError: ";
    throw std::runtime_error(kind + in_words_of_python(e.what()));
  }
}

/// Memory of PyTorch for one call of the library, on the device of `like`.
class CallMemory {
 public:
  explicit CallMemory(const Tensor& like) : like_(like) {}
  Allocator allocator() { return {take, this}; }

 private:
  static void* take(void* self, size_t bytes) {
    auto& memory = *static_cast<CallMemory*>(self);
    return memory.tensor_.emplace(workspace(memory.like_, bytes)).mutable_data_ptr();
  }
  const Tensor& like_;
  std::optional<Tensor> tensor_;
};

/// Calls with memory for the time of the call.
template <typename Args, typename Call>
auto run(Args& args, const Tensor& q, Call&& call) {
  CallMemory memory(q);
  args.allocator = memory.allocator();
  return call(args);
}

/// The same for calls that take a workspace of a size that they tell.
template <typename Args, typename Call>
void run_in_workspace(Args& args, const Tensor& q, Call&& call) {
  const size_t bytes = workspace_size(args);
  const Tensor memory = workspace(q, bytes);
  args.workspace = memory.mutable_data_ptr();
  args.workspace_bytes = bytes;
  call(args);
}

/// Tries the packing that does not wait and then, if no implementation takes that, the other.
/// `attempt(packing)` gives nothing if none does; with offsets on the host it throws instead.
template <typename Attempt>
auto with_packing(const Options& options, const Tensor& q, const Tensor& k, Attempt&& attempt) {
  const Packing packing(options, q, k, Offsets::on_device);
  if (auto result = attempt(packing)) return *std::move(result);
  return *attempt(Packing(options, q, k, Offsets::on_host));
}

}  // namespace sagebwd::binding
