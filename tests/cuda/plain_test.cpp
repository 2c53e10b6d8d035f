// SPDX-License-Identifier: Apache-2.0
// cuda-plain pinned, on every feature of the library: against the recipe oracle (same tiles, same
// bits in), against exact attention, and against itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "backend/implementation.h"
#include "base/math.h"
#include "codes_parity.h"
#include "cuda/plain/centres.h"
#include "cuda/plain/prepare.h"
#include "device_array.h"
#include "device_case.h"
#include "ref/recipe_inputs.h"
#include "sagebwd/codes.h"

namespace sagebwd::gpu {
namespace {

DeviceCase plain_case(const std::string& text) {
  DeviceCase dc(text);
  dc.impl = "cuda-plain";
  return dc;
}

/// The two sides differ by the rounding of the outputs and by a few codes of P and dS that are off
/// by one; in a short row one such code is an error of 1e-3. A wrong scale, a lost tile or a
/// swapped index is a hundred times larger.
double budget(const DeviceCase& dc) {
  return dc.c.dtype == Dtype::f32 ? 1.5e-3 : dc.c.dtype == Dtype::f16 ? 1.5e-3 : 3e-3;
}

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
  EXPECT_LE(o, budget(dc));
  EXPECT_LE(dq, budget(dc));
  EXPECT_LE(dk, budget(dc));
  EXPECT_LE(dv, budget(dc));
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
    for (const char* rest : {"f32 vectorwise", "bf16 vectorwise causal", "f16 paper",
                             "f32 paper causal", "f32 tokenwise causal", "bf16 tokenwise"})
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
                    "h2 n200 d72 dv=40 f32 smooth_q=on tile=128x192",
                    "h2 n200 d192 dv=128 bf16 tokenwise causal", "h2 n150 d8 dv=136 f32 tokenwise",
                    "h2 n150 d64 dv=96 f32 rounding=dither", "h2 nq150 nk300 d256 dv=24 f32",
                    "h2 n200 d96 dv=160 f32 lift=S,O,S2,dV,dP,dQ,dK smooth_q=on",
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
                    "h2 n150 d64 f32 smooth_q=on rotate=on tile=128x192",
                    "h2 n150 d40 paper smooth_q=on rotate=on", "h2 n300 d64 f32 rotate=on lift=dQ",
                    "h2 n300 d64 f32 rotate=on lift=dK,S2",
                    "h2 n300 d64 f32 smooth_v=off tile=64x192"));

// 600 keys have four octaves.
INSTANTIATE_TEST_SUITE_P(
    Tokenwise, PlainCase,
    testing::Values("h4 hk2 n600 d40 f32 tokenwise causal", "h2 n600 d64 f32 tokenwise tile=64x64",
                    "h1 n300 d256 f32 tokenwise rotate=off",
                    "h2 n300 d64 f32 tokenwise smooth_k=off causal tile=192x128",
                    "h2 nq150 nk700 d64 f32 tokenwise causal",
                    "h2 nq350 nk200 d72 f16 tokenwise causal align=top_left",
                    "h2 n600 d64 f32 tokenwise window=130,20",
                    "h2 n300 d64 f32 tokenwise rounding=dither causal seed3",
                    "h2 n300 d64 bf16 tokenwise rounding=dither:dQ tile=64x64",
                    "h2 n300 d64 f32 tokenwise softcap=5",
                    "h2 n300 d64 bf16 tokenwise causal softcap=20",
                    "h2 n300 d64 f32 tokenwise softcap=5 lift=S,S2",
                    "h2 n600 d40 f32 tokenwise keep=0.5 lead=1",
                    "h2 n300 d64 f32 tokenwise keep=0.6 lead=all blocks=64x64 causal"));

std::vector<std::string> lifts() {
  std::vector<std::string> all;
  for (const char* lift :
       {"S", "O", "S2", "dV", "dP", "dQ", "dK", "S,S2", "dQ,dK", "S,O,S2,dV,dP,dQ,dK"})
    for (const char* rest : {"f32 vectorwise causal d72", "bf16 paper d64", "f32 tokenwise d40"})
      all.push_back(std::string("h2 n200 ") + rest + " lift=" + lift);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Sanitized, PlainCase,
                         testing::Values("h2 n130 d64 f32 causal rounding=dither",
                                         "h2 hk1 n270 d40 bf16 tokenwise causal softcap=20",
                                         "h2 nq70 nk140 d160 smooth_q=on",
                                         "h2 hk1 n130 d64 f16 paper lift=S2",
                                         "h1 n130 d40 f32 lift=S,S2,O,dV,dQ,dK"));

