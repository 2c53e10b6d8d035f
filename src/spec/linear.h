// SPDX-License-Identifier: Apache-2.0
// A validated problem of the linear branch. Everything below the API works from this and checks
// nothing again.
#pragma once

#include "sagebwd/linear.h"
#include "spec/batch.h"

namespace sagebwd::spec {

/// V has the head dim of q and k. `blocks` are those that are excluded; there is no mask, and there
/// are no documents.
struct LinearProblem : Batch {
  bool has_dnorm = false;     // a gradient of norms
  bool mixes = false;         // α is given
  bool has_dalpha = false;    // and its gradient is wanted
  bool has_averages = false;  // written by the forward; the backward does without h
  bool has_means = false;     // of K and V
};

/// Checks the arguments and throws Error(invalid_argument) with what was expected and what came.
/// check_memory also looks at data pointers; the workspace is checked by the caller, who knows its
/// size.
LinearProblem resolve(const LinearForwardArgs& args, bool check_memory);
LinearProblem resolve(const LinearBackwardArgs& args, bool check_memory);

}  // namespace sagebwd::spec
