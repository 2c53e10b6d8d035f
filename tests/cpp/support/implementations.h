// SPDX-License-Identifier: Apache-2.0
// Tests that run once per implementation of the dispatcher's list, or once per micro-kernel table.
// What this CPU lacks is skipped with the reason the library itself gives.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpu/isa/kernels.h"
#include "dispatch/choose.h"

namespace sagebwd::testing {

/// The implementation of that name; it must exist.
const dispatch::Implementation& implementation(const std::string& name);
inline const dispatch::Implementation& reference() { return implementation("ref"); }

/// Why it cannot run on this machine; empty when it can.
std::string unavailable(const dispatch::Implementation& impl);

/// The first implementation of the list that runs here: what a user gets.
const dispatch::Implementation& fastest();

/// Every implementation, best first; production ones leave the reference out.
std::vector<std::string> all_implementations();
std::vector<std::string> production_implementations();
/// Those of the production implementations that run here.
std::vector<const dispatch::Implementation*> available_production();

std::vector<std::string> kernel_tables();
const cpu::isa::Kernels& kernel_table(const std::string& name);

class PerImplementation : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string reason = unavailable(impl());
    if (!reason.empty()) GTEST_SKIP() << GetParam() << ": " << reason;
  }
  const dispatch::Implementation& impl() const { return implementation(GetParam()); }
};

class PerKernelTable : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const char* reason = kernels().unavailable();
    if (reason != nullptr) GTEST_SKIP() << GetParam() << ": " << reason;
  }
  const cpu::isa::Kernels& kernels() const { return kernel_table(GetParam()); }
};

/// "cpu-avx2" as part of a test name.
std::string test_name(const ::testing::TestParamInfo<std::string>& info);

#define SAGE_FOR_ALL_IMPLEMENTATIONS(suite)                                                \
  INSTANTIATE_TEST_SUITE_P(, suite,                                                        \
                           ::testing::ValuesIn(::sagebwd::testing::all_implementations()), \
                           ::sagebwd::testing::test_name)
#define SAGE_FOR_PRODUCTION_IMPLEMENTATIONS(suite)                                                \
  INSTANTIATE_TEST_SUITE_P(, suite,                                                               \
                           ::testing::ValuesIn(::sagebwd::testing::production_implementations()), \
                           ::sagebwd::testing::test_name)
#define SAGE_FOR_KERNEL_TABLES(suite)                                                         \
  INSTANTIATE_TEST_SUITE_P(, suite, ::testing::ValuesIn(::sagebwd::testing::kernel_tables()), \
                           ::sagebwd::testing::test_name)

}  // namespace sagebwd::testing
