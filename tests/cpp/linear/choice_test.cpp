// SPDX-License-Identifier: Apache-2.0
// Who serves the linear branch of a call, and what is said where nobody does.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "linear/linear_problem.h"
#include "sagebwd/error.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

struct Pin {
  explicit Pin(const char* name) { setenv("SAGEBWD_IMPL", name, 1); }
  ~Pin() { unsetenv("SAGEBWD_IMPL"); }
};

std::string thrown_by(LinearForwardArgs args) {
  try {
    workspace_size(args);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::unsupported);
    return e.what();
  }
  return "";
}

TEST(LinearChoice, NamesAreThoseOfAttention) {
  const std::vector<std::string> names = all_implementations();
  for (const dispatch::Sla2* impl : dispatch::sla2_implementations())
    EXPECT_NE(std::find(names.begin(), names.end(), impl->name), names.end()) << impl->name;
}

TEST(LinearChoice, TakesThePinnedOne) {
  LinearProblem x({});
  const spec::LinearProblem p = spec::resolve(x.forward_args(), false);
  EXPECT_EQ(dispatch::choose(p).name, std::string(fastest().name));
  for (const char* name : {"cpu-scalar", "ref"}) {
    const Pin pin(name);
    EXPECT_EQ(dispatch::choose(p).name, std::string(name));
    EXPECT_EQ(refusal(x.forward_args()), "");
    EXPECT_EQ(refusal(x.backward_args()), "");
  }
}

TEST(LinearChoice, WhatRefusesSaysSoBeforehand) {
  LinearProblem x({});
  const Pin pin("cuda-sm90");  // in a build without it, or without a linear branch of its own
  const std::string reasons = refusal(x.forward_args());
  EXPECT_NE(reasons.find("\n  cpu-scalar: SAGEBWD_IMPL pins cuda-sm90"), std::string::npos)
      << reasons;
  EXPECT_NE(thrown_by(x.forward_args()).find(reasons), std::string::npos);
  EXPECT_EQ(refusal(x.backward_args()), reasons);
}

TEST(LinearChoice, ReasonsOfACallThatMixes) {
  LinearProblem x({});
  LinearForwardArgs args = x.forward_args();
  const std::vector<float> alpha(static_cast<size_t>(x.s.h * x.rows()), 0.5f);
  args.alpha = {.data = alpha.data(), .batches = 1, .rows = x.rows(), .block = x.s.block_q};
  args.sparse = args.q;
  const std::string reasons = refusal(args);
  EXPECT_NE(reasons.find("cpu-scalar: has a linear branch that does not mix"), std::string::npos);
  EXPECT_NE(reasons.find("ref: has a linear branch that neither mixes"), std::string::npos);
}

TEST(LinearChoice, TheMixCannotBePinned) {
  const Pin pin("ref");  // which has none
  EXPECT_EQ(dispatch::mix_on(Device::cpu).device, Device::cpu);
}

}  // namespace
}  // namespace sagebwd::testing
