// SPDX-License-Identifier: Apache-2.0
// Numbers, tables, markup and charts.
#include <gtest/gtest.h>

#include <cmath>

#include "base/suggest.h"
#include "commands.h"
#include "html.h"
#include "plot.h"
#include "table.h"
#include "words.h"

namespace sagebwd::cli {
namespace {

TEST(Numbers, KeepTheirDigits) {
  EXPECT_EQ(significant(0.01844), "0.0184");
  EXPECT_EQ(significant(12.345), "12.3");
  EXPECT_EQ(significant(1234.5), "1234");
  EXPECT_EQ(significant(1.2e-7, 2), "1.2e-07");
  EXPECT_EQ(significant(0.0), "0");
  EXPECT_EQ(significant(std::nan("")), "nan");
  EXPECT_EQ(significant(-INFINITY), "-inf");
  EXPECT_EQ(fixed(-0.00001, 3), "0.000");
  EXPECT_EQ(fixed(-0.5, 1), "-0.5");
  EXPECT_EQ(shortest(1.0), "1");
  EXPECT_EQ(shortest(0.3), "0.3");
  EXPECT_EQ(percent(0.0588), "5.9%");
  EXPECT_EQ(percent(0.171), "17%");
  EXPECT_EQ(percent(0.0052), "0.52%");
}

TEST(Table, AlignsTextThatIsNotAscii) {
  Table t({{"name", Side::left}, {"σ"}});
  t.row({"a", "1"});
  t.heading("group");
  t.row({"×long×", "10"});
  EXPECT_EQ(t.to_string(),
            "name     σ\n"
            "──────  ──\n"
            "a        1\n"
            "\ngroup\n"
            "×long×  10\n");
}

TEST(Html, EscapesAndMarksCode) {
  EXPECT_EQ(escape("a<b & \"c\">"), "a&lt;b &amp; &quot;c&quot;&gt;");
  EXPECT_EQ(prose("`x<y` and `paper`"),
            "<code>x&lt;y</code> and <code class=\"arm c-paper\">paper</code>");
  EXPECT_EQ(prose("a lone ` stays"), "a lone ` stays");
  HtmlTable t({"<i>"});
  t.row({{"<b>", "good"}});
  EXPECT_NE(t.to_html().find("<td class=\"good\">&lt;b&gt;</td>"), std::string::npos);
  EXPECT_NE(t.to_html().find("<th>&lt;i&gt;</th>"), std::string::npos);
}

TEST(Plot, TicksAreRoundAndInside) {
  EXPECT_EQ(log_ticks(0.01, 0.2).size(), 5u);  // 0.01 0.02 0.05 0.1 0.2
  EXPECT_DOUBLE_EQ(log_ticks(0.03, 2)[0], 0.05);
  const auto linear = linear_ticks(0.174);
  EXPECT_DOUBLE_EQ(linear[1], 0.05);
  EXPECT_LE(linear.back(), 0.174);
  EXPECT_EQ(linear_ticks(1.0).back(), 1.0);
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(Plot, LineChartDrawsEveryFinitePoint) {
  const LineChart chart{"dQ",
                        "σ",
                        {1, 3, 10},
                        0.01,
                        1,
                        {{"ours", "vectorwise", true, {{1, .02}, {3, .06}, {10, .5}}},
                         {"theirs", "published", false, {{1, .02}, {3, NAN}, {10, 0}}}}};
  const std::string svg = to_svg(chart);
  EXPECT_EQ(count(svg, "class=\"dot\""), 3u);
  EXPECT_EQ(count(svg, "class=\"ring\""), 1u);
  EXPECT_EQ(count(svg, "<path"), 1u);
  EXPECT_EQ(count(svg, "nan"), 0u);
  EXPECT_EQ(count(svg, "<g"), count(svg, "</g>"));
}

TEST(Plot, BarsGrowWithTheirValues) {
  const BarChart chart{
      "sink", {"O", "dQ"}, {{"a", "paper", {0.1, 0.2}}, {"b", "vectorwise", {0.0, NAN}}}, 0.2};
  const std::string svg = to_svg(chart);
  EXPECT_EQ(count(svg, "class=\"bar\""), 4u);
  EXPECT_NE(svg.find("width=\"127.0\""), std::string::npos) << svg;  // half of the drawing area
  EXPECT_NE(svg.find("width=\"254.0\""), std::string::npos) << svg;
  EXPECT_NE(svg.find(">0.200<"), std::string::npos);
}

TEST(CommandLine, IsQuotedForAShell) {
  const char* argv[] = {"/x/sagebwd", "trace", "--case", "h8 n64", "--lift", "S'"};
  EXPECT_EQ(join_command(6, argv), "sagebwd trace --case 'h8 n64' --lift 'S'\\'''");
}

TEST(Suggest, CountsSlipsOfTheKeyboard) {
  EXPECT_EQ(edit_distance("trace", "trace"), 0u);
  EXPECT_EQ(edit_distance("trac", "trace"), 1u);
  EXPECT_EQ(edit_distance("casual", "causal"), 1u);  // two neighbours swapped
  EXPECT_EQ(edit_distance("DV", "dV"), 0u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
}

TEST(Suggest, NamesTheOneNearWord) {
  const std::vector<std::string> commands{"trace", "report", "bench", "info"};
  EXPECT_EQ(nearest_word("trac", commands), "trace");
  EXPECT_EQ(nearest_word("re", commands), "report");  // a beginning
  EXPECT_EQ(nearest_word("xyz", commands), "");
  EXPECT_EQ(nearest_word("", commands), "");
  EXPECT_EQ(nearest_word(std::string(1000, 't'), commands), "");
  EXPECT_EQ(nearest_word("dX", {"dV", "dQ"}), "");  // as near to one as to the other
  EXPECT_EQ(nearest_word("vec", {"paper", "vectorwise"}), "vectorwise");
  EXPECT_EQ(did_you_mean("bnech", commands), "; did you mean \"bench\"?");
  EXPECT_EQ(did_you_mean("fp4", {"paper", "vectorwise"}), "");
}

}  // namespace
}  // namespace sagebwd::cli
