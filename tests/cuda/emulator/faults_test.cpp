// SPDX-License-Identifier: Apache-2.0
// Small problems that keep the pipelines of Hopper's kernels busy: places of all rings are used
// again. faults.sh runs them with mistakes in the emulator.
#include <gtest/gtest.h>

#include "device_case.h"

namespace sagebwd::gpu {
namespace {

void expect_parity(const DeviceCase& dc, bool backward) {
  SCOPED_TRACE(dc.c.to_string());
  ASSERT_EQ(device_candidate(dc, false).name, "cuda-sm90");
  const CaseInputs in = make_case_inputs(dc);
  const Results got = run_on_device(dc, in), want = run_oracle(dc, in, got);
  constexpr double kBudget = 1e-2;  // as in attention_test.cpp
  EXPECT_LE(relative_error(got.o, want.o), kBudget);
  EXPECT_LE(largest_difference(got.lse, want.lse), 4e-3);
  if (!backward) return;
  ASSERT_EQ(device_candidate(dc, true).name, "cuda-sm90");
  EXPECT_LE(relative_error(got.dq, want.dq), kBudget);
  EXPECT_LE(relative_error(got.dk, want.dk), kBudget);
  EXPECT_LE(relative_error(got.dv, want.dv), kBudget);
}

class Faults : public testing::Test {
  void SetUp() override {
    if (tuned_implementation() != "cuda-sm90") GTEST_SKIP() << "for cuda-sm90";
  }
};

TEST_F(Faults, Dense) {
  for (const char* text :
       {"h5 hk1 nq300 nk600 d128 bf16 tokenwise", "h2 n400 d64 f16 causal tokenwise"})
    expect_parity(DeviceCase(text), true);
}
TEST_F(Faults, Listed) {
  expect_parity(DeviceCase("h3 nq300 nk1300 d128 bf16 keep=0.9 blocks=128x128 tokenwise"), false);
}

}  // namespace
}  // namespace sagebwd::gpu