INSTANTIATE_TEST_SUITE_P(Lifts, PlainCase, testing::ValuesIn(lifts()));

INSTANTIATE_TEST_SUITE_P(
    Dither, PlainCase,
    testing::Values("h2 n300 d64 f32 rounding=dither", "h2 n300 d64 f32 paper rounding=dither",
                    "b2 h4 hk2 n300 d40 bf16 causal rounding=dither seed9",
                    "h2 nq200 nk400 d136 f16 paper causal rounding=dither tile=64x256",
                    "h2 n500 d32 f32 rounding=dither tile=256x64"));

INSTANTIATE_TEST_SUITE_P(
    Smoothing, PlainCase,
    testing::Values("h2 n300 d64 f32 smooth_q=on", "h2 n300 d64 f32 paper smooth_q=on causal",
                    "h2 n300 d64 f32 smooth_q=on lift=S", "h2 n300 d64 f32 smooth_q=on lift=S2",
                    "h2 n300 d64 bf16 smooth_q=on lift=dK",
                    "h4 hk2 n300 d160 f32 smooth_q=on smooth_k=off smooth_v=off",
                    "h2 n300 d64 f32 smooth_k=off", "h2 n300 d64 f32 smooth_v=off",
                    "h2 n300 d64 f32 paper smooth_v=on smooth_k=off"));

std::vector<std::string> tiles() {
  std::vector<std::string> all;
  for (const char* tile : {"64x64", "64x256", "256x64", "256x256", "192x128", "128x192"})
    for (const char* rest : {"vectorwise f32", "paper f32 causal"})
      all.push_back(std::string("h2 nq420 nk600 d40 ") + rest + " tile=" + tile);
  all.push_back("h2 n700 d64 bf16 paper tile=256x256 window=100,30");
  all.push_back("h2 n700 d64 bf16 smooth_q=on tile=192x192 causal");
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
         {"f32 full d16 vectorwise", "f32 causal d16 paper", "f32 causal d16 tokenwise"})
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
        "h4 hk2 nq700 nk650 d64 f32 tokenwise causal",
        "h2 nq700 nk650 d64 f32 smooth_q=on rounding=dither tile=128x256"}) {
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
  for (const char* text :
       {"h2 n300 d64 f32 causal", "h2 n300 d160", "h4 hk2 n300 d64 f32 paper",
        "h2 n300 d64 f32 lift=dQ", "h2 n300 d64 f32 tokenwise causal",
        "h2 n300 d72 tokenwise rotate=off smooth_k=off", "h2 n300 d64 f32 tokenwise lift=dQ",
        "h4 hk2 n300 d64 f32 tokenwise softcap=5"})
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
  for (const char* text :
       {"h2 n512 d64 f32 causal", "h2 n512 d64 f32 paper", "h2 n512 d64 f32 tokenwise causal"})
    for (auto kind :
         {trace::InputKind::outlier, trace::InputKind::sink, trace::InputKind::long_rows}) {
      DeviceCase dc = plain_case(text);
      dc.kind = kind;
      expect_parity(dc);
    }
}

