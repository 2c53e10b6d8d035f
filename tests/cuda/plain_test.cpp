// SPDX-License-Identifier: Apache-2.0
// cuda-plain pinned, on every feature of the library: against the recipe oracle (same tiles, same
// bits in), against exact attention, and against itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "plain_case.h"

namespace sagebwd::gpu {
namespace {

/// Lines of d channels that differ by more than the arithmetic explains: each has a code that is
/// off by one, which weighs near 1 % of the line.
int64_t lines_off(const std::vector<float>& a, const std::vector<float>& b, int64_t d) {
  double norm = 0;
  for (float x : b) norm += static_cast<double>(x) * x;
  const double typical = norm / static_cast<double>(b.size()) * static_cast<double>(d);
  int64_t off = 0;
  for (size_t i = 0; i < a.size(); i += static_cast<size_t>(d)) {
    double error = 0, line = 0;
    for (size_t c = i; c < i + static_cast<size_t>(d); ++c) {
      error += (static_cast<double>(a[c]) - b[c]) * (static_cast<double>(a[c]) - b[c]);
      line += static_cast<double>(b[c]) * b[c];
    }
    off += error > 1e-7 * std::max(line, 0.01 * typical);
  }
  return off;
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
  int64_t off = 0;  // 16-bit outputs hide single codes
  if (dc.c.dtype == Dtype::f32)
    for (const auto& [a, b, d] :
         {std::tuple(&gpu.o, &oracle.o, dc.c.value_dim()), std::tuple(&gpu.dq, &oracle.dq, dc.c.d),
          std::tuple(&gpu.dk, &oracle.dk, dc.c.d),
          std::tuple(&gpu.dv, &oracle.dv, dc.c.value_dim())})
      off += lines_off(*a, *b, d);
  std::printf("plain  %-78s o %.1e dq %.1e dk %.1e dv %.1e lse %.1e off %d\n",
              dc.c.to_string().c_str(), o, dq, dk, dv, lse, static_cast<int>(off));
  EXPECT_LE(o, plain_budget(dc));
  EXPECT_LE(dq, plain_budget(dc));
  EXPECT_LE(dk, plain_budget(dc));
  EXPECT_LE(dv, plain_budget(dc));
  EXPECT_LE(lse, 6e-5);
  EXPECT_LE(top, 6e-5);
  // Four matmuls with codes of P or dS; 0.01 % of them may be off.
  EXPECT_LE(off, 2 + 4e-4 * static_cast<double>(dc.c.visible_pairs() * dc.c.b * dc.c.h));
}

class PlainCase : public testing::TestWithParam<std::string> {};

TEST_P(PlainCase, Parity) {
  NEED_DEVICE();
  expect_parity(plain_case(GetParam()));
}

std::vector<std::string> shapes() {
  std::vector<std::string> all;
  for (const char* d : {"d8", "d40", "d64", "d72", "d128", "d160", "d256"})
    for (const char* rest : {"f32 vectorwise", "bf16 vectorwise causal", "f32 vectorwise causal",
                             "f16 paper", "f32 paper causal"})
      all.push_back(std::string("b2 h2 n230 ") + d + " " + rest);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, PlainCase, testing::ValuesIn(shapes()));

// V of another head dim than q and k: smaller and larger, on either side of what one thread block
// has.
INSTANTIATE_TEST_SUITE_P(
    ValueDims, PlainCase,
    testing::Values("h2 n200 d192 dv=128 bf16 causal", "h4 hk2 nq150 nk230 d192 dv=128 f32",
                    "h2 n200 d64 dv=192 f32 paper", "h2 n200 d136 dv=8 f16 causal",
                    "b2 h2 n150 d8 dv=136 f32 bshd", "h2 n150 d40 dv=72 bf16 paper rotate=on",
                    "h2 n200 d72 dv=40 f32 paper smooth_q=on tile=128x192", "h2 n150 d8 dv=136 f32",
                    "h2 n150 d64 dv=96 f32 rounding=dither", "h2 nq150 nk300 d256 dv=24 f32",
                    "h2 n200 d96 dv=160 f32 lift=S,O,S2,dV,dP,dQ,dK",
                    "h2 n200 d160 dv=96 f32 paper lift=O,dV",
                    "h2 n300 d72 dv=24 f32 keep=0.4 lead=2", "h2 n200 d96 dv=64 window=30,50 f32"));

// Rotation, scales of K, and rounding, one by one.
INSTANTIATE_TEST_SUITE_P(
    Recipe, PlainCase,
    testing::Values("h2 n200 d64 f32 rotate=off", "h2 n200 d64 f32 paper rotate=on causal",
                    "h2 n150 d80 f16", "h2 n150 d96 f32 causal", "h2 n150 d136 f32 paper rotate=on",
                    "h1 n150 d256 f32", "h1 n150 d256 bf16 paper rotate=on",
                    "h2 nq150 nk300 d64 f32 rounding=dither:dQ",
                    "h2 n150 d64 f32 paper rounding=dither:O,dK",
                    "h2 n150 d64 f32 paper smooth_q=on rotate=on tile=128x192",
                    "h2 n150 d40 paper smooth_q=on rotate=on", "h2 n300 d64 f32 rotate=on lift=dQ",
                    "h2 n300 d64 f32 rotate=on lift=dK,S2"));

// 600 keys have four octaves.
INSTANTIATE_TEST_SUITE_P(
    Octaves, PlainCase,
    testing::Values("h4 hk2 n600 d40 f32 causal", "h2 n600 d64 f32 tile=64x64",
                    "h1 n300 d256 f32 rotate=off",
                    "h2 n300 d64 f32 smooth_k=off causal tile=192x128",
                    "h2 nq150 nk700 d64 f32 causal", "h2 nq350 nk200 d72 f16 causal align=top_left",
                    "h2 n600 d64 f32 window=130,20", "h2 n300 d64 f32 rounding=dither causal seed3",
                    "h2 n300 d64 bf16 rounding=dither:dQ tile=64x64", "h2 n300 d64 f32 softcap=5",
                    "h2 n300 d64 bf16 causal softcap=20", "h2 n300 d64 f32 softcap=5 lift=S,S2",
                    "h2 n600 d40 f32 keep=0.5 lead=1",
                    "h2 n300 d64 f32 keep=0.6 lead=all blocks=64x64 causal"));

std::vector<std::string> lifts() {
  std::vector<std::string> all;
  for (const char* lift :
       {"S", "O", "S2", "dV", "dP", "dQ", "dK", "S,S2", "dQ,dK", "S,O,S2,dV,dP,dQ,dK"})
    for (const char* rest : {"f32 vectorwise causal d72", "bf16 paper d64", "f32 vectorwise d40"})
      all.push_back(std::string("h2 n200 ") + rest + " lift=" + lift);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Sanitized, PlainCase,
                         testing::Values("h2 n130 d64 f32 causal rounding=dither",
                                         "h2 hk1 n270 d40 bf16 causal softcap=20",
                                         "h2 nq70 nk140 d160 paper smooth_q=on",
                                         "h2 hk1 n130 d64 f16 paper lift=S2",
                                         "h1 n130 d40 f32 lift=S,S2,O,dV,dQ,dK"));

INSTANTIATE_TEST_SUITE_P(Lifts, PlainCase, testing::ValuesIn(lifts()));

INSTANTIATE_TEST_SUITE_P(
    Dither, PlainCase,
    testing::Values("h2 n300 d64 f32 rounding=dither", "h2 n300 d64 f32 paper rounding=dither",
                    "b2 h4 hk2 n300 d40 bf16 causal rounding=dither seed9",
                    "h2 nq200 nk400 d136 f16 paper causal rounding=dither tile=64x256",
                    "h2 n500 d32 f32 rounding=dither tile=256x64"));

INSTANTIATE_TEST_SUITE_P(Smoothing, PlainCase,
                         testing::Values("h2 n300 d64 f32 paper smooth_q=on",
                                         "h2 n300 d64 f32 paper smooth_q=on causal",
                                         "h2 n300 d64 f32 paper smooth_q=on lift=S",
                                         "h2 n300 d64 f32 paper smooth_q=on lift=S2",
                                         "h2 n300 d64 bf16 paper smooth_q=on lift=dK",
                                         "h4 hk2 n300 d160 f32 paper smooth_q=on smooth_k=off",
                                         "h2 n300 d64 f32 smooth_k=off",
                                         "h2 n300 d64 f32 paper smooth_k=off"));

std::vector<std::string> tiles() {
  std::vector<std::string> all;
  for (const char* tile : {"64x64", "64x256", "256x64", "256x256", "192x128", "128x192"})
    all.push_back(std::string("h2 nq420 nk600 d40 paper f32 causal tile=") + tile);
  for (const char* tile : {"64x64", "256x64", "192x128", "256x128"})
    all.push_back(std::string("h2 nq420 nk600 d40 vectorwise f32 tile=") + tile);
  all.push_back("h2 n700 d64 bf16 paper tile=256x256 window=100,30");
  all.push_back("h2 n700 d64 bf16 paper smooth_q=on tile=192x192 causal");
  return all;
}
INSTANTIATE_TEST_SUITE_P(Tiles, PlainCase, testing::ValuesIn(tiles()));

INSTANTIATE_TEST_SUITE_P(
    Masks, PlainCase,
    testing::Values("h4 hk2 nq300 nk500 d64 f32 causal", "h4 hk1 nq500 nk300 d64 f32 causal",
                    "h2 nq300 nk500 d128 f32 causal align=top_left",
                    "h2 nq500 nk300 d24 f32 causal align=top_left", "h6 hk2 n400 d128 causal",
                    "h2 n700 d64 f32 window=100,0", "h2 n700 d64 f32 window=65,130",
                    "h2 n500 d128 f32 window=-1,37",
                    "h2 nq333 nk650 d64 f32 window=10,20 align=top_left",
                    "h2 n600 d64 f32 paper window=130,3", "h6 hk3 nq129 nk700 d128 paper causal",
                    "h2 nq700 nk129 d192 f16 paper causal"));

INSTANTIATE_TEST_SUITE_P(FloatingTiles, PlainCase,
                         testing::Values("h2 n500 d64 f32", "h2 n500 d64 f32 lift=O",
                                         "h2 n500 d128 f32 causal lift=O",
                                         "h2 n300 d64 f32 paper lift=O"));

std::vector<std::string> lengths() {
  std::vector<std::string> all;
  for (int n : {1, 2, 63, 64, 65, 127, 128, 129, 257})
    for (const char* rest :
         {"f32 full d16 vectorwise", "f32 causal d16 paper", "f32 causal d16 vectorwise"})
      all.push_back("h2 n" + std::to_string(n) + " " + rest);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Lengths, PlainCase, testing::ValuesIn(lengths()));

TEST(Plain, Scales) {
  NEED_DEVICE();
  for (const char* text : {"h2 n300 d64 f32", "h2 n300 d64 paper causal", "h2 n300 d40 f32 lift=S"})
    for (float scale : {-0.125f, 0.3f, -1.0f}) {
      DeviceCase dc = plain_case(text);
      dc.scale = scale;
      expect_parity(dc);
    }
}

TEST(Plain, Placements) {
  NEED_DEVICE();
  for (const char* text : {"b2 h3 n200 d64 f32 causal bshd", "b2 h2 n200 d72 f16 bshd"})
    expect_parity(plain_case(text));
  for (const char* text :
       {"b2 h3 n200 d64 f32 causal", "b2 h2 n140 d128 f16 paper", "b2 h4 hk2 nq77 nk210 d40",
        "b2 h2 n100 d256 f32 lift=S,O,S2,dV,dQ,dK"}) {
    DeviceCase dc = plain_case(text);
    dc.placement = Placement::gaps;
    expect_parity(dc);
  }
}

TEST(Plain, Documents) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 nq700 nk650 d64 f32 causal", "h4 hk2 nq700 nk650 d136", "h2 nq700 nk650 d64 paper",
        "h2 nq700 nk650 d64 f32 paper smooth_q=on rounding=dither tile=128x256"}) {
    DeviceCase dc = plain_case(text);
    dc.cu_q = {0, 0, 130, 131, 131, 400, 700};
    dc.cu_k = {0, 5, 200, 200, 207, 500, 650};
    expect_parity(dc);
  }
  DeviceCase many = plain_case("h1 n900 d16 f32 causal");  // more than one chunk of the table
  for (int i = 0; i <= 300; ++i) many.cu_q.push_back(3 * i);
  many.cu_k = many.cu_q;
  expect_parity(many);
}

