// SPDX-License-Identifier: Apache-2.0
// dQ from sums in half precision, which cuda-sm90 makes.
#include "cuda/tuned/query_sums.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "base/half.h"
#include "cuda/tile/layout.h"

namespace sagebwd::cuda::tuned {
namespace {

struct Kind {
  Dtype dtype;
  int d;
};

class HalfSums : public testing::TestWithParam<Kind> {};

TEST_P(HalfSums, BecomeDq) {
  const auto [dtype, d] = GetParam();
  constexpr int kHeads = 2, kQueries = 100;  // of kBlock
  constexpr float kScale = 0.5f, kTop = 4.0f;
  std::mt19937 rng(1);
  // All numbers are small integers times powers of two, so nothing is rounded.
  std::vector<QueryRow> rows(kHeads * kBlock);
  for (QueryRow& row : rows) row = {std::ldexp(1.0f, static_cast<int>(rng() % 9) - 4), 0.0f};
  const auto size = static_cast<size_t>(kHeads * kBlock * d);
  std::vector<uint16_t> sums(size), got(size, 0x7fff);
  std::vector<float> want(size);
  for (int head = 0; head < kHeads; ++head)
    for (int query = 0; query < kBlock; ++query)
      for (int channel = 0; channel < d; ++channel) {
        const float sum = static_cast<float>(static_cast<int>(rng() % 255) - 127);
        // Blocks of 16 channels in a strip of 16 queries: a lane has two neighbouring channels of
        // each eight, for the queries lane/4 and lane/4 + 8.
        const int lane = query % 8 * 4 + channel % 32 / 8, part = channel % 8 / 2;
        const int block = channel / 32 * 2 + part / 2;
        const int at = ((head * kBlock + query) / 16 * (d / 16) + block) * 256 + lane * 8 +
                       (part % 2 * 2 + query % 16 / 8) * 2 + channel % 2;
        sums[static_cast<size_t>(at)] = from_float<f16>(sum).bits;
        want[static_cast<size_t>((head * kBlock + query) * d + channel)] =
            sum * kScale * kTop / rows[static_cast<size_t>(head * kBlock + query)].divisor;
      }
  const uint32_t k_top = std::bit_cast<uint32_t>(kTop);
  QuerySums p{};
  p.seq = {.count = 1, .nq = kQueries, .nk = 1, .q_blocks = 1, .k_blocks = 1};
  p.d = d, p.h = kHeads, p.hk = 1, p.group = kHeads, p.tq = kBlock, p.scale = kScale;
  p.chunks = true, p.rows = rows.data();
  p.sums = sums.data(), p.halves = true, p.k_top = &k_top;
  p.k_mean_d = d;
  p.dq = {got.data(), 0, int64_t{kBlock} * d, d, true};
  launch_query_sums(p, dtype, d, 1, nullptr);
  for (size_t i = 0; i < size; ++i) {
    const bool there = static_cast<int>(i) / d % kBlock < kQueries;
    if (!there) {
      ASSERT_EQ(got[i], 0x7fff) << i;
    } else {
      ASSERT_EQ(dtype == Dtype::bf16 ? to_float(bf16{got[i]}) : to_float(f16{got[i]}), want[i])
          << i;
    }
  }
}

// All keys equal their mean, so the largest scale of K is 0, and dQ is the row sum of dS times the
// mean.
TEST_P(HalfSums, RowSumsOfEqualKeys) {
  const auto [dtype, d] = GetParam();
  constexpr int kQueries = 100;
  constexpr float kScale = 0.5f, kMean = 8.0f;
  std::mt19937 rng(2);
  std::vector<QueryRow> rows(kBlock);
  std::vector<float> row_sum(kBlock);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = {std::ldexp(1.0f, static_cast<int>(rng() % 9) - 4), 0.0f};
    row_sum[i] = static_cast<float>(static_cast<int>(rng() % 255) - 127);
  }
  const auto size = static_cast<size_t>(kBlock * d);
  std::vector<uint16_t> sums(size, 0), got(size, 0x7fff);
  const std::vector<float> mean(static_cast<size_t>(d), kMean);
  const uint32_t k_top = 0;
  QuerySums p{};
  p.seq = {.count = 1, .nq = kQueries, .nk = 1, .q_blocks = 1, .k_blocks = 1};
  p.d = d, p.h = p.hk = p.group = 1, p.tq = kBlock, p.scale = kScale;
  p.chunks = true, p.rows = rows.data();
  p.sums = sums.data(), p.halves = true, p.k_top = &k_top;
  p.k_mean = mean.data(), p.k_mean_d = d, p.row_sum = row_sum.data();
  p.dq = {got.data(), 0, int64_t{kBlock} * d, d, true};
  launch_query_sums(p, dtype, d, 1, nullptr);
  for (size_t i = 0; i < size_t{kQueries} * static_cast<size_t>(d); ++i) {
    const size_t query = i / static_cast<size_t>(d);
    ASSERT_EQ(dtype == Dtype::bf16 ? to_float(bf16{got[i]}) : to_float(f16{got[i]}),
              row_sum[query] * kScale / rows[query].divisor * kMean)
        << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Every, HalfSums,
                         testing::Values(Kind{Dtype::bf16, 64}, Kind{Dtype::bf16, 128},
                                         Kind{Dtype::f16, 64}, Kind{Dtype::f16, 128}));

}  // namespace
}  // namespace sagebwd::cuda::tuned
