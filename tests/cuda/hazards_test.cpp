// SPDX-License-Identifier: Apache-2.0
// What must hold for any kernel: same bits from run to run and from any memory, poison goes where
// it belongs and nowhere else, zeros stay zeros, and a captured graph replays the call.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "device_case.h"

namespace sagebwd::gpu {
namespace {

TEST(GpuHazards, PoisonedMemory) {
  NEED_DEVICE();
  for (const char* text : {"b2 h2 n300 d64 causal", "h3 nq200 nk333 d128 paper", "h2 n150 d96",
                           "h2 n300 d64", "h2 n150 d96 causal"}) {
    DeviceCase a(text), b(text), c(text);
    a.poison = 0x7f, b.poison = 0x80, c.poison = 0x00;
    for (DeviceCase* dc : {&a, &b, &c}) dc->deterministic = true;
    const CaseInputs in = make_case_inputs(a);
    const Results ra = run_on_device(a, in), rb = run_on_device(b, in), rc = run_on_device(c, in);
    EXPECT_TRUE(ra == rb) << text;
    EXPECT_TRUE(ra == rc) << text;
  }
}

TEST(GpuHazards, SameBitsEveryTime) {
  NEED_DEVICE();
  for (const char* text : {"b4 h4 n512 d64 causal", "b4 h4 n512 d128"}) {
    DeviceCase dc(text);
    dc.deterministic = true;
    const CaseInputs in = make_case_inputs(dc);
    const Results first = run_on_device(dc, in);
    for (int i = 0; i < 10; ++i)
      ASSERT_TRUE(run_on_device(dc, in) == first) << text << " run " << i;
  }
}

// Equal sequences side by side, whose thread blocks meet in another order each: equal results.
TEST(GpuHazards, SameBitsInAnyCompany) {
  NEED_DEVICE();
  for (const char* text : {"b3 h2 hk1 n330 d64", "b3 h2 hk1 n270 d128 window=90,100",
                           "b3 h2 n200 d64 paper causal", "b3 h2 hk1 n270 d64 causal"})
    for (bool partial : {false, true}) {
      DeviceCase dc(text);
      dc.deterministic = true, dc.partial_kv = partial;
      CaseInputs in = make_case_inputs(dc);
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        std::vector<float>& x = tensor_of(in, tensor);
        for (size_t i = x.size() / 3; i < x.size(); ++i) x[i] = x[i % (x.size() / 3)];
      }
      const Results r = run_on_device(dc, in, partial ? 0.4f : 0.0f);
      for (const auto* x : {&r.dq, &r.dk, &r.dv})
        for (size_t i = 0; i < x->size(); ++i)
          ASSERT_EQ((*x)[i], (*x)[i % (x->size() / 3)]) << text << " " << partial << " " << i;
    }
}

// Without the promise dQ is added up in any order; everything else keeps its bits.
TEST(GpuHazards, OnlyDqDependsOnTheOrder) {
  NEED_DEVICE();
  for (const char* text :
       {"b2 h2 n512 d64 causal", "b2 h2 n512 d128", "h2 n300 d96 paper", "h2 n300 d64"}) {
    DeviceCase a(text), b(text);
    a.poison = 0x7f, b.poison = 0x80;
    const CaseInputs in = make_case_inputs(a);
    Results ra = run_on_device(a, in), rb = run_on_device(b, in);
    // cuda-sm90 adds in half precision.
    EXPECT_LE(relative_error(ra.dq, rb.dq), works_in_halves(a) ? 3e-3 : 1e-3) << text;
    ra.dq.clear(), rb.dq.clear();
    EXPECT_TRUE(ra == rb) << text;
  }
}

/// A row of `got` is bad throughout where one of `want` is bad somewhere, and nowhere else.
void expect_bad_rows(const std::vector<float>& got, const std::vector<float>& want, int64_t d) {
  for (size_t row = 0; row < got.size(); row += static_cast<size_t>(d)) {
    bool bad = false;
    for (size_t i = row; i < row + static_cast<size_t>(d); ++i) bad |= !std::isfinite(want[i]);
    for (size_t i = row; i < row + static_cast<size_t>(d); ++i)
      ASSERT_EQ(std::isfinite(got[i]), !bad) << i;
  }
}

TEST(GpuHazards, NanAndInfGoWhereTheyBelong) {
  NEED_DEVICE();
  for (const char* text : {"h2 n200 d64 causal", "h2 n200 d128", "h2 n200 d64 paper causal",
                           "h2 n200 d128 paper", "h2 n200 d64 window=20,10"})
    for (int tensor = 0; tensor < kTensors; ++tensor)
      for (float bad : {NAN, INFINITY})
        for (bool deterministic : {false, true}) {
          DeviceCase dc(text);
          dc.deterministic = deterministic;
          CaseInputs in = make_case_inputs(dc);
          std::vector<float>& x = tensor_of(in, tensor);
          x[static_cast<size_t>(150 * dc.c.d + 5)] = bad;  // token 150 of the first head
          const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
          SCOPED_TRACE(std::string(text) + " tensor " + std::to_string(tensor));
          const bool marks_rows = works_in_halves(dc) || dc.c.recipe.scheme != Scheme::paper;
          if (marks_rows && tensor == 2)  // all channels of the rows that see it
            expect_bad_rows(gpu.o, oracle.o, dc.c.d);
          else
            EXPECT_LE(relative_error(gpu.o, oracle.o), 5e-3);
          EXPECT_LE(relative_error(gpu.dq, oracle.dq), 5e-3);
          EXPECT_LE(relative_error(gpu.dk, oracle.dk), 5e-3);
          EXPECT_LE(relative_error(gpu.dv, oracle.dv), 5e-3);
          EXPECT_LE(largest_difference(gpu.lse, oracle.lse), works_in_halves(dc) ? 4e-3 : 2e-4);
        }
}

// Where all that a row sees has logits far from those of the centres of its keys: P must not
// vanish.
TEST(GpuHazards, LogitsFarFromTheirCentres) {
  NEED_DEVICE();
  const auto scale_keys = [](CaseInputs& in, const DeviceCase& dc, int64_t from, int64_t to,
                             float factor, float offset) {
    for (int64_t i = from * dc.c.d; i < to * dc.c.d; ++i) {
      float& x = tensor_of(in, 1)[static_cast<size_t>(i)];
      x = factor * x + offset * (i % 3 == 0 ? 1.0f : -1.0f);
    }
  };
  struct Keys {
    const char* text;
    int64_t from, to;
    float factor, offset;
  };
  for (const Keys& keys : {
           Keys{"h1 n700 d64 causal window=60,-1", 128, 512, 1.0f, 40.0f},
           Keys{"h1 n700 d128 window=60,20", 128, 256, 1.0f, -40.0f},
           Keys{"h1 n300 d128 causal smooth_k=off", 0, 300, 1.0f, 30.0f},
           Keys{"h1 n300 d64 smooth_k=off", 0, 300, 1.0f, -30.0f},
           Keys{"h1 n300 d64 causal", 0, 1, 300.0f, 0.0f},
           Keys{"h1 n300 d128 causal", 0, 1, 2000.0f, 0.0f},
           Keys{"h1 n300 d128", 1, 300, 30.0f, 0.0f},
       }) {
    const DeviceCase dc(keys.text);
    CaseInputs in = make_case_inputs(dc);
    scale_keys(in, dc, keys.from, keys.to, keys.factor, keys.offset);
    const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
    EXPECT_LE(relative_error(gpu.o, oracle.o), 2e-2) << keys.text;
    float most = 0.0f;
    for (size_t i = 0; i < gpu.lse.size(); ++i)
      most = std::max(
          most, std::fabs(gpu.lse[i] - oracle.lse[i]) / (1.0f + 1e-3f * std::fabs(oracle.lse[i])));
    EXPECT_LE(most, 0.1f) << keys.text;
  }
}

// Nothing but NaN, or NaN beside zeros: blocks of V whose largest finite magnitude is zero.
TEST(GpuHazards, NanAmongZeros) {
  NEED_DEVICE();
  for (const char* text :
       {"h2 n200 d64", "h2 nq70 nk129 d128", "h1 nq5 nk1 d64", "h1 nq5 nk1 d128"})
    for (bool zeros : {false, true}) {
      SCOPED_TRACE(std::string(text) + (zeros ? " zeros" : ""));
      const DeviceCase dc(text);
      CaseInputs in = make_case_inputs(dc);
      const auto d = static_cast<size_t>(dc.c.d), last = static_cast<size_t>(dc.c.nk - 1) * d;
      std::fill(in.x.v.begin(), in.x.v.end(), zeros ? 0.0f : NAN);
      in.x.v[last] = NAN;  // of the first head; every query sees it
      const Results gpu = run_on_device(dc, in);
      for (size_t i = 0; i < static_cast<size_t>(dc.c.nq) * d; ++i)
        if (!zeros || i % d == 0 || works_in_halves(dc) || dc.c.recipe.scheme != Scheme::paper) {
          ASSERT_TRUE(std::isnan(gpu.o[i])) << i;
        }
    }
}

TEST(GpuHazards, ZerosStayZeros) {
  NEED_DEVICE();
  for (const char* text : {"h2 n200 d64 causal", "h2 n200 d128 paper"})
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const DeviceCase dc(text);
      CaseInputs in = make_case_inputs(dc);
      std::vector<float>& x = tensor_of(in, tensor);
      std::fill(x.begin(), x.end(), 0.0f);
      const Results gpu = run_on_device(dc, in), oracle = run_oracle(dc, in, gpu);
      SCOPED_TRACE(std::string(text) + " tensor " + std::to_string(tensor));
      EXPECT_LE(relative_error(gpu.o, oracle.o), 5e-3);
      EXPECT_LE(relative_error(gpu.dq, oracle.dq), 5e-3);
      EXPECT_LE(relative_error(gpu.dk, oracle.dk), 5e-3);
      EXPECT_LE(relative_error(gpu.dv, oracle.dv), 5e-3);
    }
}