TEST(Plain, LseGradientAndPartialKeys) {
  NEED_DEVICE();
  for (const char* text : {"h2 n300 d64 f32 causal", "h2 n300 d160", "h4 hk2 n300 d64 f32 paper",
                           "h2 n300 d64 f32 paper lift=dQ", "h2 n300 d72 rotate=off smooth_k=off",
                           "h2 n300 d64 f32 lift=dQ", "h4 hk2 n300 d64 f32 softcap=5"})
    for (bool dlse : {true, false})
      for (bool partial : {true, false}) {
        DeviceCase dc = plain_case(text);
        dc.dlse = dlse, dc.partial_kv = partial;
        dc.kind = trace::InputKind::offset;  // the key mean matters
        expect_parity(dc, partial ? 0.4f : 0.0f);
      }
}

TEST(Plain, HardInputs) {
  NEED_DEVICE();
  for (const char* text : {"h2 n512 d64 f32 causal", "h2 n512 d64 f32 paper", "h2 n512 d64 f32"})
    for (auto kind :
         {trace::InputKind::outlier, trace::InputKind::sink, trace::InputKind::long_rows}) {
      DeviceCase dc = plain_case(text);
      dc.kind = kind;
      expect_parity(dc);
    }
}

// Values share a large offset, which their centres take out from the second octave on.
TEST(Plain, OffsetOfV) {
  NEED_DEVICE();
  for (const char* text :
       {"h4 hk2 n600 d40 f32 causal", "nq150 nk600 d72 dv=160 f32 tile=64x64",
        "nq150 nk600 d64 f16", "nq150 nk600 d64 f32 keep=0.5 blocks=64x64 lists=random lead=2",
        "nq150 nk600 d64 f32 softcap=9"}) {
    DeviceCase dc = plain_case(text);
    dc.v_offset = 20.0f;
    expect_parity(dc);
  }
  DeviceCase lifted = plain_case("nq150 nk600 d64 f32 lift=O");
  lifted.v_offset = 5.0f;  // there are no centres: D feels all of the offset
  expect_parity(lifted);
  DeviceCase documents = plain_case("h2 hk1 nq400 nk700 d40 dv=24 f32 causal");
  documents.cu_q = {0, 0, 130, 400}, documents.cu_k = {0, 5, 300, 700};
  documents.v_offset = 20.0f, documents.codes = documents.dlse = documents.partial_kv = true;
  expect_parity(documents, 0.4f);
}