/// V has a scale per token that goes through P: rows of any size, zeros, and whole blocks of zeros.
TEST(Plain, UnevenValues) {
  NEED_DEVICE();
  for (const char* text : {"h2 n520 d64 f32 causal", "h2 n520 d40 f32 smooth_v=off",
                           "h2 n520 d64 f32 smooth_v=off tile=64x192 window=200,50",
                           "h1 n520 d64 f32 paper", "h2 n520 d64 f32 tokenwise causal"})
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
      EXPECT_LE(relative_error(o, want), budget(dc));
      EXPECT_LE(relative_error(gpu.dq, oracle.dq), budget(dc));
      EXPECT_LE(relative_error(gpu.dk, oracle.dk), budget(dc));
      EXPECT_LE(relative_error(dv, want_dv), budget(dc));
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
        "h2 n200 d40 f32 rotate=off tile=64x64", "h2 n200 d64 f32 tokenwise causal",
        "h2 n200 d40 f32 tokenwise rotate=off tile=64x64 window=20,10",
        "h2 n200 d64 f32 tokenwise lift=O,S", "h2 n200 d40 f32 tokenwise lift=S2,dV,dQ,dK",
        "h2 n200 d64 f32 causal lift=S,O,S2,dV,dQ,dK", "h2 n200 d64 f32 smooth_q=on causal"})
    for (int tensor = 0; tensor < kTensors; ++tensor)
      for (float bad : {NAN, INFINITY}) {
        const DeviceCase dc = plain_case(text);
        CaseInputs in = make_case_inputs(dc);
        std::vector<float>& x = tensor_of(in, tensor);
        x[static_cast<size_t>(150 * dc.c.d + 5)] = bad;  // token 150 of the first head
        const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
        SCOPED_TRACE(std::string(text) + " tensor " + std::to_string(tensor));
        EXPECT_LE(relative_error(gpu.o, oracle.o), budget(dc));
        EXPECT_LE(relative_error(gpu.dq, oracle.dq), budget(dc));
        EXPECT_LE(relative_error(gpu.dk, oracle.dk), budget(dc));
        EXPECT_LE(relative_error(gpu.dv, oracle.dv), budget(dc));
        EXPECT_LE(largest_difference(gpu.lse, oracle.lse), 6e-5);
        EXPECT_LE(largest_difference(gpu.max_logit, oracle.max_logit), 6e-5);
      }
}

TEST(Plain, ZerosStayZeros) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 n200 d64 f32 causal", "h2 n200 d72 paper", "h2 n200 d64 f32 tokenwise causal"})
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const DeviceCase dc = plain_case(text);
      CaseInputs in = make_case_inputs(dc);
      std::vector<float>& x = tensor_of(in, tensor);
      std::fill(x.begin(), x.end(), 0.0f);
      const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
      SCOPED_TRACE(std::string(text) + " tensor " + std::to_string(tensor));
      EXPECT_LE(relative_error(gpu.o, oracle.o), budget(dc));
      EXPECT_LE(relative_error(gpu.dq, oracle.dq), budget(dc));
      EXPECT_LE(relative_error(gpu.dk, oracle.dk), budget(dc));
      EXPECT_LE(relative_error(gpu.dv, oracle.dv), budget(dc));
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
        Bound{"h4 hk2 n512 d160 f32 tokenwise causal", 0.03, 0.04},
        Bound{"h4 n512 d64 f32 tokenwise", 0.03, 0.03},
        Bound{"h4 n512 d64 f32 tokenwise causal lift=S,O,S2,dV,dP,dQ,dK", 1e-5, 1e-5},
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
  for (const char* text :
       {"b2 h2 n300 d64 f32 causal", "h3 nq200 nk333 d136 paper smooth_q=on",
        "h4 hk2 n150 d96 f16 rounding=dither", "b2 h2 n300 d72 f32 tokenwise causal",
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
                           "h2 nq0 nk30 d64 f32 tokenwise", "h2 nq30 nk0 d64 f32 tokenwise",
                           "b0 h2 n30 d64 f32 tokenwise"}) {
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
       {"h1 n64 d64 f32", "h1 n64 d192", "h1 n64 d64 smooth_q=on", "h1 n64 d64 rounding=dither",
        "h1 n64 d64 lift=dQ", "h1 n64 d64 tile=256x256", "h1 n64 d192 tokenwise"})
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

