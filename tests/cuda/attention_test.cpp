// SPDX-License-Identifier: Apache-2.0
// The GPU against the recipe oracle, with the same tiles and the same bits in.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "device_case.h"

namespace sagebwd::gpu {
namespace {

/// The two sides differ by rounding: 16-bit outputs, 2^x to two units, scales to one, and P in 16
/// bit where the oracle keeps FP32. A wrong scale, a lost tile or a swapped index is a hundred
/// times larger.
double budget(const DeviceCase& dc) {
  return works_in_halves(dc) ? 1e-2 : dc.c.dtype == Dtype::bf16 ? 4e-3 : 2e-3;
}

void expect_parity(const DeviceCase& dc, float lse_shift = 0.0f) {
  SCOPED_TRACE(dc.c.to_string());
  const CaseInputs in = make_case_inputs(dc);
  const Results gpu = run_on_device(dc, in, lse_shift);
  const Results oracle = run_oracle(dc, in, gpu, lse_shift);
  const double o = relative_error(gpu.o, oracle.o), dq = relative_error(gpu.dq, oracle.dq),
               dk = relative_error(gpu.dk, oracle.dk), dv = relative_error(gpu.dv, oracle.dv),
               lse = largest_difference(gpu.lse, oracle.lse),
               top = largest_difference(gpu.max_logit, oracle.max_logit);
  std::printf("parity %-78s o %.1e dq %.1e dk %.1e dv %.1e lse %.1e\n", dc.c.to_string().c_str(), o,
              dq, dk, dv, lse);
  EXPECT_LE(o, budget(dc));
  EXPECT_LE(dq, budget(dc));
  EXPECT_LE(dk, budget(dc));
  EXPECT_LE(dv, budget(dc));
  // LSE holds the logit of a centre, which outliers make long: there one code of Q
  // that rounds the other way is seen. Where halves are used, codes are rotated on tensor cores.
  const bool sees_codes = works_in_halves(dc) && dc.c.recipe.scheme != Scheme::paper &&
                          dc.kind == trace::InputKind::outlier;
  EXPECT_LE(lse, sees_codes ? 2e-2 : works_in_halves(dc) ? 4e-3 : 2e-4);
  EXPECT_LE(top, sees_codes ? 2e-2 : 2e-4);
}

class GpuCase : public testing::TestWithParam<std::string> {};

/// Why the GPU's tuned kernels do not round by dither; empty where they do.
std::string no_dither() {
  return device_candidate(DeviceCase("h1 n64 d64 rounding=dither:dQ"), true).reason;
}

TEST_P(GpuCase, Parity) {
  NEED_DEVICE();
  const DeviceCase dc(GetParam());
  if (dc.c.recipe.rounding == Rounding::dither && !no_dither().empty()) GTEST_SKIP() << no_dither();
  expect_parity(dc);
}

std::vector<std::string> tuned_shapes() {
  std::vector<std::string> all;
  for (const char* d : {"d64", "d128"})
    for (const char* type : {"bf16", "f16"})
      for (const char* recipe : {"vectorwise", "paper"})
        for (const char* mask : {"full", "causal"})
          all.push_back(std::string("b2 h2 n448 ") + d + " " + mask + " " + type + " " + recipe +
                        " seed3");
  return all;
}
INSTANTIATE_TEST_SUITE_P(Tuned, GpuCase, testing::ValuesIn(tuned_shapes()));

std::vector<std::string> lengths() {
  std::vector<std::string> all;
  for (int n : {1, 2, 3, 15, 16, 17, 63, 64, 65, 97, 127, 128, 129, 203, 257})
    for (const char* rest :
         {"full d64", "causal d64", "causal d128", "full d64 paper", "full d128"})
      all.push_back("h2 n" + std::to_string(n) + " " + rest);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Lengths, GpuCase, testing::ValuesIn(lengths()));

TEST(GpuParity, HeadDims) {
  NEED_DEVICE();
  for (int d : {8, 16, 40, 56, 72, 96, 104, 120})
    expect_parity(DeviceCase("h2 n200 causal d" + std::to_string(d)));
}

INSTANTIATE_TEST_SUITE_P(
    Masks, GpuCase,
    testing::Values("h4 hk2 nq300 nk500 d64 causal", "h4 hk1 nq500 nk300 d64 causal",
                    "h2 nq300 nk500 d128 causal align=top_left",
                    "h2 nq500 nk300 d128 causal align=top_left", "h6 hk2 n400 d128 causal",
                    "h2 n700 d64 window=100,0", "h2 n700 d64 window=65,130",
                    "h2 n500 d128 window=-1,37", "h2 nq333 nk650 d64 window=10,20 align=top_left",
                    "h2 n600 d64 paper window=130,3", "h6 hk3 nq129 nk700 d128 paper causal",
                    "h2 nq700 nk129 d128 paper causal", "h4 hk1 nq500 nk300 d128 causal",
                    "h2 nq333 nk650 d128 window=10,20 align=top_left"));

INSTANTIATE_TEST_SUITE_P(Switches, GpuCase,
                         testing::Values("h2 n500 d64", "h2 n500 d64 lift=O",
                                         "h2 n500 d128 causal lift=O", "h2 n300 d64 smooth_k=off",
                                         "h2 n300 d64 paper lift=O",
                                         "h2 n300 d64 paper smooth_k=off", "h2 n300 d64 lift=O",
                                         "h2 n300 d128 smooth_k=off",
                                         "h2 n300 d64 rotate=off causal"));

// Few and small: tools/gpu_check runs them under every tool of compute-sanitizer.
INSTANTIATE_TEST_SUITE_P(Sanitized, GpuCase,
                         testing::Values("h2 n130 d64 causal", "h2 nq70 nk200 d128",
                                         "h2 n130 d64 paper causal", "h2 hk1 n140 d128 paper",
                                         "h2 n130 d64 rounding=dither:dQ",
                                         "h2 n150 d72 f16 window=20,10", "h2 n140 d64 causal",
                                         "h2 hk1 nq70 nk300 d128"));

// Every kernel in f16, one head of keys for two of queries: what the emulator has time for.
std::vector<std::string> small() {
  std::vector<std::string> all;
  for (const char* d : {"d64", "d128", "d40"})
    for (const char* rest : {"full", "causal paper", "window=40,9", "causal"})
      all.push_back(std::string("h2 hk1 n140 f16 ") + d + " " + rest);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Small, GpuCase, testing::ValuesIn(small()));

// The codes of dS for dQ rounded by dither: every kernel in both types, both masks, with one head
// of keys for two of queries; more tiles of queries than uniforms are drawn at a time (32).
std::vector<std::string> dithered_dq() {
  std::vector<std::string> all = {"h2 hk1 nq2500 nk70 d64 causal align=top_left",
                                  "h1 nq2100 nk130 d128", "h2 n300 d64 window=130,3",
                                  "h2 n300 d128 causal window=90,9", "h1 n203 d40 smooth_k=off"};
  for (const char* d : {"d64", "d128"})
    for (const char* type : {"bf16", "f16"})
      for (const char* mask : {"full", "causal"})
        all.push_back(std::string("h2 hk1 n200 ") + d + " " + mask + " " + type);
  for (std::string& text : all) text += " rounding=dither:dQ seed5";
  return all;
}
INSTANTIATE_TEST_SUITE_P(DitheredDq, GpuCase, testing::ValuesIn(dithered_dq()));

TEST(GpuDithered, DocumentsPartialKeysAndLseGradient) {
  NEED_DEVICE();
  if (!no_dither().empty()) GTEST_SKIP() << no_dither();
  for (const char* text : {"h2 nq280 nk200 d64 causal rounding=dither:dQ",
                           "h2 hk1 nq280 nk200 d128 f16 rounding=dither:dQ"})
    for (bool partial : {true, false}) {
      DeviceCase dc(std::string(text) + " seed9");
      dc.cu_q = {0, 0, 130, 131, 131, 280}, dc.cu_k = {0, 5, 80, 80, 87, 200};
      dc.kind = trace::InputKind::offset;  // the key mean matters
      dc.partial_kv = partial, dc.dlse = dc.deterministic = !partial;
      expect_parity(dc, partial ? 0.4f : 0.0f);
    }
}

// The offset of a code depends on seed, sequence, head and tile, so equal heads differ. It depends
// on nothing else, so equal calls do not differ.
TEST(GpuDithered, ReplaysFromItsSeed) {
  NEED_DEVICE();
  if (!no_dither().empty()) GTEST_SKIP() << no_dither();
  DeviceCase dc("b2 h2 n140 d64 rounding=dither:dQ");
  dc.deterministic = true;
  CaseInputs in = make_case_inputs(dc);
  const size_t head = in.x.q.size() / 4;
  for (auto* x : {&in.x.q, &in.x.k, &in.x.v, &in.x.dout})
    for (size_t i = head; i < x->size(); ++i) (*x)[i] = (*x)[i % head];
  const Results one = run_on_device(dc, in);
  EXPECT_TRUE(run_on_device(dc, in) == one);
  dc.c.recipe.seed = 77;
  const Results other = run_on_device(dc, in);
  EXPECT_NE(one.dq, other.dq);
  for (size_t h = 1; h < 4; ++h)
    EXPECT_FALSE(std::equal(one.dq.begin(), one.dq.begin() + static_cast<std::ptrdiff_t>(head),
                            one.dq.begin() + static_cast<std::ptrdiff_t>(h * head)))
        << h;
}

TEST(GpuSanitized, DeterministicPackedWithLseGradient) {
  NEED_DEVICE();
  for (const char* text : {"h2 nq150 nk140 d64 causal", "h2 nq150 nk140 d128",
                           "h2 nq150 nk140 d64 paper causal", "h2 nq150 nk140 d128 paper"}) {
    DeviceCase dc(text);
    dc.cu_q = {0, 0, 70, 150}, dc.cu_k = {0, 9, 9, 140};
    dc.deterministic = dc.dlse = true;
    expect_parity(dc);
  }
}

TEST(GpuSanitized, PartialKeys) {
  NEED_DEVICE();
  for (const char* text : {"h2 nq150 nk140 d64 causal", "h2 hk1 nq70 nk200 d128"})
    for (bool deterministic : {false, true}) {
      DeviceCase dc(text);
      dc.partial_kv = true, dc.deterministic = deterministic;
      expect_parity(dc, 0.4f);
    }
}

TEST(GpuParity, Placements) {
  NEED_DEVICE();
  for (const char* text :
       {"b2 h3 n200 d64 causal bshd", "b2 h2 n200 d128 bshd", "b2 h2 n200 d72 f16 bshd"})
    expect_parity(DeviceCase(text));
  for (const char* text :
       {"b2 h3 n200 d64 causal", "b2 h2 n140 d128 f16", "b2 h4 hk2 nq77 nk210 d40"}) {
    DeviceCase dc(text);
    dc.placement = Placement::gaps;
    expect_parity(dc);
  }
}

TEST(GpuParity, ExpandedInputs) {
  NEED_DEVICE();
  for (const char* text : {"b3 h4 hk4 nq200 nk300 d64 causal bshd", "b3 h4 hk2 n200 d128"})
    for (const Placement placement : {Placement::one_head, Placement::one_batch}) {
      DeviceCase dc(text);
      dc.placement = placement;
      expect_parity(dc);
    }
}

TEST(GpuParity, Documents) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 nq700 nk650 d64 causal", "h4 hk2 nq700 nk650 d128", "h2 nq700 nk650 d64 paper causal",
        "h4 hk2 nq700 nk650 d64 causal", "h2 nq700 nk650 d128"}) {
    DeviceCase dc(text);
    dc.cu_q = {0, 0, 130, 131, 131, 400, 700};
    dc.cu_k = {0, 5, 200, 200, 207, 500, 650};
    expect_parity(dc);
  }
  DeviceCase many("h1 n900 d64 causal");  // more than one chunk of the table
  for (int i = 0; i <= 300; ++i) many.cu_q.push_back(3 * i);
  many.cu_k = many.cu_q;
  expect_parity(many);
}