/// V has a scale per token that goes through P: rows of any size, zeros, and whole blocks of zeros.
TEST(Plain, UnevenValues) {
  NEED_DEVICE();
  for (const char* text : {"h2 n520 d64 f32 causal", "h2 n520 d40 f32",
                           "h2 n520 d64 f32 tile=192x64 window=200,50", "h1 n520 d64 f32 paper"})
    for (float size : {1.0f, 1e-20f}) {
      const DeviceCase dc = plain_case(text);
      CaseInputs in = make_case_inputs(dc);
      for (size_t i = 0; i < in.x.v.size(); ++i) {
        const size_t token = i / static_cast<size_t>(dc.c.d) % 400;
        in.x.v[i] *= token % 7 == 3 ? 0.0f : token % 50 == 49 ? 2e3f * size : size;
        if (token >= 256 && token < 384) in.x.v[i] = 0.0f;
      }
      // Gradients are quadratic in V and dO: dO takes the size back.
      for (float& x : in.x.dout) x /= size;
      SCOPED_TRACE(testing::Message() << dc.c.to_string() << " size " << size);
      const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
      std::vector<float> o = gpu.o, want = oracle.o, dv = gpu.dv, want_dv = oracle.dv;
      for (std::vector<float>* x : {&o, &want})
        for (float& y : *x) y /= size;
      for (std::vector<float>* x : {&dv, &want_dv})
        for (float& y : *x) y *= size;
      EXPECT_LE(relative_error(o, want), plain_budget(dc));
      EXPECT_LE(relative_error(gpu.dq, oracle.dq), plain_budget(dc));
      EXPECT_LE(relative_error(gpu.dk, oracle.dk), plain_budget(dc));
      EXPECT_LE(relative_error(dv, want_dv), plain_budget(dc));
      EXPECT_LE(largest_difference(gpu.lse, oracle.lse), 6e-5);
      EXPECT_LE(largest_difference(gpu.max_logit, oracle.max_logit), 6e-5);
      // The scales of V have no part in the largest logit.
      EXPECT_LE(largest_difference(gpu.max_logit, run_exact(dc, in).max_logit), 0.1);
    }
}