/// What the kernels make of one tensor of n tokens, alone in its call.
struct QuantizedTokens {
  QuantizedTokens(const std::vector<float>& x, int d_)
      : d(d_),
        pitch(static_cast<int>(round_up(d_, 16))),
        n(static_cast<int64_t>(x.size()) / d_),
        blocks(static_cast<size_t>(ceil_div(n, 64))),
        in(x),
        scale(static_cast<size_t>(n)),
        run_mean(blocks * static_cast<size_t>(d)),
        turned_mean(blocks * static_cast<size_t>(d)),
        codes(static_cast<size_t>(n * pitch)),
        poisoned(blocks) {
    job.batch.seq.count = 1, job.batch.seq.nq = job.batch.seq.nk = n;
    job.batch.seq.q_blocks = job.batch.seq.k_blocks = static_cast<int>(blocks);
    job.batch.q_blocks = job.batch.k_blocks = static_cast<int64_t>(blocks);
    job.batch.dtype = Dtype::f32;
    job.heads = 1, job.d = d, job.pitch = pitch, job.tokens = n, job.run = 64;
    job.x = {in.data, n * d, n * d, d, false};
    job.to = {codes.data, scale.data, nullptr, poisoned.data};
  }
  void expect(const std::vector<int8_t>& want, const std::vector<float>& want_scale) {
    cuda::plain::launch_tokens(job, nullptr);
    const std::vector<int8_t> got = codes.read();
    const std::vector<float> got_scale = scale.read();
    for (int64_t i = 0; i < n; ++i) {
      const size_t row = static_cast<size_t>(i);
      ASSERT_TRUE(got_scale[row] == want_scale[row] ||
                  (std::isnan(got_scale[row]) && std::isnan(want_scale[row])))
          << "token " << i;
      for (int c = 0; c < pitch; ++c)
        ASSERT_EQ(got[static_cast<size_t>(i * pitch + c)],
                  c < d ? want[static_cast<size_t>(i * d + c)] : 0)
            << "token " << i << " channel " << c;
    }
  }
  /// `want`: a mean per run.
  void expect_means(const Array<float>& means, const std::vector<float>& want) const {
    const std::vector<float> got = means.read();
    const size_t dim = static_cast<size_t>(d);
    for (size_t b = 0; b < blocks; ++b)
      for (size_t c = 0; c < dim; ++c)
        ASSERT_EQ(got[b * dim + c], want[b * 64 / static_cast<size_t>(job.run) * dim + c]);
  }

  int d, pitch;
  int64_t n;
  size_t blocks;
  Array<float> in, scale, run_mean, turned_mean;
  Array<int8_t> codes;
  Array<int> poisoned;
  cuda::plain::TokenJob job{};
};

/// Large and small tokens, zero ones, and one with NaN.
std::vector<float> uneven_tokens(int64_t n, int d) {
  std::vector<float> x(static_cast<size_t>(n * d));
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t token = i / static_cast<size_t>(d);
    const float size = token % 17 == 3   ? 0.0f
                       : token % 31 == 4 ? 1e5f
                                         : 1.0f + static_cast<float>(i % 13);
    x[i] = std::sin(0.37f * static_cast<float>(i * i % 9973)) * size;
    if (token >= 256 && token < 384) x[i] = 0.0f;  // a block of zeros
  }
  x[static_cast<size_t>(77 * d + 3)] = NAN;
  return x;
}

/// A recipe head that has one tensor for q, k and v.
ref::RecipeHead head_of(const std::vector<float>& x, int d, const char* text) {
  ref::RecipeHead head;
  head.nq = head.nk = static_cast<int64_t>(x.size()) / d, head.d = d;
  head.q = head.k = head.v = x.data();
  head.recipe = spec::AttnCase::parse(text).recipe;
  spec::Problem problem{};
  problem.recipe = head.recipe;
  const backend::Tiles tiles = backend::any_tiles(problem, 255);
  head.recipe.tile_q = tiles.q, head.recipe.tile_k = tiles.k;
  return head;
}

TEST(Plain, CodesEqualTheOracles) {
  NEED_DEVICE();
  using cuda::plain::ScaleOf;
  for (int d : {8, 40, 72, 80, 96, 136, 256})
    for (const char* text : {"vectorwise tile=64x64", "vectorwise tile=192x64 smooth_q=on",
                             "vectorwise rotate=off smooth_k=off smooth_v=off", "paper",
                             "paper tile=192x256 rotate=on smooth_q=on smooth_v=on"}) {
      SCOPED_TRACE(testing::Message() << text << " d" << d);
      const std::vector<float> x = uneven_tokens(500, d);
      const ref::RecipeHead head = head_of(x, d, text);
      const ref::RecipeOperands oracle = ref::make_operands(head);
      const ref::RecipeInputs& want = oracle.inputs;
      const Recipe& r = head.recipe;
      const bool paper = r.scheme == Scheme::paper;
      QuantizedTokens t(x, d);
      Array<float> k_mean(want.mu_k), v_mean(want.mu_v);

      t.job.rotate = r.rotate;
      t.job.mean = r.smooth_k ? k_mean.data : nullptr;
      t.job.run = spec::keys_per_scale(r, r.tile_k);
      t.job.scale_of = ScaleOf::run;
      t.expect(want.k8, want.k_scale);

      t.job.rotate = false;
      t.job.mean = r.smooth_v ? v_mean.data : nullptr;
      t.job.run = paper ? r.tile_k : kKeysPerScale;
      t.job.scale_of = paper ? ScaleOf::run : ScaleOf::value;
      t.expect(want.v8, want.v_scale);

      t.job.rotate = r.rotate, t.job.queries = true, t.job.mean = nullptr;
      t.job.run = r.tile_q, t.job.scale_of = paper ? ScaleOf::run : ScaleOf::token;
      if (r.smooth_q) {
        t.job.run_mean = t.run_mean.data;
        t.job.turned_mean = r.rotate ? t.turned_mean.data : nullptr;
      }
      t.expect(want.q8, want.q_scale);
      if (r.smooth_q) t.expect_means(t.run_mean, want.mu_q);
      if (r.smooth_q && r.rotate) t.expect_means(t.turned_mean, oracle.mu_q);
    }
}

