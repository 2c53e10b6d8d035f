// SPDX-License-Identifier: Apache-2.0
// Numbers, tables, words of the command line.
#include <gtest/gtest.h>

#include <cmath>

#include "base/suggest.h"
#include "commands.h"
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
