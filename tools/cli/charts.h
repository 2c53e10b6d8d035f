// SPDX-License-Identifier: Apache-2.0
// Charts and tables of a trace, as items of a page (document.h).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "results.h"

namespace sagebwd::cli {

/// A legend and charts: error against sigma (or layer), one chart per output, with published points
/// where there are any.
nlohmann::json sweep_charts(const Results& results, const Sweep& sweep);
/// A legend and one bar chart per source.
nlohmann::json bar_charts(const Results& results, const std::vector<Sweep>& sweeps);

/// Relative L2 of outputs and intermediates, a row per source and recipe.
nlohmann::json error_table(const Results& results, const std::vector<Sweep>& sweeps);
/// Cosine, bias and worst rows of the same cases.
nlohmann::json detail_table(const Results& results, const std::vector<Sweep>& sweeps);
/// Relative L2 with one matmul lifted at a time.
nlohmann::json lift_table(const Results& results);

}  // namespace sagebwd::cli