TEST(Plain, TokenwiseCodesEqualTheOracles) {
  NEED_DEVICE();
  using cuda::plain::ScaleOf;
  for (int d : {8, 40, 72, 96, 256})
    for (const char* text :
         {"tokenwise", "tokenwise tile=64x64 rotate=off", "tokenwise smooth_k=off"}) {
      SCOPED_TRACE(testing::Message() << text << " d" << d);
      std::vector<float> x = uneven_tokens(700, d);
      for (float& value : x) value += 2.0f;  // so that there is something to centre
      const ref::RecipeHead head = head_of(x, d, text);
      const ref::RecipeOperands oracle = ref::make_operands(head);
      const ref::RecipeInputs& want = oracle.inputs;
      const size_t dim = static_cast<size_t>(d), key_blocks = 6, octaves = 4;
      QuantizedTokens t(x, d);
      t.job.rotate = head.recipe.rotate;

      Array<int8_t> centre8(std::vector<int8_t>(key_blocks * dim, 0x5a));
      Array<float> centre_scale(key_blocks);
      cuda::plain::Centres centres{.codes = centre8.data,
                                   .scale = centre_scale.data,
                                   .key_blocks = static_cast<int64_t>(key_blocks),
                                   .blocks = t.job.batch.seq};
      centres.blocks.q_blocks = centres.blocks.k_blocks = static_cast<int>(key_blocks);
      cuda::plain::launch_centres({.batch = t.job.batch,
                                   .heads = 1,
                                   .d = d,
                                   .k = t.job.x,
                                   .smooth = head.recipe.smooth_k,
                                   .rotate = head.recipe.rotate,
                                   .blocks = static_cast<int64_t>(key_blocks),
                                   .to = centres},
                                  nullptr);
      const std::vector<int8_t> got8 = centre8.read();
      const std::vector<float> got_scale = centre_scale.read();
      for (size_t octave = 0; octave < octaves; ++octave) {
        const size_t row = octave == 0 ? 0 : size_t{1} << (octave - 1);
        EXPECT_EQ(got_scale[row], want.centre_scale[octave]) << octave;
        for (size_t c = 0; c < dim; ++c)
          ASSERT_EQ(got8[row * dim + c], want.centre8[octave * dim + c]) << octave << " " << c;
      }
      for (size_t c = 0; c < dim; ++c) ASSERT_EQ(got8[3 * dim + c], 0x5a);  // no octave starts

      t.job.centres = centres, t.job.scale_of = ScaleOf::lone_key;
      t.expect(want.k8, want.k_scale);

      // K of dQ, from what was just made.
      Array<float> turned_mean(dim), mean(dim), scale(static_cast<size_t>(t.n));
      Array<int8_t> codes(static_cast<size_t>(t.n * t.pitch));
      cuda::plain::launch_dq_keys({.batch = t.job.batch,
                                   .heads = 1,
                                   .d = d,
                                   .pitch = t.pitch,
                                   .tokens = t.n,
                                   .tile = head.recipe.tile_k,
                                   .rotated = head.recipe.rotate,
                                   .k = t.job.to,
                                   .centres = centres,
                                   .turned_mean = turned_mean.data,
                                   .mean = mean.data,
                                   .to = {codes.data, scale.data, nullptr, nullptr}},
                                  nullptr);
      EXPECT_EQ(mean.read(), oracle.dq_mean);
      EXPECT_EQ(scale.read(), oracle.dq_fold);
      const std::vector<int8_t> got = codes.read();
      for (size_t i = 0; i < static_cast<size_t>(t.n); ++i)
        for (size_t c = 0; c < dim; ++c)
          ASSERT_EQ(got[i * static_cast<size_t>(t.pitch) + c], oracle.dq_keys[i * dim + c])
              << "key " << i << " channel " << c;

      t.job.rotate = false, t.job.centres = {}, t.job.scale_of = ScaleOf::lone_value;
      t.expect(want.v8, want.v_scale);
    }
}

