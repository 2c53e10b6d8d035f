// SPDX-License-Identifier: Apache-2.0
// Which GPUs are refused although the kernels would run there.
#include "cuda/host/device.h"

#include <gtest/gtest.h>

namespace sagebwd::cuda {
namespace {

TEST(Devices, SlowInt8IsRefusedWithTheReason) {
  const std::string reason = slow_int8(10, 3);
  EXPECT_NE(reason.find("B300"), std::string::npos) << reason;
  EXPECT_NE(reason.find("SAGEBWD_IMPL"), std::string::npos) << reason;
  for (auto [major, minor] : {std::pair{8, 0}, {8, 6}, {8, 9}, {9, 0}, {10, 0}, {12, 0}, {13, 3}})
    EXPECT_EQ(slow_int8(major, minor), "") << major << "." << minor;
}

}  // namespace
}  // namespace sagebwd::cuda