TEST(Plain, NanAndInfGoWhereTheyBelong) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 n200 d64 f32 causal", "h2 n200 d40 paper causal", "h2 n200 d64 f32 window=20,10",
        "h2 n200 d40 f32 rotate=off tile=64x64 window=20,10", "h2 n200 d64 f32 lift=O,S",
        "h2 n200 d40 f32 lift=S2,dV,dQ,dK", "h2 n200 d64 f32 causal lift=S,O,S2,dV,dQ,dK",
        "h2 n200 d64 f32 paper smooth_q=on causal", "h2 n200 d64 f32 paper lift=S,O,S2,dV,dQ,dK"})
    for (int tensor = 0; tensor < kTensors; ++tensor)
      for (float bad : {NAN, INFINITY}) {
        const DeviceCase dc = plain_case(text);
        CaseInputs in = make_case_inputs(dc);
        std::vector<float>& x = tensor_of(in, tensor);
        x[static_cast<size_t>(150 * dc.c.d + 5)] = bad;  // token 150 of the first head
        const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
        SCOPED_TRACE(std::string(text) + " tensor " + std::to_string(tensor));
        EXPECT_LE(relative_error(gpu.o, oracle.o), plain_budget(dc));
        EXPECT_LE(relative_error(gpu.dq, oracle.dq), plain_budget(dc));
        EXPECT_LE(relative_error(gpu.dk, oracle.dk), plain_budget(dc));
        EXPECT_LE(relative_error(gpu.dv, oracle.dv), plain_budget(dc));
        EXPECT_LE(largest_difference(gpu.lse, oracle.lse), 6e-5);
        EXPECT_LE(largest_difference(gpu.max_logit, oracle.max_logit), 6e-5);
      }
}

