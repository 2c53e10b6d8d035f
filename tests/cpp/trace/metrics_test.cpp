// SPDX-License-Identifier: Apache-2.0
#include "trace/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace sagebwd::trace {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

ErrorStats compare(const std::vector<std::vector<double>>& value,
                   const std::vector<std::vector<double>>& ref) {
  ErrorStats s;
  for (size_t i = 0; i < ref.size(); ++i)
    s.add_row(value[i].data(), ref[i].data(), static_cast<int64_t>(ref[i].size()),
              static_cast<int64_t>(i));
  s.finish();
  return s;
}

TEST(Metrics, FiguresOfASmallExample) {
  // error = (1, 0, -1, 1), |ref|² = 1 + 4 + 9 + 16 = 30
  const ErrorStats s = compare({{2, 2}, {2, 5}}, {{1, 2}, {3, 4}});
  EXPECT_EQ(s.count, 4);
  EXPECT_DOUBLE_EQ(s.rel_l2, std::sqrt(3.0 / 30.0));
  EXPECT_DOUBLE_EQ(s.cosine, (2 + 4 + 6 + 20) / (std::sqrt(37.0) * std::sqrt(30.0)));
  EXPECT_DOUBLE_EQ(s.projection, (1.0 - 3.0 + 4.0) / 30.0);
  EXPECT_EQ(s.worst_row, 0);
  EXPECT_DOUBLE_EQ(s.worst_row_error, 1.0 / std::sqrt(5.0));
  EXPECT_EQ(s.bad_row_fraction, 0.0);
}

TEST(Metrics, ProjectionIsTheSystematicPart) {
  const ErrorStats shrunk = compare({{0.98, 1.96}}, {{1, 2}});
  EXPECT_NEAR(shrunk.projection, -0.02, 1e-15);
  EXPECT_NEAR(shrunk.cosine, 1.0, 1e-15);
  const ErrorStats noise = compare({{1 + 0.2, 2 - 0.1}}, {{1, 2}});  // orthogonal to the reference
  EXPECT_NEAR(noise.projection, 0.0, 1e-15);
  EXPECT_NEAR(noise.rel_l2, 0.1, 1e-15);
}

TEST(Metrics, EqualTensorsHaveNoError) {
  const ErrorStats s = compare({{1, -2}, {0, 3}}, {{1, -2}, {0, 3}});
  EXPECT_EQ(s.rel_l2, 0.0);
  EXPECT_NEAR(s.cosine, 1.0, 1e-15);
  EXPECT_EQ(s.projection, 0.0);
  EXPECT_EQ(s.worst_row_error, 0.0);
  EXPECT_EQ(s.worst_row, 0);
}

TEST(Metrics, RowsMayComeInPiecesAndAnyOrder) {
  const std::vector<double> ref = {1, 2, 3, 4, 5, 6}, value = {1.5, 2, 3, 4, 4, 6};
  ErrorStats pieces;
  pieces.add_row(&value[4], &ref[4], 2, 1);
  pieces.add_row(&value[0], &ref[0], 1, 0);
  pieces.add_row(&value[3], &ref[3], 1, 1);
  pieces.add_row(&value[1], &ref[1], 2, 0);
  pieces.finish();
  const ErrorStats whole = compare({{1.5, 2, 3}, {4, 4, 6}}, {{1, 2, 3}, {4, 5, 6}});
  EXPECT_DOUBLE_EQ(pieces.rel_l2, whole.rel_l2);
  EXPECT_DOUBLE_EQ(pieces.cosine, whole.cosine);
  EXPECT_DOUBLE_EQ(pieces.projection, whole.projection);
  EXPECT_EQ(pieces.worst_row, whole.worst_row);
  EXPECT_DOUBLE_EQ(pieces.worst_row_error, whole.worst_row_error);
}

TEST(Metrics, FloatsAndDoublesCount) {
  const float value[2] = {1.5f, 2.0f};
  const double ref[2] = {1.0, 2.0};
  ErrorStats s;
  s.add_row(value, ref, 2, 0);
  s.finish();
  EXPECT_DOUBLE_EQ(s.rel_l2, 0.5 / std::sqrt(5.0));
}

TEST(Metrics, BadRowsAreThoseAboveHalf) {
  const ErrorStats s = compare({{1.49}, {1.51}, {-1}, {1}}, {{1}, {1}, {1}, {1}});
  EXPECT_EQ(s.bad_row_fraction, 0.5);
  EXPECT_EQ(s.worst_row, 2);
  EXPECT_DOUBLE_EQ(s.worst_row_error, 2.0);
}

TEST(Metrics, ZeroReference) {
  const ErrorStats both = compare({{0, 0}}, {{0, 0}});
  EXPECT_EQ(both.rel_l2, 0.0);
  EXPECT_EQ(both.cosine, 1.0);
  EXPECT_EQ(both.worst_row_error, 0.0);
  const ErrorStats wrong = compare({{0, 1}}, {{0, 0}});
  EXPECT_EQ(wrong.rel_l2, kInf);
  EXPECT_EQ(wrong.cosine, 0.0);
  EXPECT_EQ(wrong.bad_row_fraction, 1.0);
}

/// The first row of a causal dQ is exactly zero in exact maths, and 1e-17 in FP64: a small value
/// there is a small error.
TEST(Metrics, RowWithoutAReferenceIsJudgedByTheTypicalRow) {
  const ErrorStats s = compare({{1e-3}, {1.0}, {0.9}}, {{1e-17}, {1.0}, {1.0}});
  EXPECT_EQ(s.worst_row, 2);
  EXPECT_NEAR(s.worst_row_error, 0.1, 1e-12);
  const ErrorStats wrong = compare({{2.0}, {1.0}, {0.9}}, {{0.0}, {1.0}, {1.0}});
  EXPECT_EQ(wrong.worst_row, 0);
  EXPECT_GT(wrong.worst_row_error, 2.0);
}

TEST(Metrics, NanIsInfinitelyWrong) {
  const ErrorStats s = compare({{1}, {std::nan("")}}, {{1}, {1}});
  EXPECT_TRUE(std::isnan(s.rel_l2));
  EXPECT_EQ(s.worst_row, 1);
  EXPECT_EQ(s.worst_row_error, kInf);
  EXPECT_EQ(s.bad_row_fraction, 0.5);
}

TEST(Metrics, AppendCountsRowsOn) {
  ErrorStats a = compare({{1}, {1.1}}, {{1}, {1}});
  a.append(compare({{1}, {1.4}}, {{1}, {1}}));
  a.finish();
  EXPECT_EQ(a.count, 4);
  EXPECT_EQ(a.worst_row, 3);
  EXPECT_NEAR(a.rel_l2, std::sqrt(0.17 / 4), 1e-15);
}

TEST(Metrics, NothingAdded) {
  ErrorStats s;
  s.finish();
  EXPECT_EQ(s.count, 0);
  EXPECT_EQ(s.worst_row, -1);
  EXPECT_EQ(s.rel_l2, 0.0);
  EXPECT_EQ(s.bad_row_fraction, 0.0);
}

}  // namespace
}  // namespace sagebwd::trace
