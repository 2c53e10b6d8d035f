// SPDX-License-Identifier: Apache-2.0
// What the backward of sm90 makes of saved codes. Packed calls and calls whose rows are not aligned
// have instances of their own: the same numbers must come out of them, bit by bit.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "base/half.h"
#include "cuda/sm90/bwd/operands.h"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm90 {
namespace {

/// How the same call comes: as it is best, as documents, with rows that are not aligned.
enum class Form { regular, documents, unaligned, both };

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
        dout_aside(size_of(c) * 2 + 2),
        o_aside(size_of(c) * 2 + 2),
        q8(size_of(c)),
        q_scale(queries(c)),
        lse(queries(c)),
        dlse(queries(c)),
        v_scale(keys(c)),
        k_scale(keys(c)),
        k8(keys(c) * static_cast<size_t>(c.d)),
        v8(k8),
        centre8(keys(c) / kBlock * static_cast<size_t>(c.d)),
        v_centre8(centre8),
        centre_scale(keys(c) / kBlock),
        v_centre_scale(centre_scale) {
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
        q8.as<int8_t>()[i] = code();
      }
      const size_t bad = row * static_cast<size_t>(c.d) + random.below(static_cast<unsigned>(c.d));
      if (random.below(16) == 0) put(dout, bad, random.below(2) != 0 ? nan : inf);
      if (random.below(32) == 0) put(o, bad, random.below(2) != 0 ? nan : -inf);
      q_scale[row] = random.below(16) == 0   ? 0.0f
                     : random.below(32) == 0 ? nan
                                             : std::fabs(random.normal());
      dlse[row] = random.normal();
      lse[row] = random.below(16) == 0 ? -inf : random.below(32) == 0 ? nan : random.normal();
    }
    for (float& x : v_scale)
      x = random.below(32) == 0 ? nan : random.below(4) == 0 ? 0.0f : std::fabs(random.normal());
    for (float& x : k_scale)
      x = random.below(8) == 0 ? nan : random.below(4) == 0 ? 0.0f : std::fabs(random.normal());
    for (auto* scales : {&centre_scale, &v_centre_scale})
      for (float& x : *scales) x = random.below(4) == 0 ? 0.0f : std::fabs(random.normal());
    for (size_t i = 0; i < centre_scale.size() * static_cast<size_t>(c.d); ++i)
      centre8.as<int8_t>()[i] = code(), v_centre8.as<int8_t>()[i] = code();
    for (size_t i = 0; i < keys(c) * static_cast<size_t>(c.d); ++i)
      k8.as<int8_t>()[i] = code(), v8.as<int8_t>()[i] = code();
    // Rows one element further than they should be.
    for (auto [from, to] : {std::pair{&dout, &dout_aside}, {&o, &o_aside}})
      std::memcpy(to->as<uint16_t>() + 1, from->as<uint16_t>(), size_of(c) * 2);
  }
  int8_t code() { return static_cast<int8_t>(static_cast<int>(random.below(255)) - 127); }
  static size_t keys(const Call& c) { return static_cast<size_t>(c.hk * c.b * c.nk); }
  static size_t queries(const Call& c) { return static_cast<size_t>(c.b * c.h * c.nq); }
  static size_t size_of(const Call& c) { return queries(c) * static_cast<size_t>(c.d); }

  Random random;
  Bytes dout, o, dout_aside, o_aside, q8;
  std::vector<float> q_scale, lse, dlse, v_scale, k_scale;
  Bytes k8, v8, centre8, v_centre8;
  std::vector<float> centre_scale, v_centre_scale;
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
        octave_stats(static_cast<size_t>(numerics::octaves_of(c.nk)) * tokens / kSlab *
                     sizeof(OctaveStats)),
        dq_mean(heads * static_cast<size_t>(c.d) * sizeof(float)),
        dq_mean_back(dq_mean),
        dq_lift(tokens * sizeof(float)),
        v_top(heads * 4),
        k_top(heads * 4),
        zeros(kZeros * 4),
        k8(Inputs::keys(c) * static_cast<size_t>(c.d)),
        v8(k8),
        k_scale(Inputs::keys(c) * 4),
        v_scale(Inputs::keys(c) * 4) {}
  static constexpr size_t kZeros = 1000;
  size_t tokens, heads;
  Bytes q8t, do8t, q8, do16, dq_sum, row, stats, octave_stats, dq_mean, dq_mean_back, dq_lift,
      v_top, k_top, zeros;
  Bytes k8, v8, k_scale, v_scale;
  std::vector<DocumentStart> documents;
};

