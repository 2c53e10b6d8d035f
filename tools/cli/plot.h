// SPDX-License-Identifier: Apache-2.0
// Small SVG charts for the page of html.h: colours and fonts come from its style sheet, by class.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sagebwd::cli {

struct Series {
  std::string label;
  std::string css;   // colour class: paper, vectorwise, published, other1
  bool line = true;  // else hollow marks only
  std::vector<std::pair<double, double>> points;
};

/// A line chart with a logarithmic value axis.
struct LineChart {
  std::string title, x_label;
  std::vector<double> x_ticks;
  double y_low = 0, y_high = 0;  // both above 0; equal axes make charts comparable
  std::vector<Series> series;
};
std::string to_svg(const LineChart& chart);

/// Horizontal bars in clusters, on a linear axis from zero, each with its value beside it.
struct BarChart {
  std::string title;
  std::vector<std::string> clusters;
  struct Bars {
    std::string label, css;
    std::vector<double> values;  // one per cluster
  };
  std::vector<Bars> bars;
  double x_high = 0;
};
std::string to_svg(const BarChart& chart);

/// Steps 1, 2, 5, 10, … that cover [low, high] on a logarithmic axis.
std::vector<double> log_ticks(double low, double high);
/// About five round steps from 0 that cover [0, high].
std::vector<double> linear_ticks(double high);

}  // namespace sagebwd::cli