TEST(GpuParity, LseGradientAndPartialKeys) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 n300 d64 causal", "h2 n300 d128", "h2 n300 d64 paper", "h2 n300 d128 smooth_k=off"})
    for (bool dlse : {true, false})
      for (bool partial : {true, false}) {
        DeviceCase dc(text);
        dc.dlse = dlse, dc.partial_kv = partial;
        dc.kind = trace::InputKind::offset;  // the key mean matters
        expect_parity(dc, partial ? 0.4f : 0.0f);
      }
}

// Keys elsewhere have larger values than these, so D exceeds every dP. Of a single key nothing is
// left but its mean: all of dQ is the row sum of dS.
TEST(GpuParity, LargerValuesElsewhere) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 n300 d64 causal", "h4 hk2 n300 d128", "h2 nq200 nk1 d64", "h2 n300 d64 paper",
        "h2 nq70 nk200 d128 f16", "h2 n300 d64", "h2 nq200 nk1 d128"})
    for (bool deterministic : {false, true}) {
      DeviceCase dc(text);
      dc.partial_kv = true, dc.deterministic = deterministic;
      dc.o_elsewhere = dc.c.dtype == Dtype::f16 ? 30.0f : 1000.0f;
      dc.kind = trace::InputKind::offset;
      expect_parity(dc, 0.4f);
    }
}