BackwardJob job_of(const Call& c, Inputs& in, Outputs& out, Form form) {
  const bool packed = form == Form::documents || form == Form::both,
             aligned = form == Form::regular || form == Form::documents;
  const int q_blocks = (c.nq + kBlock - 1) / kBlock, k_blocks = c.nk / kBlock;
  for (int i = 0; packed && i <= c.b; ++i)
    out.documents.push_back({i * c.nq, i * c.nk, i * q_blocks, i * k_blocks});
  // Tokens outside heads, as PyTorch's projections give them.
  const auto strided = [&](Bytes& x, Bytes& aside) {
    return Strided{aligned ? x.as<void>() : aside.as<uint16_t>() + 1, int64_t{c.nq} * c.h * c.d,
                   c.d, int64_t{c.h} * c.d, aligned};
  };
  const auto statistics = [&](std::vector<float>& x) {
    return StridedStats{x.data(), int64_t{c.nq} * c.h, 1, c.h};
  };
  tuned::SavedCodes saved{};
  saved.queries = int64_t{c.b} * c.nq, saved.keys = int64_t{c.b} * c.nk;
  saved.key_blocks = int64_t{c.b} * k_blocks;
  saved.q8 = in.q8.as<int8_t>(), saved.k8 = in.k8.as<int8_t>(), saved.v8 = in.v8.as<int8_t>();
  saved.q_scale = in.q_scale.data();
  saved.k_scale = in.k_scale.data(), saved.v_scale = in.v_scale.data();
  return {.seq = {.count = c.b,
                  .nq = packed ? c.b * c.nq : c.nq,
                  .nk = packed ? c.b * c.nk : c.nk,
                  .q_blocks = packed ? 0 : q_blocks,
                  .k_blocks = packed ? 0 : k_blocks,
                  .documents = packed ? out.documents.data() : nullptr},
          .d = c.d,
          .h = c.h,
          .hk = c.hk,
          .group = c.h / c.hk,
          .k_blocks = c.b * k_blocks,
          .tq = int64_t{c.b} * q_blocks * kBlock,
          .tk = int64_t{c.b} * k_blocks * kBlock,
          .zeros = {{{out.zeros.as<uint32_t>(), Outputs::kZeros}}},
          .saved = saved,
          .o = strided(in.o, in.o_aside),
          .dout = strided(in.dout, in.dout_aside),
          .lse = statistics(in.lse),
          .dlse = c.dlse ? statistics(in.dlse) : StridedStats{},
          .logit_scale = 0.125f,
          .v_top = out.v_top.as<uint32_t>(),
          .k_top = out.k_top.as<uint32_t>(),
          .keys_are_ready = !packed,
          .k8 = out.k8.as<int8_t>(),
          .v8 = out.v8.as<int8_t>(),
          .k_scale = out.k_scale.as<float>(),
          .v_scale = out.v_scale.as<float>(),
          .q8 = c.nq % kBlock != 0 ? out.q8.as<int8_t>() : nullptr,
          .q8t = out.q8t.as<int8_t>(),
          .do8t = out.do8t.as<int8_t>(),
          .do16 = out.do16.as<void>(),
          .row = out.row.as<QueryRow>(),
          .stats = out.stats.as<QueryStats>(),
          .dq_lift = out.dq_lift.as<float>(),
          .dq_sum = out.dq_sum.as<void>(),
          .dq_halves = c.halves,
          .centre8 = in.centre8.as<int8_t>(),
          .centre_scale = in.centre_scale.data(),
          .v_centre8 = in.v_centre8.as<int8_t>(),
          .v_centre_scale = in.v_centre_scale.data(),
          .dq_mean = out.dq_mean.as<float>(),
          .dq_mean_back = out.dq_mean_back.as<float>(),
          .rotation = c.d,
          .octave_stats = out.octave_stats.as<OctaveStats>()};
}

