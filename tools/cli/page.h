// SPDX-License-Identifier: Apache-2.0
// What is on the web page of a trace or report (document.h).
#pragma once

#include <nlohmann/json_fwd.hpp>
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

/// {"title", "lead", "items"}
nlohmann::json trace_page(const Results& results, const PageText& text);

}  // namespace sagebwd::cli