TEST(Plain, ZerosStayZeros) {
  NEED_DEVICE();
  for (const char* text : {"h2 n200 d64 f32 causal", "h2 n200 d72 paper", "h2 n200 d64 f32"})
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const DeviceCase dc = plain_case(text);
      CaseInputs in = make_case_inputs(dc);
      std::vector<float>& x = tensor_of(in, tensor);
      std::fill(x.begin(), x.end(), 0.0f);
      const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
      SCOPED_TRACE(std::string(text) + " tensor " + std::to_string(tensor));
      EXPECT_LE(relative_error(gpu.o, oracle.o), plain_budget(dc));
      EXPECT_LE(relative_error(gpu.dq, oracle.dq), plain_budget(dc));
      EXPECT_LE(relative_error(gpu.dk, oracle.dk), plain_budget(dc));
      EXPECT_LE(relative_error(gpu.dv, oracle.dv), plain_budget(dc));
    }
}

TEST(Plain, AgainstExact) {
  NEED_DEVICE();
  struct Bound {
    const char* text;
    double o, gradient;
  };
  for (const Bound& b :
       {Bound{"h4 n512 d64 f32", 0.03, 0.03}, Bound{"h4 hk2 n512 d160 f32 causal", 0.03, 0.04},
        Bound{"h4 n512 d256 bf16", 0.03, 0.04},
        Bound{"h4 n512 d40 f32 rounding=dither", 0.04, 0.05},
        Bound{"h4 n512 d64 f32 paper", 0.03, 0.12},
        Bound{"h4 n512 d64 f32 causal lift=S,O,S2,dV,dP,dQ,dK", 1e-5, 1e-5},
        Bound{"h4 n512 d64 f32 lift=S,O,S2,dV,dP,dQ,dK smooth_q=on paper", 1e-5, 1e-5}})
    for (bool dlse : {false, true}) {
      DeviceCase dc = plain_case(b.text);
      dc.dlse = dlse;
      dc.scale = dlse ? -0.1f : 0.0f;
      SCOPED_TRACE(dc.c.to_string());
      const CaseInputs in = make_case_inputs(dc);
      const Results gpu = run_on_device(dc, in), exact = run_exact(dc, in);
      const double o = relative_error(gpu.o, exact.o), dq = relative_error(gpu.dq, exact.dq),
                   dk = relative_error(gpu.dk, exact.dk), dv = relative_error(gpu.dv, exact.dv);
      std::printf("exact  %-70s o %.1e dq %.1e dk %.1e dv %.1e\n", dc.c.to_string().c_str(), o, dq,
                  dk, dv);
      EXPECT_LE(o, b.o);
      EXPECT_LE(dq, b.gradient);
      EXPECT_LE(dk, b.gradient);
      EXPECT_LE(dv, b.gradient);
      EXPECT_LE(largest_difference(gpu.lse, exact.lse), b.o);
    }
}