/// Where the i-th of 16 queries is (tile::place_of).
int place_of(int i) { return (i & 6) * 2 + (i & 8) / 4 + (i & 1); }

class ReadQueries : public testing::TestWithParam<Call> {};

TEST_P(ReadQueries, SameBitsInEveryForm) {
  const Call& c = GetParam();
  Inputs in(c);
  Outputs want(c);
  launch_operands(job_of(c, in, want, Form::regular), c.dtype, nullptr);
  for (Form form : {Form::documents, Form::unaligned, Form::both}) {
    SCOPED_TRACE(static_cast<int>(form));
    Outputs got(c);
    launch_operands(job_of(c, in, got, form), c.dtype, nullptr);
    EXPECT_TRUE(got.q8t == want.q8t);
    EXPECT_TRUE(got.do8t == want.do8t);
    EXPECT_TRUE(got.q8 == want.q8);
    EXPECT_TRUE(got.do16 == want.do16);
    EXPECT_TRUE(got.dq_sum == want.dq_sum);
    EXPECT_TRUE(got.row == want.row);
    EXPECT_TRUE(got.stats == want.stats);
    EXPECT_TRUE(got.octave_stats == want.octave_stats);
    EXPECT_TRUE(got.dq_mean == want.dq_mean);
    EXPECT_TRUE(got.dq_mean_back == want.dq_mean_back);
    EXPECT_TRUE(got.dq_lift == want.dq_lift);
    EXPECT_TRUE(got.v_top == want.v_top);
    EXPECT_TRUE(got.k_top == want.k_top);
    EXPECT_TRUE(got.zeros == want.zeros);
    if (form == Form::unaligned) continue;
    // Nothing needs padding here, so copies are what was saved.
    EXPECT_TRUE(got.k8 == in.k8);
    EXPECT_TRUE(got.v8 == in.v8);
    for (size_t i = 0; i < in.v_scale.size(); ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(got.v_scale.as<float>()[i]),
                std::bit_cast<uint32_t>(in.v_scale[i]));
    for (size_t i = 0; i < in.k_scale.size(); ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(got.k_scale.as<float>()[i]),
                std::bit_cast<uint32_t>(in.k_scale[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Every, ReadQueries,
                         testing::Values(Call{Dtype::bf16, 128, 2, 4, 2, 256, 256, false, true},
                                         Call{Dtype::bf16, 64, 2, 2, 2, 256, 128, false, true},
                                         Call{Dtype::f16, 128, 1, 2, 1, 200, 384, true, true},
                                         Call{Dtype::f16, 64, 2, 2, 1, 130, 256, true, false},
                                         Call{Dtype::bf16, 128, 3, 1, 1, 10, 128, false, false},
                                         Call{Dtype::bf16, 64, 3, 3, 1, 100, 128, true, true},
                                         Call{Dtype::bf16, 128, 2, 4, 2, 200, 1152, false, true},
                                         Call{Dtype::f16, 64, 2, 2, 1, 256, 384, true, true},
                                         Call{Dtype::f16, 128, 1, 2, 1, 130, 640, true, true},
                                         Call{Dtype::bf16, 64, 3, 2, 2, 100, 256, false, false}));

/// Numbers of a query and an octave, as FP64 finds them from codes.
TEST(HopperOperands, StatsOfAnOctaveHaveItsCentres) {
  for (int d : {64, 128}) {
    const Call c{Dtype::bf16, d, 2, 2, 1, 200, 1152, false, true};
    Inputs in(c);
    Outputs out(c);
    launch_operands(job_of(c, in, out, Form::regular), c.dtype, nullptr);
    const auto* stats = out.stats.as<QueryStats>();
    const auto* of_octaves = out.octave_stats.as<OctaveStats>();
    const int padded = 256, octaves = numerics::octaves_of(c.nk);
    const auto place = [&](int query) { return query % kSlab / 16 * 16 + place_of(query % 16); };
    const auto stats_at = [&](int octave, int query) -> const OctaveStats& {
      return of_octaves[(static_cast<size_t>(octave) * out.tokens + static_cast<size_t>(query)) /
                        kSlab];
    };
    const auto at = [&](int octave, int query) {
      return stats_at(octave, query).exponent[place(query)];
    };
    for (int head = 0; head < c.h; ++head)
      for (int sequence = 0; sequence < c.b; ++sequence)
        for (int i = 0; i < c.nq; ++i) {
          const int row = (head * c.b + sequence) * padded + i,
                    from = (head * c.b + sequence) * c.nq + i;
          const auto logit = [&](int octave) {
            const int block =
                sequence * (c.nk / kBlock) + static_cast<int>(numerics::first_block_of(octave));
            int dot = 0;
            for (int e = 0; e < d; ++e)
              dot += in.q8.as<int8_t>()[from * d + e] * in.centre8.as<int8_t>()[block * d + e];
            const float factor = stats[row / kSlab].factor[place(row)];
            return static_cast<double>(dot) *
                   static_cast<double>(in.centre_scale[static_cast<size_t>(block)]) *
                   static_cast<double>(factor);
          };
          if (!std::isfinite(at(0, row))) continue;
          for (int octave = 1; octave < octaves; ++octave)
            ASSERT_NEAR(static_cast<double>(at(octave, row)) - static_cast<double>(at(0, row)),
                        logit(octave) - logit(0),
                        1e-5 * (1.0 + std::fabs(logit(octave)) + std::fabs(logit(0))));
          // The offset: the slope times dO·centre, the same but for that in all octaves.
          const double slope = static_cast<double>(stats[row / kSlab].slope[place(row)]);
          const auto product = [&](int octave) {
            const int block =
                sequence * (c.nk / kBlock) + static_cast<int>(numerics::first_block_of(octave));
            double dot = 0;
            for (int e = 0; e < d; ++e) {
              bf16 x;
              x.bits = in.dout.as<uint16_t>()[((sequence * c.nq + i) * c.h + head) * d + e];
              dot += static_cast<double>(to_float(x)) * in.v_centre8.as<int8_t>()[block * d + e];
            }
            return slope * dot * static_cast<double>(in.v_centre_scale[static_cast<size_t>(block)]);
          };
          const auto offset = [&](int octave) {
            return static_cast<double>(stats_at(octave, row).offset[place(row)]);
          };
          for (int octave = 1; octave < octaves && std::isfinite(offset(0)); ++octave)
            ASSERT_NEAR(offset(octave) - offset(0), product(octave) - product(0),
                        1e-5 * (1.0 + std::fabs(offset(octave)) + std::fabs(offset(0))));
        }
  }
}

/// The mean of the sampled keys, made again from codes; and no key without it exceeds the bound.
TEST(HopperOperands, KeysWithoutTheirMeanStayInBounds) {
  const Call c{Dtype::bf16, 64, 2, 1, 1, 128, 1152, false, true};
  Inputs in(c);
  Outputs out(c);
  launch_operands(job_of(c, in, out, Form::regular), c.dtype, nullptr);
  for (int sequence = 0; sequence < c.b; ++sequence) {
    const auto number = [&](int64_t key, int e) {
      const auto row = static_cast<size_t>(sequence * c.nk + key),
                 centre = static_cast<size_t>(
                     sequence * (c.nk / kBlock) +
                     numerics::first_block_of(numerics::octave_of_block(key / kBlock)));
      const auto channel = static_cast<size_t>(e), d = static_cast<size_t>(c.d);
      return static_cast<double>(in.k_scale[row]) * in.k8.as<int8_t>()[row * d + channel] +
             static_cast<double>(in.centre_scale[centre]) *
                 in.centre8.as<int8_t>()[centre * d + channel];
    };
    const double bound =
        127.0 * static_cast<double>(std::bit_cast<float>(out.k_top.as<uint32_t>()[sequence]));
    const numerics::Sample sample = numerics::spread_sample(c.nk);
    for (int e = 0; e < c.d; ++e) {
      double sum = 0;
      int count = 0;
      for (int n = 0; n < sample.count; ++n)
        if (const double x = number(sample.key(n), e); !std::isnan(x)) sum += x, ++count;
      const double mean = static_cast<double>(out.dq_mean.as<float>()[sequence * c.d + e]);
      EXPECT_NEAR(mean, sum / count, 1e-5 * (1.0 + std::fabs(mean)));
      for (int64_t key = 0; key < c.nk; ++key)
        if (const double x = number(key, e); !std::isnan(x)) {
          ASSERT_LE(std::fabs(x - mean), bound * (1.0 + 1e-6));
        }
    }
  }
}

// Sequences of 300 keys: the last 84 of three blocks are padding.
TEST(HopperOperands, KeysArePadded) {
  constexpr int kKeys = 300, kPadded = 384, kSequences = 2, kHeads = 2, kD = 64;
  const Call c{Dtype::bf16, kD, kSequences, kHeads, kHeads, 128, kPadded, false, true};
  Inputs in(c);
  Outputs out(c);
  BackwardJob job = job_of(c, in, out, Form::regular);
  job.seq.nk = kKeys, job.saved.keys = kSequences * kKeys, job.keys_are_ready = false;
  launch_operands(job, c.dtype, nullptr);
  for (int head = 0; head < kHeads; ++head)
    for (int i = 0; i < kSequences * kPadded; ++i) {
      const int token = i % kPadded, to = head * kSequences * kPadded + i,
                from = head * kSequences * kKeys + i / kPadded * kKeys + token;
      for (int e = 0; e < kD; ++e) {
        ASSERT_EQ(out.k8.as<int8_t>()[to * kD + e],
                  token < kKeys ? in.k8.as<int8_t>()[from * kD + e] : 0);
        ASSERT_EQ(out.v8.as<int8_t>()[to * kD + e],
                  token < kKeys ? in.v8.as<int8_t>()[from * kD + e] : 0);
      }
      ASSERT_EQ(
          std::bit_cast<uint32_t>(out.v_scale.as<float>()[to]),
          std::bit_cast<uint32_t>(token < kKeys ? in.v_scale[static_cast<size_t>(from)] : 1.0f));
    }
}

TEST(HopperOperands, SlabsOfATileHaveTheSameUnits) {
  const Call c{Dtype::bf16, 64, 1, 2, 1, 512, 128, true, true};
  Inputs in(c);
  Outputs out(c);
  launch_operands(job_of(c, in, out, Form::regular), c.dtype, nullptr);
  const auto* stats = out.stats.as<QueryStats>();
  for (size_t i = 0; i < out.tokens / kSlab; i += 2) {
    EXPECT_EQ(stats[i].dv_unit, stats[i + 1].dv_unit);
    EXPECT_EQ(stats[i].ds_unit, stats[i + 1].ds_unit);
  }
  EXPECT_NE(stats[0].dv_unit, stats[2].dv_unit);
}

}  // namespace
}  // namespace sagebwd::cuda::sm90
