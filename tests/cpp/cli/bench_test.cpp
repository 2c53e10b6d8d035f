// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "bench_run.h"
#include "sagebwd/error.h"

namespace sagebwd::cli {
namespace {

TEST(Bench, SharesFollowTheirDefinition) {
  const Pass p{"backward", {0.4, 0.1, 0.2}, 800, 100};
  const Peak peak{"x", "", 10000, 1000};
  EXPECT_DOUBLE_EQ(p.median(), 0.2);
  EXPECT_DOUBLE_EQ((Pass{"", {1, 4, 2, 3}, 0, 0}.median()), 2.5);
  EXPECT_DOUBLE_EQ(p.macs_per_second(), 4500);
  EXPECT_DOUBLE_EQ(p.int8_per_second(), 4000);
  EXPECT_DOUBLE_EQ(p.share(peak), 0.4);
  EXPECT_DOUBLE_EQ(p.share_of_int8_part(peak), 0.8);  // 0.1 s of 0.2 s is charged to FP32
}

TEST(Bench, PeakFollowsTheImplementation) {
  PeakLoops wide{}, narrow{}, absent{};
  wide.isa = "avx512-vnni", narrow.isa = "avx2", absent.isa = "other";
  wide.available = narrow.available = [] { return true; };
  absent.available = [] { return false; };
  const std::vector<PeakLoops> loops{absent, wide, narrow};
  EXPECT_STREQ(loops_for(loops, "cpu-avx2")->isa, "avx2");
  EXPECT_STREQ(loops_for(loops, "cpu-avx512-vnni")->isa, "avx512-vnni");
  EXPECT_STREQ(loops_for(loops, "ref")->isa, "avx512-vnni");  // the machine's best
  EXPECT_EQ(loops_for({absent}, "ref"), nullptr);
}

TEST(Bench, MeasuredPeaksArePlausible) {
  for (const PeakLoops& loops : peak_loops()) {
    if (!loops.available()) continue;
    const Peak p = measure_peak(loops, 1, 0.02);
    EXPECT_GT(p.fp32, 1e8) << p.isa;
    EXPECT_LT(p.int8, 1e13) << p.isa;  // a loop the compiler removed would be far above
  }
}

TEST(Bench, CountsWhatItTimes) {
  const auto c = spec::AttnCase::parse("h2 n128 d32 causal paper");
  const Benchmark b = run_benchmark({c}, {3, 1, 0.01}, Talk::quiet);
  ASSERT_EQ(b.cases.size(), 1u);
  const auto j = bench_json(b);
  const auto& r = j["results"][0];
  const int64_t one = int64_t{2} * 128 * 129 / 2 * 32;
  EXPECT_EQ(r["forward"]["int8_macs"], 2 * one);
  EXPECT_EQ(r["backward"]["int8_macs"], 4 * one);
  EXPECT_EQ(r["both"]["floating_macs"], one);
  EXPECT_GT(r["both"]["median_ms"], 0.0);
  EXPECT_NE(bench_table(b).find("backward"), std::string::npos);
}

TEST(Bench, RefusesACaseNobodyCanServe) {
  EXPECT_THROW(run_benchmark({spec::AttnCase::parse("d12")}, {1, 0, 0.01}, Talk::quiet), Error);
}

}  // namespace
}  // namespace sagebwd::cli