// At head dim 64 cuda-sm90 has tiles of 128 queries. For dK 64 of them share a scale of dS.
TEST(GpuParity, TilesOfQueries) {
  NEED_DEVICE();
  struct Wish {
    const char* text;
    bool packed = false, dlse = false, partial = false, codes = false;
  };
  for (const Wish& wish :
       {Wish{.text = "b2 h4 hk2 n448 d64"}, Wish{.text = "h2 n500 d64 f16 causal"},
        Wish{.text = "h2 nq300 nk500 d64 causal", .dlse = true},
        Wish{.text = "h2 n700 d64 window=65,130"},
        Wish{.text = "h4 hk2 nq700 nk650 d64 causal", .packed = true},
        Wish{.text = "h2 n300 d64 causal", .partial = true},
        Wish{.text = "b2 h4 hk2 n384 d64 causal", .dlse = true, .codes = true},
        Wish{.text = "h2 nq190 nk256 d64 f16", .codes = true}})
    for (bool deterministic : {false, true}) {
      DeviceCase dc(std::string(wish.text) + " tile=128x128");
      dc.dlse = wish.dlse, dc.partial_kv = wish.partial, dc.codes = wish.codes;
      dc.deterministic = deterministic;
      if (wish.packed)
        dc.cu_q = {0, 0, 130, 131, 131, 400, 700}, dc.cu_k = {0, 5, 200, 200, 207, 500, 650};
      const Candidate candidate = device_candidate(dc, true);
      if (!candidate.supported) GTEST_SKIP() << candidate.reason;
      EXPECT_EQ(candidate.name, tuned_implementation());
      EXPECT_EQ(candidate.tiles(), "128x128 (dK: 64 queries)");
      expect_parity(dc, wish.partial ? 0.4f : 0.0f);
    }
}

