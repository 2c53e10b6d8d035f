// SPDX-License-Identifier: Apache-2.0
#include "charts.h"

#include <algorithm>
#include <cmath>

#include "html.h"
#include "plot.h"
#include "table.h"
#include "trace/published.h"

namespace sagebwd::cli {
namespace {

std::string legend(const std::vector<Shown>& shown, bool published) {
  std::string out = "<div class=\"legend\">";
  for (const Shown& v : shown)
    out += "<span class=\"c-" + v.css + "\">" + escape(v.label) + "</span>";
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

std::string sweep_charts(const Results& results, const Sweep& sweep) {
  const auto shown = shown_variants(results);
  std::vector<LineChart> charts;
  double low = 1e300, high = 0;
  bool published = false;
  for (const char* tensor : kOutputs) {
    LineChart chart{std::string(tensor) + ", relative L2 error",
                    sweep.captured ? "layer" : "σ of Q and K",
                    sweep.x,
                    0,
                    0,
                    {}};
    if (sweep.name == "gaussian") {
      Series s{"published", "published", false, {}};
      for (double sigma : sweep.x)
        if (const auto value = trace::published_rel_l2(tensor, sigma))
          s.points.push_back({sigma, *value});
      published |= !s.points.empty();
      chart.series.push_back(s);
    }
    for (const Shown& v : shown) {
      Series s{v.label, v.css, true, {}};
      for (size_t i = 0; i < sweep.x.size(); ++i)
        if (const TraceResult* r = find(results, sweep.labels[i], v.recipe, v.lift))
          s.points.push_back({sweep.x[i], (*r)[tensor].rel_l2});
      std::sort(s.points.begin(), s.points.end());
      chart.series.push_back(s);
    }
    for (const Series& s : chart.series)
      for (const auto& [x, y] : s.points)
        if (y > 0 && std::isfinite(y)) low = std::min(low, y), high = std::max(high, y);
    charts.push_back(chart);
  }
  if (high == 0) low = high = 1;  // every error is exactly zero: an empty axis
  std::string out = legend(shown, published) + "<div class=\"charts\">\n";
  for (LineChart& c : charts) {
    std::tie(c.y_low, c.y_high) = rounded_log_range(low * 0.95, high * 1.05);
    out += "<figure>" + to_svg(c) + "</figure>\n";
  }
  return out + "</div>\n";
}

std::string bar_charts(const Results& results, const std::vector<Sweep>& sweeps) {
  double high = 0;
  std::vector<BarChart> charts;
  for (const SourceCases& source : cases_of(results, sweeps)) {
    BarChart chart{source.label, {kOutputs.begin(), kOutputs.end()}, {}, 0};
    for (const TraceResult* r : source.cases) {
      const std::string name = display_name(r->variant);
      BarChart::Bars bars{name, r->variant.lift.empty() ? name : "other1", {}};
      for (const char* t : kOutputs) {
        bars.values.push_back((*r)[t].rel_l2);
        if (std::isfinite((*r)[t].rel_l2)) high = std::max(high, (*r)[t].rel_l2);
      }
      chart.bars.push_back(bars);
    }
    charts.push_back(chart);
  }
  std::string out = legend(shown_variants(results), false) + "<div class=\"charts thirds\">\n";
  for (BarChart& c : charts) {
    c.x_high = high > 0 ? high : 1;  // one scale for all
    out += "<figure>" + to_svg(c) + "</figure>\n";
  }
  return out + "</div>\n";
}

std::string error_table(const Results& results, const std::vector<Sweep>& sweeps) {
  std::vector<const char*> tensors(kOutputs.begin(), kOutputs.end());
  tensors.insert(tensors.end(), kIntermediates.begin(), kIntermediates.end());
  std::vector<HtmlCell> titles{"inputs", {"recipe", "name"}, "tiles"};
  titles.insert(titles.end(), tensors.begin(), tensors.end());
  HtmlTable table(titles);
  for (const SourceCases& source : cases_of(results, sweeps))
    for (const TraceResult* r : source.cases) {
      const bool first = r == source.cases.front();
      const std::string css = first ? "section" : "";
      std::vector<HtmlCell> cells{{first ? source.label : "", css},
                                  {display_name(r->variant), css + " name"},
                                  {tiles(*r), css}};
      for (const char* t : tensors)
        cells.push_back({fixed((*r)[t].rel_l2, 4), css + (is_best(source, *r, t) ? " best" : "")});
      table.row(std::move(cells));
    }
  return table.to_html();
}

std::string detail_table(const Results& results, const std::vector<Sweep>& sweeps) {
  HtmlTable table({"inputs",
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
  return table.to_html();
}

std::string lift_table(const Results& results) {
  std::vector<HtmlCell> titles{"inputs", {"recipe", "name"}, {"lifted", "name"}};
  titles.insert(titles.end(), kOutputs.begin(), kOutputs.end());
  HtmlTable table(titles);
  std::string shown;
  for (const TraceResult& r : results) {
    const TraceResult* base = find(results, r.source.label(), r.variant.recipe);
    const std::string head = r.source.label() + r.variant.recipe;
    const std::string css = head != shown ? "section" : "";
    std::vector<HtmlCell> cells{
        {head != shown ? r.source.label() : "", css},
        {head != shown ? r.variant.recipe : "", css + " name"},
        {r.variant.lift.empty() ? "nothing" : r.variant.lift, css + " name"}};
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
