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

size_t needed_by(const dispatch::Implementation& impl, const spec::Problem& p) {
  return no_results(p) ? 0 : padded_workspace(impl.workspace(p));
}

template <typename Args>
size_t workspace_size_of(const Args& a) {
  const spec::Problem p = spec::resolve(a, false);
  return needed_by(dispatch::choose(p), p);
}

template <typename Args>
void run(const Args& a) {
  const spec::Problem p = spec::resolve(a, true);
  const dispatch::Implementation& impl = dispatch::choose(p);
  const size_t needed = needed_by(impl, p);
  void* workspace = checked_workspace(a, needed);
  spec::check_overlap(p, a, a.workspace, needed);
  if (no_results(p)) return write_no_results(p, a);
  run_by(impl, p, a, workspace);
}

}  // namespace

size_t workspace_size(const ForwardArgs& a) { return workspace_size_of(a); }
size_t workspace_size(const BackwardArgs& a) { return workspace_size_of(a); }

size_t codes_size(const ForwardArgs& a) {
  const spec::Problem p = spec::resolve(a, false);
  spec::check_codes_recipe(p.recipe);
  return static_cast<size_t>(spec::codes_layout(p).bytes);
}

bool codes_suffice(const Recipe& recipe) { return spec::codes_refusal(recipe).empty(); }

void forward(const ForwardArgs& a) { run(a); }
void backward(const BackwardArgs& a) { run(a); }

std::vector<Candidate> explain(const ForwardArgs& a) {
  return dispatch::explain(spec::resolve(a, false));
}
std::vector<Candidate> explain(const BackwardArgs& a) {
  return dispatch::explain(spec::resolve(a, false));
}

}  // namespace sagebwd
