// SPDX-License-Identifier: Apache-2.0
#include "charts.h"

#include <algorithm>
#include <cmath>

#include "document.h"
#include "table.h"
#include "trace/published.h"

namespace sagebwd::cli {
namespace {

json legend(const std::vector<Shown>& shown, bool published) {
  json entries = json::array();
  for (const Shown& v : shown) entries.push_back({v.label, v.css});
  if (published) entries.push_back({"published", "published"});
  return {{"kind", "legend"}, {"entries", entries}};
}

std::string tiles(const TraceResult& r) {
  return std::to_string(r.tile_q) + "×" + std::to_string(r.tile_k);
}

/// One source under every shown variant.
struct SourceCases {
  std::string label;
  std::vector<const TraceResult*> cases;
};

std::vector<SourceCases> cases_of(const Results& results, const std::vector<Sweep>& sweeps) {
  std::vector<SourceCases> all;
  for (const Sweep& s : sweeps)
    for (const std::string& label : s.labels) {
      all.push_back({label, {}});
      for (const Shown& v : shown_variants(results))
        if (const TraceResult* r = find(results, label, v.recipe, v.lift))
          all.back().cases.push_back(r);
    }
  return all;
}

/// The smallest error among the recipes is set in bold. The yardstick does not count.
bool is_best(const SourceCases& source, const TraceResult& r, const char* tensor) {
  int rivals = 0;
  for (const TraceResult* other : source.cases) {
    if (!other->variant.lift.empty()) continue;
    if ((*other)[tensor].rel_l2 < r[tensor].rel_l2) return false;
    ++rivals;
  }
  return rivals > 1 && r.variant.lift.empty();
}

}  // namespace

json sweep_charts(const Results& results, const Sweep& sweep) {
  json charts = json::array();
  double low = 1e300, high = 0;
  bool published = false;
  const auto line_of = [&](const std::string& label, const std::string& colour, bool joined,
                           std::vector<std::pair<double, double>> points) -> json {
    std::sort(points.begin(), points.end());
    for (const auto& [x, y] : points)
      if (y > 0 && std::isfinite(y)) low = std::min(low, y), high = std::max(high, y);
    return {{"label", label}, {"colour", colour}, {"joined", joined}, {"points", points}};
  };
  for (const char* tensor : kOutputs) {
    json lines = json::array();
    if (sweep.name == "gaussian") {
      std::vector<std::pair<double, double>> points;
      for (double sigma : sweep.x)
        if (const auto value = trace::published_rel_l2(tensor, sigma))
          points.emplace_back(sigma, *value);
      published |= !points.empty();
      lines.push_back(line_of("published", "published", false, points));
    }
    for (const Shown& v : shown_variants(results)) {
      std::vector<std::pair<double, double>> points;
      for (size_t i = 0; i < sweep.x.size(); ++i)
        if (const TraceResult* r = find(results, sweep.labels[i], v.recipe, v.lift))
          points.emplace_back(sweep.x[i], (*r)[tensor].rel_l2);
      lines.push_back(line_of(v.label, v.css, true, points));
    }
    charts.push_back({{"title", std::string(tensor) + ", relative L2 error"},
                      {"x_label", sweep.captured ? "layer" : "σ of Q and K"},
                      {"x_ticks", sweep.x},
                      {"lines", lines}});
  }
  if (high == 0) low = high = 1;  // every error is exactly zero: an empty axis
  // Equal axes make charts comparable.
  for (json& chart : charts) chart["y_range"] = {low, high};
  return {legend(shown_variants(results), published),
          {{"kind", "charts"}, {"class", ""}, {"charts", charts}}};
}

json bar_charts(const Results& results, const std::vector<Sweep>& sweeps) {
  double high = 0;
  json charts = json::array();
  for (const SourceCases& source : cases_of(results, sweeps)) {
    json all = json::array();
    for (const TraceResult* r : source.cases) {
      const std::string name = display_name(r->variant);
      json values = json::array();
      for (const char* t : kOutputs) {
        values.push_back((*r)[t].rel_l2);
        if (std::isfinite((*r)[t].rel_l2)) high = std::max(high, (*r)[t].rel_l2);
      }
      all.push_back({name, r->variant.lift.empty() ? name : "other1", values});
    }
    charts.push_back({{"title", source.label}, {"clusters", kOutputs}, {"bars", all}});
  }
  for (json& chart : charts) chart["most"] = high > 0 ? high : 1;  // one scale for all
  return {legend(shown_variants(results), false),
          {{"kind", "charts"}, {"class", "thirds"}, {"charts", charts}}};
}

json error_table(const Results& results, const std::vector<Sweep>& sweeps) {
  std::vector<const char*> tensors(kOutputs.begin(), kOutputs.end());
  tensors.insert(tensors.end(), kIntermediates.begin(), kIntermediates.end());
  std::vector<Cell> titles{"inputs", {"recipe", "name"}, "tiles"};
  titles.insert(titles.end(), tensors.begin(), tensors.end());
  TableItem table(titles);
  for (const SourceCases& source : cases_of(results, sweeps))
    for (const TraceResult* r : source.cases) {
      const bool first = r == source.cases.front();
      const std::string css = first ? "section" : "";
      std::vector<Cell> cells{{first ? source.label : "", css},
                              {display_name(r->variant), css + " name"},
                              {tiles(*r), css}};
      for (const char* t : tensors)
        cells.push_back({fixed((*r)[t].rel_l2, 4), css + (is_best(source, *r, t) ? " best" : "")});
      table.row(cells);
    }
  return table.item();
}

json detail_table(const Results& results, const std::vector<Sweep>& sweeps) {
  TableItem table({"inputs",
                   {"recipe", "name"},
                   {"tensor", "name"},
                   "cosine",
                   "bias",
                   "worst head",
                   "worst row",
                   "its place",
                   "rows off > 50%"});
  for (const SourceCases& source : cases_of(results, sweeps))
    for (const TraceResult* r : source.cases)
      for (const char* t : kOutputs) {
        const TensorError& e = (*r)[t];
        const bool first_tensor = t == kOutputs.front();
        const bool first = first_tensor && r == source.cases.front();
        const std::string css = first ? "section" : "";
        const std::string place =
            "head " + std::to_string(e.worst_head) + ", row " + std::to_string(e.worst_row);
        table.row({{first ? source.label : "", css},
                   {first_tensor ? display_name(r->variant) : "", css + " name"},
                   {t, css + " name"},
                   {fixed(e.cosine, 5), css},
                   {fixed(e.projection, 4), css},
                   {fixed(e.worst_head_rel_l2, 4), css},
                   {significant(e.worst_row_error, 3), css},
                   {place, css},
                   {fixed(100 * e.bad_rows, 2) + "%", css}});
      }
  return table.item();
}

json lift_table(const Results& results) {
  std::vector<Cell> titles{"inputs", {"recipe", "name"}, {"lifted", "name"}};
  titles.insert(titles.end(), kOutputs.begin(), kOutputs.end());
  TableItem table(titles);
  std::string shown;
  for (const TraceResult& r : results) {
    const TraceResult* base = find(results, r.source.label(), r.variant.recipe);
    const std::string head = r.source.label() + r.variant.recipe;
    const std::string css = head != shown ? "section" : "";
    std::vector<Cell> cells{{head != shown ? r.source.label() : "", css},
                            {head != shown ? r.variant.recipe : "", css + " name"},
                            {r.variant.lift.empty() ? "nothing" : r.variant.lift, css + " name"}};
    shown = head;
    for (const char* t : kOutputs) {
      const bool lower = r[t].rel_l2 < 0.9 * (*base)[t].rel_l2;
      cells.push_back({fixed(r[t].rel_l2, 4), css + (lower ? " good" : "")});
    }
    table.row(cells);
  }
  return table.item();
}

}  // namespace sagebwd::cli
