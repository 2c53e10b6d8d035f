// SPDX-License-Identifier: Apache-2.0
// Results of a trace as a terminal table and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "results.h"

namespace sagebwd::cli {

/// One line per case; relative L2 errors unless the column says otherwise.
std::string trace_table(const Results& results);

/// {"cases": [{"recipe", "sigma", "n", "d", "causal", "tile": [Bq, Bk], "tensors": {"O": {"cos",
/// "rel_l2", "projection", "worst_row": {…}}, …}, …}], …}. A figure that is not finite is null.
nlohmann::json trace_json(const Results& results, const std::string& command_line);

}  // namespace sagebwd::cli
