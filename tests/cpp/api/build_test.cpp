// SPDX-License-Identifier: Apache-2.0
#include "sagebwd/build.h"

#include <gtest/gtest.h>

#include "sagebwd/attention.h"

namespace sagebwd {
namespace {

TEST(Build, SaysWhichBackendsItHas) {
  EXPECT_EQ(describe_build().find("CUDA") != std::string::npos, has_cuda());
  EXPECT_EQ(describe_build().substr(0, 3), "CPU");
  ASSERT_FALSE(describe_gpus().empty());
  EXPECT_FALSE(describe_gpus().front().empty());
}

TEST(Build, AGpuCallWithoutCudaSaysHowToBuildWithIt) {
  if (has_cuda()) GTEST_SKIP() << "this build has CUDA";
  ForwardArgs args;
  args.q = args.k = args.v = args.o = contiguous(nullptr, Dtype::bf16, {1, 1, 64, 64});
  args.device = Device::cuda;
  try {
    workspace_size(args);
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::unsupported);
    const std::string text = e.what();
    EXPECT_NE(text.find("no CUDA backend"), std::string::npos) << text;
    EXPECT_NE(text.find("nvcc"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace sagebwd