// Sums of many tiles, and still exactly nothing where there is nothing to add.
TEST(GpuHazards, ZeroChannelsStayZero) {
  NEED_DEVICE();
  // Rotation mixes the channels of Q and K, so a zero channel comes back from rounded codes as
  // noise. `paper` does not rotate.
  for (const char* text :
       {"h2 n700 d64 causal rotate=off", "h1 n1100 d128 rotate=off", "h2 n300 d128 paper"}) {
    const DeviceCase dc(text);
    CaseInputs in = make_case_inputs(dc);
    const auto d = static_cast<size_t>(dc.c.d);
    for (auto* x : {&in.x.q, &in.x.k, &in.x.v, &in.x.dout})
      for (size_t i = 5; i < x->size(); i += d) (*x)[i] = 0.0f;
    const Results gpu = run_on_device(dc, in);
    for (const auto* x : {&gpu.o, &gpu.dq, &gpu.dk, &gpu.dv}) {
      for (size_t i = 5; i < x->size(); i += d) ASSERT_EQ((*x)[i], 0.0f) << text << " " << i;
      EXPECT_NE((*x)[6], 0.0f) << text;
    }
  }
}

TEST(GpuHazards, GradientsAreLinearInDout) {
  NEED_DEVICE();
  for (const char* text : {"h2 n300 d64 causal"}) {
    const DeviceCase dc(text);
    const CaseInputs in = make_case_inputs(dc);
    const Results one = run_on_device(dc, in);
    for (int power : {-60, -20, 20}) {
      CaseInputs scaled = in;
      for (float& x : scaled.x.dout) x = std::ldexp(x, power);
      Results r = run_on_device(dc, scaled);
      for (auto* v : {&r.dq, &r.dk, &r.dv})
        for (float& x : *v) x = std::ldexp(x, -power);
      EXPECT_LE(relative_error(r.dq, one.dq), 1e-3) << text << " " << power;
      EXPECT_LE(relative_error(r.dk, one.dk), 1e-3) << text << " " << power;
      EXPECT_LE(relative_error(r.dv, one.dv), 1e-3) << text << " " << power;
    }
  }
}

