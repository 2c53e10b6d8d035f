// SPDX-License-Identifier: Apache-2.0
// Runs a case through the public API, the way a user's program does: own memory, own workspace.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "sagebwd/attention.h"
#include "spec/attn_case.h"
#include "trace/inputs.h"
#include "trace/lists.h"

namespace sagebwd::cli {

class AttentionRun {
 public:
  /// Copies the inputs into the case's element type and layout and allocates everything else.
  /// `lists` are those of the case, if it has any; they must outlive this.
  AttentionRun(const spec::AttnCase& c, const trace::Inputs& in, const trace::Lists& lists = {});

  void forward() const { sagebwd::forward(forward_); }
  void backward() const { sagebwd::backward(backward_); }

  /// Results as contiguous FP32, [b, h, n, d].
  std::vector<float> o() const { return floats(forward_.o); }
  std::vector<float> dq() const { return floats(backward_.dq); }
  std::vector<float> dk() const { return floats(backward_.dk); }
  std::vector<float> dv() const { return floats(backward_.dv); }
  const std::vector<float>& lse() const { return lse_; }

  /// What the dispatcher chose, with its tile sizes.
  Candidate forward_choice() const;
  Candidate backward_choice() const;

 private:
  static std::vector<float> floats(const TensorView& view);

  std::vector<std::byte> q_, k_, v_, o_, dout_, dq_, dk_, dv_, workspace_;
  std::vector<float> lse_;
  ForwardArgs forward_;
  BackwardArgs backward_;
};

/// Arguments of a case without memory: enough for explain() and workspace_size().
ForwardArgs forward_shape(const spec::AttnCase& c);
BackwardArgs backward_shape(const spec::AttnCase& c);

/// The chosen one of a list. Throws Error(unsupported) with every refusal when there is none.
Candidate chosen(const std::vector<Candidate>& candidates);

/// Pins an implementation for this process, as SAGEBWD_IMPL does; an unknown name is an Error that
/// lists the known ones.
void pin_implementation(const std::string& name);
/// Sets the library's number of threads for this process, as SAGEBWD_THREADS does.
void set_threads(int threads);

}  // namespace sagebwd::cli
