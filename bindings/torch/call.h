// SPDX-License-Identifier: Apache-2.0
// How an operator calls the library.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "sagebwd/error.h"

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

template <typename Args, typename Call>
void run(Args& args, const Tensor& q, Call&& call) {
  const size_t bytes = workspace_size(args);
  const Tensor memory = workspace(q, bytes);
  args.workspace = memory.mutable_data_ptr();
  args.workspace_bytes = bytes;
  call(args);
}

/// Calls with the packing that does not wait or, if no implementation takes that, with the other.
template <typename Call>
auto with_packing(const Options& options, const Tensor& q, const Tensor& k, Call&& call) {
  const Packing packing(options, q, k, Offsets::on_device);
  if (!packing.on_device()) return call(packing);
  try {
    return call(packing);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::unsupported) throw;
  }
  return call(Packing(options, q, k, Offsets::on_host));
}

}  // namespace sagebwd::binding