/// Array on the host.
template <typename T>
struct HostArray {
  explicit HostArray(size_t n) : HostArray(std::vector<T>(n)) {}
  explicit HostArray(const std::vector<T>& x) : memory(x), data(memory.data()), count(x.size()) {}
  HostArray(const HostArray&) = delete;
  void write(const std::vector<T>& x, int64_t at) {
    std::copy(x.begin(), x.end(), memory.begin() + at);
  }
  const std::vector<T>& read() const { return memory; }
  std::vector<T> memory;
  T* data;
  size_t count;
};

/// A forward that saves codes, or one that does not, and its backward.
struct SavedRun {
  Results r;
  std::vector<std::byte> codes;
};

/// Runs an f32 case on `impl`. With codes the backward gets no q, k and v. `given`: the backward
/// takes codes, o and lse of that run.
template <template <typename> class Memory>
SavedRun run_saved(const DeviceCase& dc, const CaseInputs& in, const char* impl, bool with_codes,
                   const SavedRun* given = nullptr) {
  const spec::AttnCase& c = dc.c;
  setenv("SAGEBWD_IMPL", impl, 1);
  const Memory<float> q(in.x.q), k(in.x.k), v(in.x.v), dout(in.x.dout);
  const auto floats = [](int64_t n) { return std::vector<float>(static_cast<size_t>(n), NAN); };
  const int64_t sequences = dc.cu_q.empty() ? c.b : static_cast<int64_t>(dc.cu_q.size()) - 1;
  Memory<float> o(floats(c.o_elements())), lse(floats(c.b * c.h * c.nq)),
      top(floats(sequences * c.h)), dq(floats(c.q_elements())), dk(floats(c.k_elements())),
      dv(floats(c.v_elements()));
  ForwardArgs f;
  f.device = std::string(impl) == "cuda-plain" ? Device::cuda : Device::cpu;
  f.q = c.q_view(q.data), f.k = c.k_view(k.data), f.v = c.v_view(v.data), f.o = c.o_view(o.data);
  f.lse = contiguous_stats(lse.data, c.h, c.nq), f.max_logit = top.data;
  f.mask = c.mask, f.recipe = c.recipe;
  if (!dc.cu_q.empty()) f.documents = {dc.cu_q.data(), dc.cu_k.data(), sequences};
  Memory<std::byte> codes(std::vector<std::byte>(codes_size(f), std::byte{0x5a}));
  if (with_codes) f.codes = codes.data, f.codes_bytes = codes.count;
  const Memory<std::byte> forward_space(std::vector<std::byte>(workspace_size(f), std::byte{0x7f}));
  f.workspace = forward_space.data, f.workspace_bytes = forward_space.count;
  forward(f);
  SavedRun run{{o.read(), lse.read(), top.read(), {}, {}, {}}, codes.read()};
  if (given != nullptr) {
    codes.write(given->codes, 0);
    o.write(given->r.o, 0), lse.write(given->r.lse, 0);
  }

  BackwardArgs g;
  static_cast<AttentionArgs&>(g) = f;
  if (with_codes) g.q.data = g.k.data = g.v.data = nullptr;
  g.dout = c.o_view(dout.data), g.dq = c.q_view(dq.data);
  g.dk = c.k_view(dk.data), g.dv = c.v_view(dv.data);
  const Memory<std::byte> backward_space(
      std::vector<std::byte>(workspace_size(g), std::byte{0x7f}));
  g.workspace = backward_space.data, g.workspace_bytes = backward_space.count;
  backward(g);
  run.r.dq = dq.read(), run.r.dk = dk.read(), run.r.dv = dv.read();
  unsetenv("SAGEBWD_IMPL");
  return run;
}

