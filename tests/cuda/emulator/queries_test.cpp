// SPDX-License-Identifier: Apache-2.0
// Operands of queries from saved codes: sm90 has a kernel for them, and its results have the bits
// of the operand kernel's. The main kernel that reads them is not part of the emulator.
#include "cuda/sm90/bwd/queries.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/half.h"
#include "emulator/operands_read.h"

namespace sagebwd::cuda::sm90 {
namespace {

struct Call {
  Dtype dtype;
  int d;
  int b, h, hk, nq, nk;
  bool dlse, halves;
};

/// Memory with 16-byte alignment that compares by bytes.
struct Bytes {
  explicit Bytes(size_t size) : at(size / 16 + 1) { std::memset(at.data(), 0x5a, at.size() * 16); }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(at.data());
  }
  bool operator==(const Bytes& other) const {
    return std::memcmp(at.data(), other.at.data(), at.size() * 16) == 0;
  }
  struct alignas(16) Unit {
    std::byte x[16];
  };
  std::vector<Unit> at;
};

class Random {
 public:
  float normal() { return normal_(rng_); }
  unsigned below(unsigned n) { return static_cast<unsigned>(rng_() % n); }

 private:
  std::mt19937 rng_{7};
  std::normal_distribution<float> normal_;
};

struct Inputs {
  explicit Inputs(const Call& c)
      : dout(size_of(c) * 2),
        o(size_of(c) * 2),
        q8(size_of(c)),
        q_scale(queries(c)),
        mean_logit(queries(c)),
        lse(queries(c)),
        dlse(queries(c)),
        v_scale(static_cast<size_t>(c.hk * c.b * c.nk)),
        k_scale(v_scale.size() / kBlock),
        v_mean(static_cast<size_t>(c.b * c.hk * c.d)) {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = INFINITY;
    const auto put = [&](Bytes& to, size_t i, float x) {
      to.as<uint16_t>()[i] =
          c.dtype == Dtype::bf16 ? from_float<bf16>(x).bits : from_float<f16>(x).bits;
    };
    for (size_t row = 0; row < queries(c); ++row) {
      // Most rows are ordinary; some are zero, tiny beside the others, or large.
      const float kinds[] = {1, 1, 1, 1, 0, 0x1p-12f, 0x1p-20f, 64};
      const float size = kinds[random.below(8)];
      for (size_t e = 0; e < static_cast<size_t>(c.d); ++e) {
        const size_t i = row * static_cast<size_t>(c.d) + e;
        put(dout, i, size * random.normal()), put(o, i, random.normal());
        q8.as<int8_t>()[i] = static_cast<int8_t>(static_cast<int>(random.below(255)) - 127);
      }
      const size_t bad = row * static_cast<size_t>(c.d) + random.below(static_cast<unsigned>(c.d));
      if (random.below(16) == 0) put(dout, bad, random.below(2) != 0 ? nan : inf);
      if (random.below(32) == 0) put(o, bad, random.below(2) != 0 ? nan : -inf);
      q_scale[row] = random.below(16) == 0   ? 0.0f
                     : random.below(32) == 0 ? nan
                                             : std::fabs(random.normal());
      mean_logit[row] = random.normal(), dlse[row] = random.normal();
      lse[row] = random.below(16) == 0 ? -inf : random.below(32) == 0 ? nan : random.normal();
    }
    for (float& x : v_scale)
      x = random.below(32) == 0 ? nan : random.below(4) == 0 ? 0.0f : std::fabs(random.normal());
    for (float& x : k_scale)
      x = random.below(8) == 0 ? nan : random.below(4) == 0 ? 0.0f : std::fabs(random.normal());
    for (float& x : v_mean) x = random.normal();
  }
  static size_t queries(const Call& c) { return static_cast<size_t>(c.b * c.h * c.nq); }
  static size_t size_of(const Call& c) { return queries(c) * static_cast<size_t>(c.d); }

