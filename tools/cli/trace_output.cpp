// SPDX-License-Identifier: Apache-2.0
#include "trace_output.h"

#include <nlohmann/json.hpp>

#include "options.h"
#include "table.h"

namespace sagebwd::cli {
namespace {

using nlohmann::json;

json to_json(const TensorError& e) {
  return {{"cos", e.cosine},
          {"rel_l2", e.rel_l2},
          {"projection", e.projection},
          {"worst_row",
           {{"batch", e.worst_batch},
            {"head", e.worst_head},
            {"row", e.worst_row},
            {"rel_l2", e.worst_row_error}}},
          {"worst_head_rel_l2", e.worst_head_rel_l2},
          {"rows_above_half", e.bad_rows}};
}

json to_json(const TraceResult& r) {
  spec::AttnCase c = r.source.shape;
  c.recipe = r.variant.settings;
  json j{{"recipe", r.variant.recipe},
         {"lift", r.variant.lift},
         {"inputs", r.source.name},
         {"sigma", r.source.sigma ? json(*r.source.sigma) : json(nullptr)},
         {"n", c.nq},
         {"nk", c.nk},
         {"d", c.d},
         {"dv", c.value_dim()},
         {"batch", c.b},
         {"heads", c.h},
         {"causal", c.mask.causal},
         {"dtype", dtype_name(c.dtype)},
         {"seed", c.seed},
         {"tile", {r.tile_q, r.tile_k}},
         {"impl", r.implementation},
         {"case", c.to_string()},
         {"tensors", json::object()}};
  for (const auto& [name, error] : r.tensors) j["tensors"][name] = to_json(error);
  return j;
}

}  // namespace

std::string trace_table(const Results& results) {
  const bool lifts = has_lifts(results);
  std::vector<Table::Column> columns{{"recipe", Side::left}};
  if (lifts) columns.push_back({"lift", Side::left});
  columns.push_back({"tiles"});
  for (const char* t : kOutputs) columns.push_back({t});
  for (const char* t : kIntermediates) columns.push_back({t});
  for (const char* t : {"cos dQ", "bias dQ", "bias dK", "bias dV"}) columns.push_back({t});
  Table table(columns);
  std::string label;
  for (const TraceResult& r : results) {
    if (r.source.label() != label) table.heading(printable(label = r.source.label()));
    std::vector<std::string> cells{display_name(r.variant)};
    if (lifts) cells.push_back(r.variant.lift.empty() ? "-" : r.variant.lift);
    cells.push_back(std::to_string(r.tile_q) + "×" + std::to_string(r.tile_k));
    for (const char* t : kOutputs) cells.push_back(fixed(r[t].rel_l2, 4));
    for (const char* t : kIntermediates) cells.push_back(fixed(r[t].rel_l2, 4));
    cells.push_back(fixed(r["dQ"].cosine, 5));
    for (const char* t : kGradients) cells.push_back(fixed(r[t].projection, 4));
    table.row(std::move(cells));
  }
  return table.to_string();
}

json trace_json(const Results& results, const std::string& command_line) {
  json j = record_head(command_line);
  j["reference"] = "exact attention in FP64 on the same inputs";
  j["cases"] = json::array();
  for (const TraceResult& r : results) j["cases"].push_back(to_json(r));
  return j;
}

}  // namespace sagebwd::cli
