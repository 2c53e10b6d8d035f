// SPDX-License-Identifier: Apache-2.0
// What the figures of a trace show, in sentences. The figures and comparisons in them are computed
// from the results. `code` in backquotes.
#pragma once

#include <string>
#include <vector>

#include "results.h"

namespace sagebwd::cli {

using Paragraphs = std::vector<std::string>;

/// A sweep over sigma, or over the layers of a capture.
Paragraphs sweep_words(const Results& results, const Sweep& sweep);
/// One set of inputs under every recipe.
Paragraphs single_words(const Results& results, const Sweep& sweep);
/// Which matmul makes which error.
Paragraphs lift_words(const Results& results);

/// One requirement on one recipe's results.
struct Check {
  std::string what, inputs, limit, value;
  bool passed = false;
};
struct RecipeVerdict {
  std::string recipe;
  std::vector<Check> checks;
  int passed() const;
};
/// The limits that a recipe for training has to meet, as far as these results show; empty without
/// Gaussian inputs of sigma 1.
std::vector<RecipeVerdict> verdicts(const Results& results);
/// A paragraph per recipe; the last one is the verdict in one sentence.
Paragraphs verdict_words(const Results& results);

/// 0.0588 → "5.9%"
std::string percent(double x);

}  // namespace sagebwd::cli
