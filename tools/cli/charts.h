// SPDX-License-Identifier: Apache-2.0
// Charts and tables of a trace, as HTML.
#pragma once

#include <string>

#include "results.h"

namespace sagebwd::cli {

/// Error against sigma (or layer), one chart per output, with published points where there are any.
std::string sweep_charts(const Results& results, const Sweep& sweep);
/// One bar chart per source.
std::string bar_charts(const Results& results, const std::vector<Sweep>& sweeps);

/// Relative L2 of outputs and intermediates, a row per source and recipe.
std::string error_table(const Results& results, const std::vector<Sweep>& sweeps);
/// Cosine, bias and worst rows of the same cases.
std::string detail_table(const Results& results, const std::vector<Sweep>& sweeps);
/// Relative L2 with one matmul lifted at a time.
std::string lift_table(const Results& results);

}  // namespace sagebwd::cli
