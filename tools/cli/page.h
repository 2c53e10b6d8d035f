// SPDX-License-Identifier: Apache-2.0
// The web page of a trace or report: one file, no scripts, nothing to download.
#pragma once

#include <string>

#include "bench_run.h"
#include "results.h"

namespace sagebwd::cli {

struct PageText {
  std::string title;
  std::string command_line;
  bool verdict = false;              // compare the recipes with the limits
  const Benchmark* speed = nullptr;  // measured on the same machine
};

std::string trace_page(const Results& results, const PageText& text);

}  // namespace sagebwd::cli
