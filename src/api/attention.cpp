// SPDX-License-Identifier: Apache-2.0
// The public calls: validate, choose, check the memory, run.
#include "sagebwd/attention.h"

#include <algorithm>
#include <limits>

#include "api/workspace.h"
#include "dispatch/choose.h"
#include "spec/codes.h"
#include "spec/overlap.h"

namespace sagebwd {
namespace {

/// Whether all results are empty, whatever the size of the batch: such a call needs no memory and
/// no implementation. The largest logit of a sequence without queries is a result too; only on a
/// CPU can it be written from here.
bool no_results(const spec::Problem& p) {
  if (p.direction == spec::Direction::backward) return !p.has_queries() && !p.has_keys();
  return !p.has_queries() && (p.device == Device::cpu || p.num_sequences() * p.h == 0);
}

void write_no_results(const spec::Problem& p, const ForwardArgs& a) {
  if (a.max_logit != nullptr)
    std::fill_n(a.max_logit, p.num_sequences() * p.h, -std::numeric_limits<float>::infinity());
}
void write_no_results(const spec::Problem&, const auto&) {}

void run_by(const dispatch::Implementation& impl, const spec::Problem& p, const ForwardArgs& a,
            void* workspace) {
  impl.forward(p, a, workspace);
}
void run_by(const dispatch::Implementation& impl, const spec::Problem& p, const BackwardArgs& a,
            void* workspace) {
  impl.backward(p, a, workspace);
}

/// A checked call, the implementation that serves it, and the workspace that it needs: found out
/// once, whether the caller asks for the size, or the call runs.
struct Prepared {
  /// Throws if no implementation serves the call.
  explicit Prepared(const spec::Problem& p) : Prepared(p, dispatch::choose(p)) {}
  Prepared(const spec::Problem& p, const dispatch::Implementation& i)
      : problem(p),
        implementation(i),
        bytes(no_results(p) ? 0 : padded_workspace(i.workspace(p))) {}

  template <typename Args>
  void run(const Args& a) const {
    void* const workspace = given_workspace(a, bytes);
    spec::check_overlap(problem, a, workspace, bytes);
    if (no_results(problem)) return write_no_results(problem, a);
    run_by(implementation, problem, a, aligned_workspace(workspace, bytes));
  }

  const spec::Problem problem;
  const dispatch::Implementation& implementation;
  const size_t bytes;
};

template <typename Args>
bool try_run(const Args& a) {
  const spec::Problem p = spec::resolve(a, true);
  const dispatch::Implementation* const found = dispatch::find(p);
  if (found != nullptr) Prepared(p, *found).run(a);
  return found != nullptr;
}

}  // namespace

size_t workspace_size(const ForwardArgs& a) { return Prepared(spec::resolve(a, false)).bytes; }
size_t workspace_size(const BackwardArgs& a) { return Prepared(spec::resolve(a, false)).bytes; }

size_t codes_size(const ForwardArgs& a) {
  const spec::Problem p = spec::resolve(a, false);
  spec::check_codes_recipe(p.recipe);
  return static_cast<size_t>(spec::codes_layout(p).bytes);
}

bool codes_suffice(const Recipe& recipe) { return spec::codes_refusal(recipe).empty(); }

void forward(const ForwardArgs& a) { Prepared(spec::resolve(a, true)).run(a); }
void backward(const BackwardArgs& a) { Prepared(spec::resolve(a, true)).run(a); }
bool try_forward(const ForwardArgs& a) { return try_run(a); }
bool try_backward(const BackwardArgs& a) { return try_run(a); }

std::string refusal(const ForwardArgs& a) { return dispatch::refusal(spec::resolve(a, false)); }
std::string refusal(const BackwardArgs& a) { return dispatch::refusal(spec::resolve(a, false)); }

std::vector<Candidate> explain(const ForwardArgs& a) {
  return dispatch::explain(spec::resolve(a, false));
}
std::vector<Candidate> explain(const BackwardArgs& a) {
  return dispatch::explain(spec::resolve(a, false));
}

}  // namespace sagebwd
