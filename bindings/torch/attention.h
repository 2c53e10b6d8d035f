// SPDX-License-Identifier: Apache-2.0
// Attention on PyTorch's tensors: allocates the results and calls the library. The operators
// (ops.cpp) and the autograd of eager calls (autograd.cpp) share it. Errors are sagebwd::Error.
#pragma once

#include <optional>
#include <tuple>

#include "arguments.h"
#include "sagebwd/codes.h"

namespace sagebwd::binding {

struct Results {
  Tensor out, lse;
  std::optional<Tensor> max_logit, codes;  // if asked for
};

/// Results have the layout of the tensor they belong to (out and dq: q, dk: k, dv: v).
Results attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options,
                          bool return_max_logit, bool save_codes);

struct BackwardSwitches {
  bool deterministic = false, partial_kv = false;
};

/// (dq, dk, dv). With codes, only the shapes and the layouts of q, k and v are looked at.
std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const std::optional<Tensor>& dlse, const std::optional<Tensor>& codes,
    const Options& options, BackwardSwitches switches);

}  // namespace sagebwd::binding