  Random random;
  Bytes dout, o, q8;
  std::vector<float> q_scale, mean_logit, lse, dlse, v_scale, k_scale, v_mean;
};

struct Outputs {
  explicit Outputs(const Call& c)
      : tokens(static_cast<size_t>(c.h * c.b * ((c.nq + kBlock - 1) / kBlock * kBlock))),
        heads(static_cast<size_t>(c.b * c.hk)),
        q8t(tokens * static_cast<size_t>(c.d)),
        do8t(q8t),
        q8(q8t),
        do16(tokens * static_cast<size_t>(c.d) * 2),
        dq_sum(tokens * static_cast<size_t>(c.d) * (c.halves ? 2 : 4)),
        row(tokens * sizeof(QueryRow)),
        stats(tokens / kSlab * sizeof(QueryStats)),
        dq_lift(tokens * sizeof(float)),
        zeros((kBefore + 3 * heads + kBehind) * sizeof(uint32_t)) {}
  static constexpr size_t kBefore = 64, kBehind = 1000;
  size_t tokens, heads;
  Bytes q8t, do8t, q8, do16, dq_sum, row, stats, dq_lift;
  Bytes zeros;  // among other things the largest scales
};

OperandJob job_of(const Call& c, Inputs& in, Outputs& out, Bytes& items) {
  OperandJob job{};
  const int q_blocks = (c.nq + kBlock - 1) / kBlock, k_blocks = c.nk / kBlock;
  job.seq = {.count = c.b, .nq = c.nq, .nk = c.nk, .q_blocks = q_blocks, .k_blocks = k_blocks};
  job.d = job.padded_d = c.d;
  job.h = c.h, job.hk = c.hk, job.group = c.h / c.hk;
  job.q_blocks = c.b * q_blocks, job.k_blocks = c.b * k_blocks;
  job.tq = int64_t{job.q_blocks} * kBlock, job.tk = int64_t{job.k_blocks} * kBlock;
  job.backward = job.keys_are_ready = true;
  job.scheme = Scheme::vectorwise, job.tile_k = kBlock;
  job.logit_scale = 0.125f;
  auto* words = out.zeros.as<uint32_t>();
  job.zeros.piece[0] = {words,
                        static_cast<int64_t>(Outputs::kBefore + 3 * out.heads + Outputs::kBehind)};
  job.next = words;
  job.v_top = reinterpret_cast<uint2*>(words + Outputs::kBefore);
  job.k_top = words + Outputs::kBefore + 2 * out.heads;
  job.items = items.as<Item>();
  job.saved = {.queries = int64_t{c.b} * c.nq,
               .keys = int64_t{c.b} * c.nk,
               .key_blocks = job.k_blocks,
               .q8 = in.q8.as<int8_t>(),
               .k8 = nullptr,
               .v8 = nullptr,
               .q_scale = in.q_scale.data(),
               .mean_logit = in.mean_logit.data(),
               .k_scale = in.k_scale.data(),
               .v_scale = in.v_scale.data(),
               .v_mean = in.v_mean.data()};
  // Tokens outside heads, as PyTorch's projections give them.
  const auto strided = [&](Bytes& x) {
    return Strided{x.as<void>(), int64_t{c.nq} * c.h * c.d, c.d, int64_t{c.h} * c.d, true};
  };
  job.dout = strided(in.dout), job.o = strided(in.o);
  job.lse = {in.lse.data(), int64_t{c.h} * c.nq, c.nq, 1};
  if (c.dlse) job.dlse = {in.dlse.data(), int64_t{c.nq} * c.h, 1, c.h};
  if (c.nq % kBlock != 0) job.q8 = out.q8.as<int8_t>();
  job.q8t = out.q8t.as<int8_t>(), job.do8t = out.do8t.as<int8_t>();
  job.do16 = out.do16.as<void>(), job.dq_sum = out.dq_sum.as<void>(), job.dq_halves = c.halves;
  job.row = out.row.as<QueryRow>(), job.stats = out.stats.as<QueryStats>();
  job.dq_lift = out.dq_lift.as<float>();
  return job;
}

class ReadQueries : public testing::TestWithParam<Call> {};

TEST_P(ReadQueries, SameBitsAsTheOperandKernel) {
  const Call& c = GetParam();
  Inputs in(c);
  Outputs got(c), want(c);
  Bytes items(static_cast<size_t>(
      kItemBytes * most_items(c.hk, c.h / c.hk, c.b * (c.nq / kBlock + 1), c.b * c.nk / kBlock)));
  const OperandJob job = job_of(c, in, got, items);
  ASSERT_TRUE(has_only_queries(job));
  launch_queries(job, c.dtype, nullptr);
  emulator::launch_operands_read(job_of(c, in, want, items), c.dtype);
  want.zeros.as<uint32_t>()[0] = 0;  // pieces of work that were handed out
  EXPECT_TRUE(got.q8t == want.q8t);
  EXPECT_TRUE(got.do8t == want.do8t);
  EXPECT_TRUE(got.q8 == want.q8);
  EXPECT_TRUE(got.do16 == want.do16);
  EXPECT_TRUE(got.dq_sum == want.dq_sum);
  EXPECT_TRUE(got.row == want.row);
  EXPECT_TRUE(got.stats == want.stats);
  EXPECT_TRUE(got.dq_lift == want.dq_lift);
  EXPECT_TRUE(got.zeros == want.zeros);
}

INSTANTIATE_TEST_SUITE_P(Every, ReadQueries,
                         testing::Values(Call{Dtype::bf16, 128, 2, 4, 2, 256, 256, false, true},
                                         Call{Dtype::bf16, 64, 2, 2, 2, 256, 128, false, true},
                                         Call{Dtype::f16, 128, 1, 2, 1, 200, 384, true, true},
                                         Call{Dtype::f16, 64, 2, 2, 1, 130, 256, true, false},
                                         Call{Dtype::bf16, 128, 3, 1, 1, 10, 128, false, false},
                                         Call{Dtype::bf16, 64, 3, 3, 1, 100, 128, true, true}));

TEST(HopperOperands, SlabsOfATileHaveTheSameUnits) {
  const Call c{Dtype::bf16, 64, 1, 2, 1, 512, 128, true, true};
  Inputs in(c);
  Outputs out(c);
  Bytes items(static_cast<size_t>(kItemBytes * most_items(1, 2, 4, 1)));
  launch_queries(job_of(c, in, out, items), c.dtype, nullptr);
  const auto* stats = out.stats.as<QueryStats>();
  for (size_t i = 0; i < out.tokens / kSlab; i += 2) {
    EXPECT_EQ(stats[i].dv_unit, stats[i + 1].dv_unit);
    EXPECT_EQ(stats[i].ds_unit, stats[i + 1].ds_unit);
  }
  EXPECT_NE(stats[0].dv_unit, stats[2].dv_unit);
}

}  // namespace
}  // namespace sagebwd::cuda::sm90