TEST(Plain, PoisonedMemoryAndSameBits) {
  NEED_DEVICE();
  for (const char* text : {"b2 h2 n300 d64 f32 causal", "h3 nq200 nk333 d136 paper smooth_q=on",
                           "h4 hk2 n150 d96 f16 rounding=dither", "b2 h2 n300 d72 f32",
                           "h2 n200 d64 f32 lift=S,O,S2,dV,dQ,dK"}) {
    DeviceCase a = plain_case(text), b = a, c = a;
    a.poison = 0x7f, b.poison = 0xff, c.poison = 0x00;
    const CaseInputs in = make_case_inputs(a);
    const Results ra = run_on_device(a, in), rb = run_on_device(b, in), rc = run_on_device(c, in);
    EXPECT_TRUE(ra == rb) << text;
    EXPECT_TRUE(ra == rc) << text;
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(run_on_device(a, in) == ra) << text << " run " << i;
  }
}

TEST(Plain, EmptyProblems) {
  NEED_DEVICE();
  for (const char* text : {"h2 nq0 nk30 d64 f32", "h2 nq30 nk0 d64 f32", "b0 h2 n30 d64 f32",
                           "h2 nq30 nk0 d64 f32 paper"}) {
    const DeviceCase dc = plain_case(text);
    const Results r = run_on_device(dc, make_case_inputs(dc));
    for (const auto* v : {&r.o, &r.dq, &r.dk, &r.dv})
      for (float x : *v) ASSERT_EQ(x, 0.0f) << text;
    for (float x : r.lse) ASSERT_EQ(x, -INFINITY) << text;
    for (float x : r.max_logit) ASSERT_EQ(x, -INFINITY) << text;
  }
}

TEST(Plain, TakesWhatTheTunedKernelsDecline) {
  NEED_DEVICE();
  for (const char* text :
       {"h1 n64 d64 f32", "h1 n64 d192", "h1 n64 d64 paper smooth_q=on",
        "h1 n64 d64 rounding=dither", "h1 n64 d64 lift=dQ", "h1 n64 d64 tile=256x128"})
    for (bool backward : {false, true}) {
      const Candidate plain = device_candidate(plain_case(text), backward);
      EXPECT_EQ(plain.reason, "") << text;
      EXPECT_TRUE(plain.chosen || !backward) << text;
    }
  EXPECT_FALSE(device_candidate(plain_case("h1 n64 d64"), true).chosen);
}

TEST(Plain, DeclinesSequencesThatAreTooLong) {
  NEED_DEVICE();
  for (const char* text : {"h1 nq1073741825 nk64 d8 f32", "h1 nq64 nk1073741825 d8 f32"})
    EXPECT_EQ(device_candidate(plain_case(text), true).reason,
              "takes up to 2^30 tokens of a sequence");
}

}  // namespace
}  // namespace sagebwd::gpu
