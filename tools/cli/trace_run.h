// SPDX-License-Identifier: Apache-2.0
// Runs a plan. Outputs come from the implementation that a user's call would get, intermediates
// from the recipe oracle with the same tiles. Both are compared with exact attention in FP64.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "progress.h"
#include "trace/compare_head.h"
#include "trace_plan.h"

namespace sagebwd::cli {

/// The error of one tensor over all heads, with its worst row.
struct TensorError {
  double cosine = 1, rel_l2 = 0, projection = 0;
  double bad_rows = 0;  // fraction of rows with an error above 50 %

  // The row with the largest relative error; row is -1 when there is none.
  int64_t worst_batch = 0, worst_head = 0, worst_row = -1;
  double worst_row_error = 0;

  double worst_head_rel_l2 = 0;  // largest rel_l2 of a single head
};

struct TraceResult {
  Source source;
  Variant variant;
  /// What the dispatcher chose; "forward / backward" where they differ.
  std::string implementation;
  int tile_q = 0, tile_k = 0;
  /// O dQ dK dV, P dS D, and the rest of trace::HeadErrors, by name.
  std::map<std::string, TensorError> tensors;

  const TensorError& operator[](const std::string& tensor) const { return tensors.at(tensor); }
};

std::vector<TraceResult> run_trace(const TracePlan& plan, const SafeTensors* file, Talk talk);

}  // namespace sagebwd::cli