// Values share a large offset, which their centres take out from the second octave on.
TEST(GpuParity, OffsetOfV) {
  NEED_DEVICE();
  for (const char* text :
       {"h4 hk2 n600 d64 causal", "h2 nq140 nk600 d128 f16", "h2 nq300 nk600 d128 window=290,20",
        "h2 nq140 nk600 d64 keep=0.5 blocks=64x64 lists=random lead=2", "nq140 nk600 d64 softcap=9",
        "nq140 nk600 d72 smooth_k=off", "nq140 nk600 d64 lift=O"}) {
    DeviceCase dc(text);
    dc.v_offset = 20.0f;
    expect_parity(dc);
  }
  DeviceCase documents("h2 hk1 nq400 nk700 d64 causal");
  documents.cu_q = {0, 0, 130, 400}, documents.cu_k = {0, 5, 300, 700};
  documents.v_offset = 20.0f, documents.codes = documents.dlse = true;
  expect_parity(documents);
  DeviceCase part("h2 nq140 nk600 d128");
  part.v_offset = 20.0f, part.partial_kv = part.deterministic = true;
  expect_parity(part, 0.4f);
}

TEST(GpuParity, HardInputs) {
  NEED_DEVICE();
  for (const char* text : {"h2 n512 d64 causal", "h2 n512 d128", "h2 n512 d64 paper"})
    for (auto kind :
         {trace::InputKind::outlier, trace::InputKind::sink, trace::InputKind::long_rows}) {
      DeviceCase dc(text);
      dc.kind = kind;
      expect_parity(dc);
    }
}

}  // namespace
}  // namespace sagebwd::gpu