// Not in `paper`: what is done after so many tiles (taking the starts of integer sums off) must
// not tell a row how many tiles its neighbours visit. Queries alone lie in other thread blocks.
TEST(GpuHazards, SameRowsBesideOtherQueries) {
  NEED_DEVICE();
  for (const char* rest : {" nk1500 d64 causal", " nk1500 d128 window=1200,0"}) {
    const DeviceCase whole("h1 nq1500" + std::string(rest));
    const CaseInputs in = make_case_inputs(whole);
    const Results all = run_on_device(whole, in);
    for (int64_t first : {1021, 1337}) {
      const DeviceCase last("h1 nq" + std::to_string(1500 - first) + rest);
      const auto row = static_cast<std::ptrdiff_t>(first * whole.c.d);
      CaseInputs part = in;
      part.x.q.erase(part.x.q.begin(), part.x.q.begin() + row);
      part.x.dout.erase(part.x.dout.begin(), part.x.dout.begin() + row);
      const Results alone = run_on_device(last, part);
      EXPECT_TRUE(std::equal(alone.o.begin(), alone.o.end(), all.o.begin() + row)) << first << rest;
      EXPECT_TRUE(std::equal(alone.lse.begin(), alone.lse.end(), all.lse.begin() + first))
          << first << rest;
    }
  }
}

