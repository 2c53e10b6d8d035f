// SPDX-License-Identifier: Apache-2.0
// Codes that the tuned forward saves: they are the recipe oracle's (of cuda-sm90 nearly so), and a
// backward that takes them instead of q, k and v gives the same bits.
#include <gtest/gtest.h>

#include <cmath>

#include "codes_parity.h"
#include "device_case.h"
#include "spec/codes.h"

namespace sagebwd::gpu {
namespace {

void expect_saved_codes(const DeviceCase& dc, const CaseInputs& in) {
  SCOPED_TRACE(dc.c.to_string());
  Workspaces inside;
  DeviceCase with = dc;
  with.codes = true;
  const Results got = run_on_device(with, in, 0.0f, &inside), want = run_on_device(dc, in);
  for (auto tensor : {&Results::o, &Results::lse, &Results::max_logit, &Results::dk, &Results::dv})
    EXPECT_TRUE(same_bits(got.*tensor, want.*tensor));
  // Unless it is asked for, dQ is added up in any order, by cuda-sm90 in half precision.
  if (dc.deterministic)
    EXPECT_TRUE(same_bits(got.dq, want.dq));
  else
    EXPECT_LE(relative_error(got.dq, want.dq), works_in_halves(dc) ? 4e-3 : 1e-3);

  expect_codes(inside.codes, oracle_codes(dc, in), spec::codes_layout(inside.forward.problem),
               works_in_halves(dc) ? CodesAre::rounded : CodesAre::same);
}

void expect_saved_codes(DeviceCase dc) {
  const CaseInputs in = make_case_inputs(dc);
  for (bool deterministic : {false, true}) {
    dc.deterministic = deterministic;
    expect_saved_codes(dc, in);
  }
}

// Padded tokens and channels; neither, so that the kernels read the saved codes in place; one of
// both.
TEST(GpuSaved, Codes) {
  NEED_DEVICE();
  for (const char* text :
       {"b2 h2 hk1 n140 d40 bf16 causal", "b2 h2 hk1 n256 d64 bf16 causal", "h1 n256 d128 f16",
        "h2 nq128 nk200 d64 f16", "b2 h2 hk1 n256 d128 causal",
        "h2 nq140 nk300 d40 f16 smooth_k=off", "h1 nq200 nk128 d96 bf16 rotate=off",
        "h1 n130 d128 bf16 smooth_k=off rotate=off"})
    expect_saved_codes(DeviceCase(text));
}

// So many that codes which round the other way show (codes_parity.h).
TEST(GpuMany, SavedCodes) {
  NEED_DEVICE();
  for (const char* text : {"h4 n2048 d64 bf16", "h4 n2048 d128 bf16", "h4 n2048 d128 f16"}) {
    DeviceCase dc(text);
    dc.kind = trace::InputKind::offset;
    expect_saved_codes(dc, make_case_inputs(dc));
  }
}

TEST(GpuSaved, CodesOfInputsWithGapsAndOtherRows) {
  NEED_DEVICE();
  DeviceCase dc("b2 h2 hk1 nq140 nk256 d64 bf16");
  dc.placement = Placement::gaps, dc.dlse = dc.partial_kv = true;
  expect_saved_codes(dc);
}

TEST(GpuSaved, CodesOfDocuments) {
  NEED_DEVICE();
  for (bool on_device : {false, true})
    for (const char* text : {"h4 hk2 nq700 nk650 d40 bf16 causal", "h2 nq700 nk650 d64 bf16",
                             "h1 nq700 nk650 d128 f16"}) {
      DeviceCase dc(text);
      dc.cu_q = {0, 0, 130, 131, 131, 400, 700};
      dc.cu_k = {0, 5, 200, 200, 207, 500, 650};
      dc.cu_on_device = on_device, dc.deterministic = true;
      expect_saved_codes(dc, make_case_inputs(dc));
    }
}

TEST(GpuSaved, CodesOfNanAndInf) {
  NEED_DEVICE();
  for (const char* text : {"h1 n300 d40 bf16 causal", "h1 n384 d64 bf16 causal", "h1 n384 d64"})
    for (int tensor = 0; tensor < 3; ++tensor) {
      DeviceCase dc(text);
      dc.deterministic = true;
      SCOPED_TRACE(tensor);
      CaseInputs in = make_case_inputs(dc);
      std::vector<float>& x = tensor_of(in, tensor);
      x[static_cast<size_t>(150 * dc.c.d + 5)] = NAN;
      for (int64_t i = 256; i < dc.c.nk; ++i)  // a block
        x[static_cast<size_t>(i * dc.c.d)] = INFINITY;
      expect_saved_codes(dc, in);
    }
}

// Where keys fill whole blocks, cuda-sm90 makes the operands of queries by a kernel of its own.
// Rows of dO are zero, tiny beside others, large, or hold NaN or Inf; some blocks of queries are
// not full.
TEST(GpuSaved, CodesBesideAnyDout) {
  NEED_DEVICE();
  for (const char* text :
       {"b2 h4 hk2 nq200 nk256 d128 bf16", "b2 h2 hk1 nq130 nk128 d64 f16 causal",
        "h2 nq64 nk384 d64 bf16 window=90,20", "b3 h2 nq70 nk128 d128 f16"})
    for (bool dlse : {false, true}) {
      DeviceCase dc(text);
      dc.dlse = dlse, dc.deterministic = true;
      SCOPED_TRACE(dlse);
      CaseInputs in = make_case_inputs(dc);
      const float factors[] = {1.0f, 0.0f, 0x1p-12f, 1.0f, 1.0f, 0x1p-20f, 16.0f};
      const auto d = static_cast<size_t>(dc.c.d);
      for (size_t i = 0; i < in.x.dout.size(); ++i) in.x.dout[i] *= factors[i / d % 7];
      in.x.dout[20 * d + 3] = NAN, in.x.dout[60 * d + d - 1] = -INFINITY;  // of the first head
      expect_saved_codes(dc, in);
    }
}

// What is read in place and what comes from memory with gaps, by another kernel: the same bits.
TEST(GpuSaved, CodesBesideRowsWithGaps) {
  NEED_DEVICE();
  for (const char* text : {"b2 h4 hk2 nq200 nk256 d128 bf16", "b2 h2 hk1 n256 d64 f16 causal"})
    for (bool dlse : {false, true}) {
      DeviceCase plain(text);
      plain.dlse = dlse, plain.deterministic = plain.codes = true;
      DeviceCase gaps = plain;
      gaps.placement = Placement::gaps;
      const CaseInputs in = make_case_inputs(plain);
      EXPECT_TRUE(run_on_device(plain, in) == run_on_device(gaps, in)) << text << " " << dlse;
    }
}

}  // namespace
}  // namespace sagebwd::gpu
