// SPDX-License-Identifier: Apache-2.0
// The web page of a trace or report: one file, no scripts, nothing to download.
#pragma once

#include <string>

#include "results.h"

namespace sagebwd::cli {

struct PageText {
  std::string title;
  std::string command_line;
  bool verdict = false;  // judge the recipes against the gates
};

std::string trace_page(const Results& results, const PageText& text);

}  // namespace sagebwd::cli
