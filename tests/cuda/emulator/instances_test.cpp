// SPDX-License-Identifier: Apache-2.0
// Every tuned kernel of the target once, against the recipe oracle: both types, both head dims,
// all recipes; with a mask, with documents, deterministic, dithered, with a cap of the logits, with
// block lists.
// every_kernel.sh fails when one is missing here.
#include <gtest/gtest.h>

#include "device_case.h"

namespace sagebwd::gpu {
namespace {

void expect_parity(const DeviceCase& dc) {
  const CaseInputs in = make_case_inputs(dc);
  const Results got = run_on_device(dc, in), want = run_oracle(dc, in, got);
  const double budget = dc.c.dtype == Dtype::bf16 ? 4e-3 : 2e-3;  // as in attention_test.cpp
  EXPECT_LE(relative_error(got.o, want.o), budget);
  EXPECT_LE(relative_error(got.dq, want.dq), budget);
  EXPECT_LE(relative_error(got.dk, want.dk), budget);
  EXPECT_LE(relative_error(got.dv, want.dv), budget);
  EXPECT_LE(largest_difference(got.lse, want.lse), 2e-4);
}

class Instances : public testing::TestWithParam<std::string> {
 protected:
  /// One head of keys for two of queries, and more than one tile of each.
  DeviceCase make(const char* rest) const { return DeviceCase(GetParam() + " h2 hk1 " + rest); }
};

TEST_P(Instances, Masked) { expect_parity(make("n140 window=90,9")); }

TEST_P(Instances, DeterministicDocuments) {
  DeviceCase dc = make("nq150 nk140 causal");
  dc.cu_q = {0, 0, 70, 150}, dc.cu_k = {0, 9, 9, 140};
  dc.deterministic = dc.dlse = true;
  dc.cu_on_device = dc.c.dtype == Dtype::f16;  // from there another kernel reads them
  expect_parity(dc);
}

TEST_P(Instances, DitheredDq) {
  DeviceCase dc = make("n140 causal rounding=dither:dQ");
  if (dc.c.recipe.scheme == Scheme::paper) return;
  if (!device_candidate(dc, true).supported) GTEST_SKIP() << device_candidate(dc, true).reason;
  expect_parity(dc);
  dc.deterministic = true;
  expect_parity(dc);
}

TEST_P(Instances, Capped) {
  const DeviceCase dc = make("n140 causal softcap=5");
  if (dc.c.recipe.scheme == Scheme::paper) return;
  if (!device_candidate(dc, true).supported) GTEST_SKIP() << device_candidate(dc, true).reason;
  expect_parity(dc);
}

TEST_P(Instances, Lists) {
  if (make("n140").c.recipe.scheme == Scheme::paper) return;
  expect_parity(make("nq140 nk300 keep=0.6 causal"));
  expect_parity(make("nq140 nk300 keep=0.6 blocks=64x128"));
  DeviceCase cut = make("nq600 nk300 keep=0.3 lists=skewed");  // the list of a key block is cut
  expect_parity(cut);
  cut.deterministic = true;
  expect_parity(cut);
}

std::vector<std::string> all() {
  std::vector<std::string> all;
  for (const char* d : {"d64 ", "d128 "})
    for (const char* type : {"bf16 ", "f16 "})
      for (const char* recipe : {"vectorwise", "paper"})
        all.push_back(std::string(d) + type + recipe);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Every, Instances, testing::ValuesIn(all()));

}  // namespace
}  // namespace sagebwd::gpu
