// SPDX-License-Identifier: Apache-2.0
#include "charts.h"

#include <algorithm>
#include <cmath>

#include "html.h"
#include "plot.h"
#include "published.h"
#include "table.h"

namespace sagebwd::cli {
namespace {

std::string legend(const std::vector<std::string>& recipes, bool published) {
  std::string out = "<div class=\"legend\">";
  for (const std::string& r : recipes)
    out += "<span class=\"c-" + r + "\">" + escape(r) + "</span>";
  if (published) out += "<span class=\"c-published\">published</span>";
  return out + "</div>\n";
}

/// Widens a range to the next 1, 2 or 5 on both sides.
std::pair<double, double> rounded_log_range(double low, double high) {
  const auto wide = log_ticks(low / 10, high * 10);
  double from = wide.front(), to = wide.back();
  for (double t : wide) {
    if (t <= low) from = t;
    if (t >= high) to = std::min(to, t);
  }
  return {from, to};
}

std::string tiles(const TraceResult& r) {
  return std::to_string(r.tile_q) + "×" + std::to_string(r.tile_k);
}

/// Calls f(label, results of all recipes) for every source, nothing lifted.
template <typename F>
void for_each_source(const Results& results, const std::vector<SourceGroup>& groups, F&& f) {
  for (const SourceGroup& g : groups)
    for (const std::string& label : g.labels) {
      std::vector<const TraceResult*> found;
      for (const std::string& recipe : recipes_of(results))
        if (const TraceResult* r = find(results, label, recipe)) found.push_back(r);
      f(label, found);
    }
}

/// The smallest of several cases' errors is set in bold.
const char* best_mark(const std::vector<const TraceResult*>& cases, const TraceResult* r,
                      const char* tensor) {
  if (cases.size() < 2) return "";
  return std::all_of(cases.begin(), cases.end(),
                     [&](const TraceResult* other) {
                       return (*r)[tensor].rel_l2 <= (*other)[tensor].rel_l2;
                     })
             ? " best"
             : "";
}

}  // namespace

std::string sweep_charts(const Results& results, const SourceGroup& group) {
  const auto recipes = recipes_of(results);
  std::vector<LineChart> charts;
  double low = 1e300, high = 0;
  bool published = false;
  for (const char* tensor : kOutputs) {
    LineChart chart{std::string(tensor) + ", relative L2 error",
                    group.captured ? "layer" : "σ of Q and K",
                    group.x,
                    0,
                    0,
                    {}};
    if (group.name == "gaussian") {
      Series s{"published", "published", false, {}};
      for (double sigma : group.x)
        if (const auto value = published_rel_l2(tensor, sigma)) s.points.push_back({sigma, *value});
      published |= !s.points.empty();
      chart.series.push_back(s);
    }
    for (const std::string& recipe : recipes) {
      Series s{recipe, recipe, true, {}};
      for (size_t i = 0; i < group.x.size(); ++i)
        if (const TraceResult* r = find(results, group.labels[i], recipe))
          s.points.push_back({group.x[i], (*r)[tensor].rel_l2});
      std::sort(s.points.begin(), s.points.end());
      chart.series.push_back(s);
    }
    for (const Series& s : chart.series)
      for (const auto& [x, y] : s.points)
        if (y > 0 && std::isfinite(y)) low = std::min(low, y), high = std::max(high, y);
    charts.push_back(chart);
  }
  if (high == 0) low = high = 1;  // every error is exactly zero: an empty axis
  std::string out = legend(recipes, published) + "<div class=\"charts\">\n";
  for (LineChart& c : charts) {
    std::tie(c.y_low, c.y_high) = rounded_log_range(low * 0.95, high * 1.05);
    out += "<figure>" + to_svg(c) + "</figure>\n";
  }
  return out + "</div>\n";
}

std::string bar_charts(const Results& results, const std::vector<SourceGroup>& groups) {
  double high = 0;
  std::vector<BarChart> charts;
  for_each_source(results, groups,
                  [&](const std::string& label, const std::vector<const TraceResult*>& cases) {
                    BarChart chart{label, {kOutputs.begin(), kOutputs.end()}, {}, 0};
                    for (const TraceResult* r : cases) {
                      BarChart::Bars bars{r->variant.recipe, r->variant.recipe, {}};
                      for (const char* t : kOutputs) {
                        bars.values.push_back((*r)[t].rel_l2);
                        if (std::isfinite((*r)[t].rel_l2)) high = std::max(high, (*r)[t].rel_l2);
                      }
                      chart.bars.push_back(bars);
                    }
                    charts.push_back(chart);
                  });
  std::string out = legend(recipes_of(results), false) + "<div class=\"charts thirds\">\n";
  for (BarChart& c : charts) {
    c.x_high = high > 0 ? high : 1;  // one scale for all
    out += "<figure>" + to_svg(c) + "</figure>\n";
  }
  return out + "</div>\n";
}

std::string error_table(const Results& results, const std::vector<SourceGroup>& groups) {
  std::vector<std::string> titles{"inputs", "recipe", "tiles"};
  titles.insert(titles.end(), kOutputs.begin(), kOutputs.end());
  titles.insert(titles.end(), kIntermediates.begin(), kIntermediates.end());
  HtmlTable table(titles);
  for_each_source(results, groups,
                  [&](const std::string& label, const std::vector<const TraceResult*>& cases) {
                    for (const TraceResult* r : cases) {
                      const bool first = r == cases.front();
                      const std::string css = first ? "group" : "";
                      std::vector<HtmlCell> cells{
                          {first ? label : "", css}, {r->variant.recipe, css}, {tiles(*r), css}};
                      for (const char* t : kOutputs)
                        cells.push_back({fixed((*r)[t].rel_l2, 4), css + best_mark(cases, r, t)});
                      for (const char* t : kIntermediates)
                        cells.push_back({fixed((*r)[t].rel_l2, 4), css + best_mark(cases, r, t)});
                      table.row(cells);
                    }
                  });
  return table.to_html();
}

std::string detail_table(const Results& results, const std::vector<SourceGroup>& groups) {
  HtmlTable table({"inputs", "recipe", "tensor", "cosine", "bias", "worst head", "worst row",
                   "its place", "rows off > 50%"});
  for_each_source(
      results, groups, [&](const std::string& label, const std::vector<const TraceResult*>& cases) {
        for (const TraceResult* r : cases)
          for (const char* t : kOutputs) {
            const TensorError& e = (*r)[t];
            const bool first = r == cases.front() && t == kOutputs.front();
            const std::string css = first ? "group" : "";
            table.row(
                {{first ? label : "", css},
                 {t == kOutputs.front() ? r->variant.recipe : "", css},
                 {t, css},
                 {fixed(e.cosine, 5), css},
                 {fixed(e.projection, 4), css},
                 {fixed(e.worst_head_rel_l2, 4), css},
                 {fixed(e.worst_row_error, 3), css},
                 {"head " + std::to_string(e.worst_head) + ", row " + std::to_string(e.worst_row),
                  css},
                 {fixed(100 * e.bad_rows, 2) + "%", css}});
          }
      });
  return table.to_html();
}

std::string lift_table(const Results& results) {
  std::vector<std::string> titles{"inputs", "recipe", "lifted"};
  titles.insert(titles.end(), kOutputs.begin(), kOutputs.end());
  HtmlTable table(titles);
  std::string shown;
  for (const TraceResult& r : results) {
    const TraceResult* base = find(results, r.source.label(), r.variant.recipe);
    const std::string head = r.source.label() + r.variant.recipe;
    const std::string css = head != shown ? "group" : "";
    std::vector<HtmlCell> cells{{head != shown ? r.source.label() : "", css},
                                {head != shown ? r.variant.recipe : "", css},
                                {r.variant.lift.empty() ? "nothing" : r.variant.lift, css}};
    shown = head;
    for (const char* t : kOutputs) {
      const bool lower = r[t].rel_l2 < 0.9 * (*base)[t].rel_l2;
      cells.push_back({fixed(r[t].rel_l2, 4), css + (lower ? " good" : "")});
    }
    table.row(cells);
  }
  return table.to_html();
}

}  // namespace sagebwd::cli