/// Whether two pieces of memory hold the same codes; a NaN is as good as another.
void expect_same_codes(const DeviceCase& dc, const SavedRun& a, const SavedRun& b) {
  const spec::AttnCase& c = dc.c;
  const CodesLayout at(
      {.h = c.h,
       .hk = c.hk,
       .d = c.d,
       .dv = c.value_dim(),
       .queries = c.b * c.nq,
       .keys = c.b * c.nk,
       .sequences = dc.cu_q.empty() ? c.b : static_cast<int64_t>(dc.cu_q.size()) - 1,
       .packed = !dc.cu_q.empty(),
       .scheme = c.recipe.scheme});
  ASSERT_EQ(static_cast<int64_t>(a.codes.size()), at.bytes);
  for (const CodesPart& part : codes_parts(at)) {
    SCOPED_TRACE(part.name);
    if (part.codes)
      EXPECT_EQ(std::memcmp(a.codes.data() + part.at, b.codes.data() + part.at,
                            static_cast<size_t>(part.end - part.at)),
                0);
    else
      EXPECT_TRUE(same_bits(floats_of(a.codes, part), floats_of(b.codes, part)));
  }
}

void expect_saved_codes(const DeviceCase& dc, const CaseInputs& in) {
  SCOPED_TRACE(dc.c.to_string());
  const SavedRun plain = run_saved<Array>(dc, in, "cuda-plain", true),
                 without = run_saved<Array>(dc, in, "cuda-plain", false),
                 cpu = run_saved<HostArray>(dc, in, "", true),
                 oracle = run_saved<HostArray>(dc, in, "ref", true, &cpu),
                 from_cpu = run_saved<Array>(dc, in, "cuda-plain", true, &cpu);
  for (auto tensor :
       {&Results::o, &Results::lse, &Results::max_logit, &Results::dq, &Results::dk, &Results::dv})
    EXPECT_TRUE(same_bits(plain.r.*tensor, without.r.*tensor));
  expect_same_codes(dc, plain, oracle);
  expect_same_codes(dc, plain, cpu);
  EXPECT_LE(relative_error(from_cpu.r.dq, oracle.r.dq), budget(dc));
  EXPECT_LE(relative_error(from_cpu.r.dk, oracle.r.dk), budget(dc));
  EXPECT_LE(relative_error(from_cpu.r.dv, oracle.r.dv), budget(dc));
}

TEST(Plain, SavedCodes) {
  NEED_DEVICE();
  for (const char* text :
       {"b2 h2 hk1 n140 d40 f32 causal", "b2 h2 hk1 nq70 nk600 d40 f32 tokenwise causal",
        "h2 n300 d64 f32 tokenwise smooth_k=off rounding=dither lift=dV tile=64x64",
        "h1 n150 d256 f32 rotate=off smooth_k=off", "h1 n200 d72 f32 smooth_v=off",
        "h1 n200 d64 f32 rounding=dither lift=dV tile=64x192", "h2 hk1 n150 d192 dv=128 f32 causal",
        "b2 h1 nq70 nk150 d24 dv=40 f32 smooth_v=off"}) {
    const DeviceCase dc = plain_case(text);
    expect_saved_codes(dc, make_case_inputs(dc));
  }
}

TEST(Plain, SavedCodesOfDocuments) {
  NEED_DEVICE();
  for (const char* text : {"h4 hk2 nq700 nk650 d40 f32 causal", "h4 hk2 nq700 nk650 d40 dv=24 f32",
                           "h2 nq700 nk650 d64 f32 tokenwise causal"}) {
    DeviceCase dc = plain_case(text);
    dc.cu_q = {0, 0, 130, 131, 131, 400, 700};
    dc.cu_k = {0, 5, 200, 200, 207, 500, 650};
    expect_saved_codes(dc, make_case_inputs(dc));
  }
}

TEST(Plain, SavedCodesOfNanAndInf) {
  NEED_DEVICE();
  for (const char* text : {"h1 n300 d40 f32 causal", "h1 n300 d40 f32 tokenwise causal"})
    for (int tensor = 0; tensor < 3; ++tensor) {
      const DeviceCase dc = plain_case(text);
      SCOPED_TRACE(tensor);
      CaseInputs in = make_case_inputs(dc);
      std::vector<float>& x = tensor_of(in, tensor);
      x[static_cast<size_t>(150 * dc.c.d + 5)] = NAN;
      for (int64_t i = 256; i < 300; ++i)  // a block
        x[static_cast<size_t>(i * dc.c.d)] = INFINITY;
      expect_saved_codes(dc, in);
    }
}

}  // namespace
}  // namespace sagebwd::gpu