// Logits of 4e5, whose references are rounded to many units: the softmax must come to an end.
TEST(GpuHazards, HugeLogits) {
  NEED_DEVICE();
  for (const char* text : {"h1 n300 d64 causal", "h1 n300 d128", "h1 n300 d128 causal"}) {
    DeviceCase dc(text);
    dc.sigma = 300.0;
    const CaseInputs in = make_case_inputs(dc);
    const Results got = run_on_device(dc, in);
    const Results want = run_oracle(dc, in, got);
    for (size_t i = 0; i < got.lse.size(); ++i)
      ASSERT_NEAR(got.lse[i], want.lse[i], 1e-3 * std::fabs(want.lse[i]) + 1.0) << text << " " << i;
  }
}

TEST(GpuHazards, DeclinesWithAReason) {
  NEED_DEVICE();
  for (const char* text : {"h1 n64 d64 f32", "h1 n64 d192", "h1 n64 d64 paper smooth_q=on",
                           "h1 n64 d64 rounding=dither", "h1 n64 d64 rounding=dither:dQ,dK",
                           "h1 n64 d64 paper rounding=dither", "h1 n64 d64 lift=dQ",
                           "h1 n64 d64 lift=dK", "h1 n64 d64 tile=256x128"})
    EXPECT_NE(device_candidate(DeviceCase(text), true).reason, "") << text;
  for (const char* text : {"h1 n64 d64", "h1 n64 d64 paper"})
    for (bool backward : {false, true}) {
      const Candidate fine = device_candidate(DeviceCase(text), backward);
      EXPECT_EQ(fine.reason, "") << text;
      EXPECT_TRUE(fine.supported) << text;
    }
  // What cuda-sm90 declines goes to cuda-sm80; so a test of cuda-sm90 must be sure that it is one.
  for (const char* text : {"h1 n64 d64", "b2 h4 hk2 nq90 nk300 d128 causal f16"})
    for (bool backward : {false, true})
      for (bool partial : {false, true}) {
        DeviceCase dc(text);
        dc.partial_kv = partial;
        EXPECT_EQ(device_candidate(dc, backward).name, tuned_implementation()) << text;
      }
  if (tuned_implementation() != "cuda-sm90") return;
  const auto name = [](const char* text) { return device_candidate(DeviceCase(text), true).name; };
  for (const char* text :
       {"h1 n64 d64 tile=128x128", "h1 n64 d64 tile=128x0", "h1 n64 d128 tile=64x128"})
    EXPECT_EQ(name(text), "cuda-sm90") << text;
  for (const char* text : {"h1 n64 d64 tile=64x128", "h1 n64 d64 tile=64x0",
                           "h1 n64 d64 tile=192x128", "h1 n64 d128 tile=128x128"})
    EXPECT_NE(name(text), "cuda-sm90") << text;
  EXPECT_EQ(name("h1 n64 d64 tile=64x64"), "cuda-sm80");
}

TEST(GpuHazards, EmptyProblems) {
  NEED_DEVICE();
  for (const char* text : {"h2 nq0 nk30 d64", "h2 nq30 nk0 d64", "b0 h2 n30 d64"}) {
    const DeviceCase dc(text);
    const Results r = run_on_device(dc, make_case_inputs(dc));
    for (const auto* v : {&r.o, &r.dq, &r.dk, &r.dv})
      for (float x : *v) ASSERT_EQ(x, 0.0f) << text;
    for (float x : r.lse) ASSERT_EQ(x, -INFINITY) << text;
    for (float x : r.max_logit) ASSERT_EQ(x, -INFINITY) << text;
  }
}

}  // namespace
}  // namespace sagebwd::gpu
