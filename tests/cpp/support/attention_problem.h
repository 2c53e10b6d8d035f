// SPDX-License-Identifier: Apache-2.0
// One attention problem with its inputs, its run through one implementation, and its exact answer.
//
//   const AttentionProblem p = make_problem("b2 h4 hk2 n200 d64 causal bf16");
//   const Results got = run(impl, p);
//   const Exact want = exact(p);
//   EXPECT_TRUE(close("dQ", got.dq, want.dq, p.q_shape(), {.rel_l2 = 0.03}, p));
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "dispatch/choose.h"
#include "ref/attention_exact.h"
#include "ref/attention_recipe.h"
#include "spec/attn_case.h"
#include "support/tensor.h"
#include "trace/inputs.h"
#include "trace/lists.h"

namespace sagebwd::testing {

struct AttentionProblem {
  spec::AttnCase c;
  trace::Inputs in;                 // contiguous, representable in the case's element type
  std::vector<float> dlse;          // [b, h, nq]; empty: none
  float scale = 0.0f;               // 0: 1/sqrt(d)
  std::vector<int32_t> cu_q, cu_k;  // documents; empty: not packed
  bool partial_kv = false;
  int levels_of_p = 0;  // 0: those of the implementation
  trace::Lists lists;   // of the case; make_lists() after documents or inputs have changed

  Shape q_shape() const { return {c.b, c.h, c.nq, c.d}; }
  Shape k_shape() const { return {c.b, c.hk, c.nk, c.d}; }
  Shape o_shape() const { return {c.b, c.h, c.nq, c.value_dim()}; }
  Shape v_shape() const { return {c.b, c.hk, c.nk, c.value_dim()}; }
  Shape row_shape() const { return {c.b, c.h, c.nq, 1}; }
  int64_t num_documents() const { return cu_q.empty() ? 0 : static_cast<int64_t>(cu_q.size()) - 1; }
  int64_t num_sequences() const { return cu_q.empty() ? c.b : num_documents(); }
  Documents documents() const { return {cu_q.data(), cu_k.data(), num_documents()}; }
  /// The validated problem: sequences and visible keys as the library understands them.
  spec::Problem resolved() const;
  /// The case string, and what it cannot express.
  std::string describe() const;
  /// Makes the lists that the case asks for.
  void make_lists() { lists = trace::make_lists(c, in, documents()); }
  /// Rounds the inputs to the element type, after a test has changed them.
  void round_inputs();
};

AttentionProblem make_problem(const std::string& case_text,
                              trace::InputKind kind = trace::InputKind::gaussian,
                              double sigma = 1.0);

/// Divides every q and k vector by its own RMS, as a model with QK-norm does.
void apply_qk_norm(AttentionProblem& p);

/// Normal numbers of deviation 1 in [b, h, nq], for dLSE.
std::vector<float> random_rows(const AttentionProblem& p, uint64_t key);

struct RunOptions {
  ParallelFor parallel_for = {};
  bool backward = true;
  unsigned char fill = 0xFF;       // byte of outputs and workspaces before the call
  int64_t guard = Tensor::kGuard;  // 0: exact heap blocks, for the address sanitizer
  /// Layout of one tensor ("q", "lse", …); unset: as the case says.
  std::function<Placement(const std::string& tensor, const Shape& shape)> place = {};
  /// O and LSE handed to the backward; null: the forward's own.
  const std::vector<float>*o = nullptr, *lse = nullptr;
};

/// Contiguous results. Gradients are empty in a forward-only run.
struct Results {
  std::vector<float> o, lse, max_logit, dq, dk, dv;
};

/// Runs forward and backward. Throws if a call wrote outside its outputs and its workspace, or
/// changed an input.
Results run(const dispatch::Implementation& impl, const AttentionProblem& p,
            const RunOptions& options = {});

/// Whether two runs agree bit for bit, NaNs included; else the first tensor that does not.
std::string first_difference(const Results& a, const Results& b);

struct Exact {
  std::vector<double> o, lse, max_logit, dq, dk, dv;
};

/// Attention in FP64 over all sequences and heads. Knows no partial_kv.
Exact exact(const AttentionProblem& p);

/// The same with P and dS rounded to bf16 on their way into the matmuls, O rounded to bf16, and D
/// made from that O: what 16-bit attention loses.
Exact bf16_attention(const AttentionProblem& p);

/// The problem with the levels of P that `impl` has, for comparisons with another implementation.
AttentionProblem with_levels_of(const dispatch::Implementation& impl, AttentionProblem p);

/// One query head of one sequence, as the recipe oracle takes it. The vectors own the values.
struct OneHead {
  std::vector<float> q, k, v, dout, dlse;
  ref::RecipeHead head;
};
/// `impl` says which tiles are used.
OneHead one_head(const dispatch::Implementation& impl, const AttentionProblem& p, int64_t sequence,
                 int64_t h);

}  // namespace sagebwd::testing
