// SPDX-License-Identifier: Apache-2.0
// One attention problem, run on the GPU through the public interface. The recipe oracle and exact
// attention run it on the host from the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sagebwd/sagebwd.hpp"
#include "spec/attn_case.h"
#include "spec/problem.h"
#include "trace/inputs.h"
#include "trace/lists.h"

namespace sagebwd::gpu {

/// Null when there is a GPU, else why not.
const char* no_device();

/// First line of a test that runs on one.
#define NEED_DEVICE() \
  if (const char* why = no_device()) GTEST_SKIP() << "no usable CUDA device: " << why

enum class Placement {
  plain,  // the case's layout, contiguous
  gaps,   // gaps between tokens, heads and batches, and a start aligned to one element only
  // Inputs that are expanded: their heads, or their batches, are the same memory.
  one_head,
  one_batch,
};

/// The tuned implementation that tests look at: that of SAGEBWD_TEST_IMPL, or cuda-sm80. What
/// cuda-sm90 declines goes to cuda-sm80, as it does for callers.
std::string tuned_implementation();

struct DeviceCase {
  spec::AttnCase c;
  std::vector<int32_t> cu_q, cu_k;  // packed when not empty
  bool cu_on_device = false;
  Placement placement = Placement::plain;
  trace::InputKind kind = trace::InputKind::gaussian;
  double sigma = 1.0;
  float v_offset = 0.0f;  // what the values share, of either sign in turn
  float scale = 0.0f;     // of the logits; 0: the default
  bool dlse = false, partial_kv = false, deterministic = false;
  float o_elsewhere = 0.0f;  // partial_kv: what keys elsewhere add to every number of O
  bool codes = false;        // the forward saves codes, and the backward gets no q, k and v
  std::string impl = tuned_implementation();  // pinned
  int poison = 0x7f;                          // byte that fills outputs and workspace beforehand

  explicit DeviceCase(const std::string& text) : c(spec::AttnCase::parse(text)) {}
};

/// Contiguous results: o [b, h, nq, dv], lse [b, h, nq], max_logit [sequences, h], and gradients of
/// the shapes of q, k and v.
struct Results {
  std::vector<float> o, lse, max_logit, dq, dk, dv;
  bool operator==(const Results&) const = default;
};

/// The inputs as the kernels see them, contiguous.
struct CaseInputs {
  trace::Inputs x;
  std::vector<float> dlse;
  trace::Lists lists;  // of the case
};
CaseInputs make_case_inputs(const DeviceCase& dc);

/// The number of the type that is nearest.
float rounded(float x, Dtype dtype);

/// Q, K, V, dO.
inline constexpr int kTensors = 4;
std::vector<float>& tensor_of(CaseInputs& in, int tensor);

/// What a call leaves in its workspace, for tests that look inside.
struct Workspace {
  spec::Problem problem;
  std::vector<std::byte> bytes;
};
struct Workspaces {
  Workspace forward, backward;
  std::vector<std::byte> codes;  // that the forward saved
};

/// Forward and backward on the GPU. Throws std::runtime_error if memory outside the outputs was
/// touched. lse_shift is added to LSE on its way to the backward, as if there were more keys
/// elsewhere.
Results run_on_device(const DeviceCase& dc, const CaseInputs& in, float lse_shift = 0.0f,
                      Workspaces* workspaces = nullptr);

/// The recipe oracle with the GPU's tiles; its backward gets the O and LSE of `forward`.
Results run_oracle(const DeviceCase& dc, const CaseInputs& in, const Results& forward,
                   float lse_shift = 0.0f);

/// The codes that the recipe oracle saves.
std::vector<std::byte> oracle_codes(const DeviceCase& dc, const CaseInputs& in);

/// Attention in FP64.
Results run_exact(const DeviceCase& dc, const CaseInputs& in);

/// |a - b| / |b|; NaN and Inf must match in place (NaN or Inf on both sides), else infinite.
double relative_error(const std::vector<float>& a, const std::vector<float>& b);

/// Largest |a - b|, with the same rule.
double largest_difference(const std::vector<float>& a, const std::vector<float>& b);

/// Whether these are the kernels that work in half precision, whose results differ more from the
/// oracle's: some codes round the other way.
bool works_in_halves(const DeviceCase& dc);

/// What the pinned implementation answers, with the tiles it uses.
Candidate device_candidate(const DeviceCase& dc, bool backward);

}  // namespace sagebwd::gpu
