// SPDX-License-Identifier: Apache-2.0
// What a trace is asked to do, and the list of cases that follows from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "captured.h"
#include "spec/attn_case.h"
#include "trace/inputs.h"

namespace sagebwd::cli {

struct TraceRequest {
  spec::AttnCase base;                          // sizes, mask, element type, seed
  std::vector<std::string> inputs{"gaussian"};  // names of trace::InputKind
  std::vector<double> sigmas{1.0};
  std::vector<std::string> recipes{"paper", "vectorwise"};  // texts of parse_recipe()
  std::vector<std::string> lifts;  // "dV", "S+S'", "each", "all"; each an extra case
  bool yardstick = false;          // one more case with nothing in INT8
  std::string from;                // safetensors file; replaces inputs and sigmas
  bool full = false;               // no mask, said so
  std::optional<Dtype> dtype;      // given by the user
};

/// One way to compute attention: a recipe, perhaps with matmuls lifted out of INT8.
struct Variant {
  std::string recipe;  // "vectorwise", "paper rotate=on"
  std::string lift;    // "", "dV", "S+S'", "all": besides what the recipe lifts
  Recipe settings;
};

/// One set of inputs, traced under every variant.
struct Source {
  std::string name;             // "gaussian", "sink", "layer.3"
  std::optional<double> sigma;  // of synthetic inputs
  spec::AttnCase shape;
  std::optional<CapturedLayer> layer;  // else synthetic

  std::string label() const;  // "gaussian σ=3"
};

struct TracePlan {
  std::vector<Source> sources;
  std::vector<Variant> variants;
  int cases() const { return static_cast<int>(sources.size() * variants.size()); }
};

/// The recipes of "paper,vectorwise lift=dQ,dK": commas separate them, but for those before the
/// name of a matmul.
std::vector<std::string> split_recipes(const std::string& text);

/// A case string that gives sizes, mask, element type and seed. Recipe tokens are refused: a trace
/// takes its recipes from elsewhere and would ignore them.
spec::AttnCase parse_base_case(const std::string& text);

/// `file` is the opened request.from, or null.
TracePlan plan_trace(const TraceRequest& request, const SafeTensors* file);

trace::Inputs load(const Source& source, const SafeTensors* file);

}  // namespace sagebwd::cli
