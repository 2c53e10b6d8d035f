// SPDX-License-Identifier: Apache-2.0
#include "plot.h"

#include <algorithm>
#include <cmath>

#include "html.h"
#include "table.h"

namespace sagebwd::cli {
namespace {

std::string at(double x) { return fixed(x, 1); }

template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::string out;
  ((out += parts), ...);
  return out;
}

std::string text(double x, double y, const char* anchor, const std::string& content,
                 const char* css = "label") {
  return cat("<text class=\"", css, "\" x=\"", at(x), "\" y=\"", at(y), "\" text-anchor=\"", anchor,
             "\">", escape(content), "</text>\n");
}

std::string line(double x1, double y1, double x2, double y2, const char* css) {
  return cat("<line class=\"", css, "\" x1=\"", at(x1), "\" y1=\"", at(y1), "\" x2=\"", at(x2),
             "\" y2=\"", at(y2), "\"/>\n");
}

std::string open_svg(double width, double height, const std::string& title,
                     const char* css = "chart") {
  return cat("<svg class=\"", css, "\" role=\"img\" aria-label=\"", escape(title),
             "\" viewBox=\"0 0 ", fixed(width, 0), " ", fixed(height, 0), "\">\n");
}

/// A number as an axis shows it: no trailing zeros.
std::string tick(double value) {
  std::string s = significant(value, 2);
  if (s.find('.') != std::string::npos && s.find('e') == std::string::npos) {
    s.erase(s.find_last_not_of('0') + 1);
    if (s.back() == '.') s.pop_back();
  }
  return s;
}

/// Maps data to the drawing area of a line chart.
struct Frame {
  double left, right, top, bottom;
  double x_low, x_high, log_low, log_high;

  double x(double value) const {
    const double span = x_high - x_low;
    return left + (span > 0 ? (value - x_low) / span : 0.5) * (right - left);
  }
  double y(double value) const {
    return bottom - (std::log(value) - log_low) / (log_high - log_low) * (bottom - top);
  }
};

std::string draw(const Series& s, const Frame& f) {
  std::string path, marks;
  for (const auto& [x, y] : s.points) {
    // A logarithmic axis cannot show zeros. The table beside the chart has them.
    if (!(y > 0) || !std::isfinite(y)) continue;
    path += cat(path.empty() ? "M" : "L", at(f.x(x)), " ", at(f.y(y)));
    marks +=
        cat("<circle class=\"", s.line ? "dot" : "ring", "\" cx=\"", at(f.x(x)), "\" cy=\"",
            at(f.y(y)), "\" r=\"", s.line ? "4" : "5", "\"><title>",
            escape(cat(s.label, " at ", tick(x), ": ", significant(y, 3))), "</title></circle>\n");
  }
  const std::string stroke =
      s.line && !path.empty() ? cat("<path class=\"line\" d=\"", path, "\"/>\n") : "";
  return cat("<g class=\"c-", s.css, "\">\n", stroke, marks, "</g>\n");
}

}  // namespace

std::vector<double> log_ticks(double low, double high) {
  std::vector<double> ticks;
  for (int decade = static_cast<int>(std::floor(std::log10(low))); std::pow(10.0, decade) <= high;
       ++decade)
    for (double step : {1.0, 2.0, 5.0}) {
      const double value = step * std::pow(10.0, decade);
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push_back(value);
    }
  return ticks;
}

std::vector<double> linear_ticks(double high) {
  const double rough = high / 4;
  const double decade = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * decade;
  for (double s : {5.0, 2.5, 2.0, 1.0})
    if (s * decade >= rough * 0.999) step = s * decade;
  std::vector<double> ticks;
  for (int i = 0; i * step <= high * 1.001; ++i) ticks.push_back(i * step);
  return ticks;
}

std::string to_svg(const LineChart& c) {
  constexpr double kWidth = 480, kHeight = 320;
  const auto [x_low, x_high] = std::minmax_element(c.x_ticks.begin(), c.x_ticks.end());
  const Frame f{
      62, kWidth - 14, 34, kHeight - 44, *x_low, *x_high, std::log(c.y_low), std::log(c.y_high)};
  std::string out =
      open_svg(kWidth, kHeight, c.title) + text(f.left, 18, "start", c.title, "title");
  for (double y : log_ticks(c.y_low, c.y_high))
    out += line(f.left, f.y(y), f.right, f.y(y), "grid") +
           text(f.left - 8, f.y(y) + 4, "end", tick(y));
  out += line(f.left, f.bottom, f.right, f.bottom, "axis");
  for (double x : c.x_ticks)
    out += line(f.x(x), f.bottom, f.x(x), f.bottom + 4, "axis") +
           text(f.x(x), f.bottom + 18, "middle", tick(x));
  out += text((f.left + f.right) / 2, kHeight - 8, "middle", c.x_label);
  for (const Series& s : c.series) out += draw(s, f);
  return out + "</svg>\n";
}

std::string to_svg(const BarChart& c) {
  constexpr double kWidth = 340, kBar = 15, kGap = 3, kClusterGap = 16, kTop = 32, kLeft = 34,
                   kRight = 52;
  const double cluster = static_cast<double>(c.bars.size()) * (kBar + kGap) - kGap + kClusterGap;
  const double bottom = kTop + cluster * static_cast<double>(c.clusters.size());
  const double height = bottom + 26;
  const auto x = [&](double value) {
    return kLeft + std::clamp(value / c.x_high, 0.0, 1.0) * (kWidth - kLeft - kRight);
  };
  std::string out =
      open_svg(kWidth, height, c.title, "chart small") + text(0, 16, "start", c.title, "title");
  for (double value : linear_ticks(c.x_high))
    out += line(x(value), kTop - 2, x(value), bottom, "grid") +
           text(x(value), bottom + 16, "middle", tick(value));
  for (size_t g = 0; g < c.clusters.size(); ++g) {
    const double top = kTop + cluster * static_cast<double>(g) + kClusterGap / 2;
    out += text(kLeft - 8, top + (cluster - kClusterGap) / 2 + 4, "end", c.clusters[g]);
    for (size_t b = 0; b < c.bars.size(); ++b) {
      const double y = top + static_cast<double>(b) * (kBar + kGap), value = c.bars[b].values[g];
      const double width =
          std::isfinite(value) ? std::max(1.0, x(value) - kLeft) : kWidth - kLeft - kRight;
      const std::string hint =
          cat(c.clusters[g], ", ", c.bars[b].label, ": ", significant(value, 3));
      out += cat("<g class=\"c-", c.bars[b].css, "\"><rect class=\"bar\" x=\"", at(kLeft),
                 "\" y=\"", at(y), "\" width=\"", at(width), "\" height=\"", at(kBar),
                 "\" rx=\"2\"><title>", escape(hint), "</title></rect></g>\n");
      out += text(kLeft + width + 6, y + kBar - 3, "start", fixed(value, 3), "value");
    }
  }
  out += line(kLeft, kTop - 2, kLeft, bottom, "axis");
  return out + "</svg>\n";
}

}  // namespace sagebwd::cli
