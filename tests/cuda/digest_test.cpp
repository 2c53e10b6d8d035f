// SPDX-License-Identifier: Apache-2.0
#include "support/digest.h"

#include <gtest/gtest.h>

#include "device_case.h"

namespace sagebwd::gpu {
namespace {

TEST(GpuDigest, Bits) {
  NEED_DEVICE();
  testing::DigestFile file;
  if (!file.wanted()) GTEST_SKIP() << "SAGEBWD_DIGEST names no file";
  for (int64_t number = 0; number < file.count(); ++number) {
    const testing::DigestCase c = testing::digest_case(number);
    DeviceCase dc(c.text);
    dc.cu_q = c.cu_q, dc.cu_k = c.cu_k, dc.dlse = c.dlse;
    dc.deterministic = true;  // or dQ would depend on the order of thread blocks
    for (const char* impl : {"cuda-sm90", "cuda-sm80", "cuda-plain"}) {
      dc.impl = impl;
      if (!device_candidate(dc, true).supported || !device_candidate(dc, false).supported) continue;
      file.write(impl, c, run_on_device(dc, make_case_inputs(dc)));
    }
  }
}

}  // namespace
}  // namespace sagebwd::gpu
