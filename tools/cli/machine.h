// SPDX-License-Identifier: Apache-2.0
// What the program can say about the machine it runs on.
#pragma once

#include <string>
#include <vector>

namespace sagebwd::cli {

std::string cpu_model();

struct Feature {
  const char* name;
  bool present;
};
/// Instruction sets that matter to INT8 attention.
std::vector<Feature> cpu_features();
bool has_feature(const std::string& name);

/// Today's date in UTC, 2026-01-31.
std::string today();

}  // namespace sagebwd::cli
