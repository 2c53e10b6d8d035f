// SPDX-License-Identifier: Apache-2.0
// Ways to look into the results of a trace.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "trace_run.h"

namespace sagebwd::cli {

using Results = std::vector<TraceResult>;

inline constexpr std::array<const char*, 4> kOutputs{"O", "dQ", "dK", "dV"};
inline constexpr std::array<const char*, 3> kGradients{"dQ", "dK", "dV"};
inline constexpr std::array<const char*, 3> kIntermediates{"P", "dS", "D"};

/// Distinct recipe names, in order of appearance.
std::vector<std::string> recipes_of(const Results& results);

/// One line or bar of a chart: a recipe as it is, or `no INT8`, the yardstick with all matmuls
/// lifted.
struct Shown {
  std::string label, css, recipe, lift;
};
std::vector<Shown> shown_variants(const Results& results);
/// "vectorwise", or "no INT8" when everything is lifted.
std::string display_name(const Variant& variant);

/// The sources of one input name, one per sigma, or all layers of a capture, in order.
struct Sweep {
  std::string name;  // "gaussian", "captured"
  bool captured = false;
  std::vector<std::string> labels;  // Source::label() of each
  std::vector<double> x;            // sigma, or the layer's number

  bool has_several() const { return labels.size() > 1; }
};
std::vector<Sweep> sweeps_of(const Results& results);

/// The result of a source under a recipe; null if there is none.
const TraceResult* find(const Results& results, const std::string& label, const std::string& recipe,
                        const std::string& lift = "");

/// Whether any case lifts some matmuls but not all.
bool has_lifts(const Results& results);

/// Largest rel_l2 among dQ, dK, dV.
double worst_gradient(const TraceResult& r);

}  // namespace sagebwd::cli
