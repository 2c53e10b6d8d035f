// SPDX-License-Identifier: Apache-2.0
// Soft capping on a GPU: cuda-sm80 and cuda-plain against the recipe oracle with the same tiles.
// Keys have a large mean, which centres take out of the logits: a cap needs it back.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "device_case.h"

namespace sagebwd::gpu {
namespace {

void expect_parity(const DeviceCase& dc) {
  SCOPED_TRACE(dc.impl + " " + dc.c.to_string());
  ASSERT_EQ(device_candidate(dc, false).name, dc.impl);
  ASSERT_TRUE(device_candidate(dc, false).supported && device_candidate(dc, true).supported);
  const CaseInputs in = make_case_inputs(dc);
  const float shift = dc.partial_kv ? 0.4f : 0.0f;
  const Results gpu = run_on_device(dc, in, shift), oracle = run_oracle(dc, in, gpu, shift);
  const double budget = dc.c.dtype == Dtype::bf16 ? 4e-3 : 2e-3;
  const double o = relative_error(gpu.o, oracle.o), dq = relative_error(gpu.dq, oracle.dq),
               dk = relative_error(gpu.dk, oracle.dk), dv = relative_error(gpu.dv, oracle.dv),
               lse = largest_difference(gpu.lse, oracle.lse),
               top = largest_difference(gpu.max_logit, oracle.max_logit);
  std::printf("capped %-10s %-70s o %.1e dq %.1e dk %.1e dv %.1e lse %.1e\n", dc.impl.c_str(),
              dc.c.to_string().c_str(), o, dq, dk, dv, lse);
  EXPECT_LE(o, budget);
  EXPECT_LE(dq, budget);
  EXPECT_LE(dk, budget);
  EXPECT_LE(dv, budget);
  EXPECT_LE(lse, 2e-4);
  EXPECT_LE(top, 2e-4);
}

DeviceCase offset_case(const std::string& text, const char* impl) {
  DeviceCase dc(text);
  dc.kind = trace::InputKind::offset;
  dc.impl = impl;
  return dc;
}

TEST(GpuSoftcap, TunedParity) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 hk1 n140 d64 bf16 causal softcap=5", "h2 hk1 n140 d64 f16 softcap=50",
        "h2 hk1 nq140 nk200 d128 bf16 window=90,9 softcap=2",
        "h2 hk1 n140 d128 f16 causal softcap=20", "n140 d72 bf16 softcap=3",
        "n140 d64 bf16 smooth_k=off rotate=off softcap=1", "n140 d64 f16 softcap=1e6",
        "nq70 nk900 d64 bf16 softcap=5", "nq70 nk900 d128 f16 softcap=20"})  // several octaves
    expect_parity(offset_case(text, "cuda-sm80"));
  DeviceCase dc = offset_case("h2 hk1 nq150 nk140 d64 bf16 causal softcap=4", "cuda-sm80");
  dc.cu_q = {0, 0, 70, 150}, dc.cu_k = {0, 9, 9, 140};
  dc.deterministic = dc.dlse = true;
  expect_parity(dc);
  DeviceCase part = offset_case("h2 n140 d64 bf16 softcap=6", "cuda-sm80");
  part.partial_kv = true;
  expect_parity(part);
  DeviceCase codes = offset_case("h2 hk1 n140 d64 bf16 causal softcap=5", "cuda-sm80");
  codes.codes = true;
  expect_parity(codes);
}

TEST(GpuSoftcap, PlainParity) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 hk1 n140 d64 f32 causal softcap=5", "n140 d256 bf16 softcap=50",
        "n140 d64 f32 paper smooth_q=on softcap=5", "n140 d64 bf16 softcap=0.3",
        "n140 d64 f32 rounding=dither softcap=10", "n192 d64 bf16 keep=0.6 softcap=5",
        // A smaller cap magnifies the rounding of logits, which keys with a large mean have.
        "n140 d64 f32 lift=S,O,S2,dV,dP,dQ,dK softcap=0.01"})
    expect_parity(offset_case(text, "cuda-plain"));
  DeviceCase dc = offset_case("h2 hk1 nq150 nk140 d40 f32 causal softcap=4", "cuda-plain");
  dc.cu_q = {0, 0, 70, 150}, dc.cu_k = {0, 9, 9, 140};
  dc.dlse = dc.partial_kv = true;
  expect_parity(dc);
  DeviceCase codes = offset_case("h2 hk1 n140 d64 bf16 causal softcap=5", "cuda-plain");
  codes.codes = true;
  expect_parity(codes);
}

TEST(GpuSoftcap, KeepsNanWhereItIs) {
  NEED_DEVICE();
  for (const char* impl : {"cuda-sm80", "cuda-plain"}) {
    const DeviceCase dc = offset_case("n140 d64 bf16 causal softcap=5", impl);
    CaseInputs in = make_case_inputs(dc);
    in.x.q[7 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    in.x.k[130 * 64 + 1] = std::numeric_limits<float>::infinity();
    const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
    for (int64_t i = 0; i < 140; ++i)
      EXPECT_EQ(std::isnan(gpu.lse[static_cast<size_t>(i)]), i == 7 || i >= 130) << impl << i;
    EXPECT_LE(relative_error(gpu.dq, oracle.dq), 4e-3) << impl;
    EXPECT_LE(relative_error(gpu.dk, oracle.dk), 4e-3) << impl;
    EXPECT_TRUE(std::isnan(gpu.max_logit[0]));
  }
}

TEST(GpuSoftcap, SaysWhoServesIt) {
  NEED_DEVICE();
  const auto reason = [](const std::string& text, const char* impl, bool backward) {
    return device_candidate(offset_case(text, impl), backward).reason;
  };
  for (bool backward : {false, true}) {
    EXPECT_EQ(reason("n140 d64 softcap=5", "cuda-sm80", backward), "");
    EXPECT_EQ(reason("n140 d64 paper softcap=5", "cuda-sm80", backward),
              "has soft capping in recipe vectorwise only");
    EXPECT_EQ(reason("n192 d64 keep=0.6 softcap=5", "cuda-sm80", backward),
              "has no block lists with soft capping");
    EXPECT_EQ(reason("n140 d64 softcap=0.5", "cuda-sm80", backward), "takes soft caps from 1 up");
    EXPECT_EQ(reason("n140 d64 softcap=0.5", "cuda-plain", backward), "");
  }
  EXPECT_EQ(reason("n140 d64 rounding=dither:dQ softcap=5", "cuda-sm80", true),
            "has no dither with soft capping");
}

}  // namespace
}  // namespace sagebwd::gpu
