// SPDX-License-Identifier: Apache-2.0
#include "results.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "spec/recipe_fields.h"

namespace sagebwd::cli {

std::vector<std::string> recipes_of(const Results& results) {
  std::vector<std::string> names;
  for (const TraceResult& r : results)
    if (std::find(names.begin(), names.end(), r.variant.recipe) == names.end())
      names.push_back(r.variant.recipe);
  return names;
}

std::vector<Sweep> sweeps_of(const Results& results) {
  std::vector<Sweep> sweeps;
  for (const TraceResult& r : results) {
    const bool captured = r.source.layer.has_value();
    const std::string name = captured ? "captured" : r.source.name, label = r.source.label();
    auto sweep =
        std::find_if(sweeps.begin(), sweeps.end(), [&](const Sweep& s) { return s.name == name; });
    if (sweep == sweeps.end()) sweep = sweeps.insert(sweeps.end(), {name, captured, {}, {}});
    if (std::find(sweep->labels.begin(), sweep->labels.end(), label) != sweep->labels.end())
      continue;
    sweep->labels.push_back(label);
    const size_t dot = label.rfind('.');
    sweep->x.push_back(!captured                  ? *r.source.sigma
                       : dot == std::string::npos ? 0.0
                                                  : std::atof(label.c_str() + dot + 1));
  }
  return sweeps;
}

const TraceResult* find(const Results& results, const std::string& label, const std::string& recipe,
                        const std::string& lift) {
  for (const TraceResult& r : results)
    if (r.variant.lift == lift && r.variant.recipe == recipe && r.source.label() == label)
      return &r;
  return nullptr;
}

std::vector<Shown> shown_variants(const Results& results) {
  std::vector<Shown> shown;
  int others = 1;  // the first colour is that of the yardstick
  for (const std::string& recipe : recipes_of(results)) {
    const bool preset = spec::is_scheme(recipe);
    shown.push_back(
        {recipe, preset ? recipe : "other" + std::to_string(2 + others++ % 4), recipe, ""});
  }
  for (const TraceResult& r : results)
    if (r.variant.lift == "all") {
      shown.push_back({display_name(r.variant), "other1", r.variant.recipe, "all"});
      break;
    }
  return shown;
}

std::string display_name(const Variant& variant) {
  return variant.lift == "all" ? "no INT8" : variant.recipe;
}

bool has_lifts(const Results& results) {
  return std::any_of(results.begin(), results.end(), [](const TraceResult& r) {
    return !r.variant.lift.empty() && r.variant.lift != "all";
  });
}

double worst_gradient(const TraceResult& r) {
  double worst = 0;
  for (const char* t : kGradients)
    worst = r[t].rel_l2 > worst || std::isnan(r[t].rel_l2) ? r[t].rel_l2 : worst;
  return worst;
}

}  // namespace sagebwd::cli
