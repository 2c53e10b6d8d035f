// SPDX-License-Identifier: Apache-2.0
#include "trace/inputs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/half.h"
#include "sagebwd/error.h"

namespace sagebwd::trace {
namespace {

using spec::AttnCase;

struct Moments {
  double mean, deviation, kurtosis;
};

Moments moments(const std::vector<float>& x) {
  double s1 = 0, s2 = 0, s4 = 0;
  for (float v : x) s1 += v;
  const double n = static_cast<double>(x.size()), mean = s1 / n;
  for (float v : x) s2 += (v - mean) * (v - mean), s4 += std::pow(v - mean, 4);
  return {mean, std::sqrt(s2 / n), (s4 / n) / (s2 / n * (s2 / n))};
}

/// Softmax of query i over its visible keys, in double.
std::vector<double> row_of_p(const AttnCase& c, const Inputs& in, int64_t i) {
  const spec::KeyRange r = c.visible(i);
  std::vector<double> p;
  for (int64_t j = r.begin; j < r.end; ++j) {
    double s = 0;
    for (int64_t ch = 0; ch < c.d; ++ch)
      s += static_cast<double>(in.q[i * c.d + ch]) * in.k[j * c.d + ch];
    p.push_back(s / std::sqrt(static_cast<double>(c.d)));
  }
  const double top = *std::max_element(p.begin(), p.end());
  double sum = 0;
  for (double& x : p) sum += x = std::exp(x - top);
  for (double& x : p) x /= sum;
  return p;
}

TEST(Inputs, GaussianHasTheStatedMoments) {
  const auto c = AttnCase::parse("h2 n1024 d64 f32");
  const Inputs in = make_inputs(c, InputKind::gaussian, 3.0);
  for (const auto& [x, sigma] :
       {std::pair{&in.q, 3.0}, {&in.k, 3.0}, {&in.v, 1.0}, {&in.dout, 1.0}}) {
    const Moments m = moments(*x);
    EXPECT_NEAR(m.mean, 0, 0.02 * sigma);
    EXPECT_NEAR(m.deviation, sigma, 0.01 * sigma);
    EXPECT_NEAR(m.kurtosis, 3.0, 0.1);
  }
}

TEST(Inputs, SameSeedSameBitsOtherSeedOtherBits) {
  const auto c = AttnCase::parse("b2 h4 hk2 n64 d16 seed5");
  const Inputs a = make_inputs(c, InputKind::sink), b = make_inputs(c, InputKind::sink);
  EXPECT_EQ(a.q, b.q);
  EXPECT_EQ(a.v, b.v);
  const Inputs other = make_inputs(AttnCase::parse("b2 h4 hk2 n64 d16 seed6"), InputKind::sink);
  EXPECT_NE(a.q, other.q);
  // Heads and tensors do not repeat each other.
  EXPECT_FALSE(std::equal(a.k.begin(), a.k.begin() + 64 * 16, a.k.begin() + 64 * 16));
  const Inputs plain = make_inputs(c, InputKind::gaussian);
  EXPECT_FALSE(std::equal(plain.k.begin(), plain.k.end(), plain.v.begin()));
}

TEST(Inputs, KnownValuesDoNotMove) {
  // Pins the generator: records made with a case string stay comparable.
  const Inputs in = make_inputs(AttnCase::parse("n2 d8 f32 seed1"), InputKind::gaussian);
  EXPECT_NEAR(in.q[0], -0.6491368, 1e-5);
  EXPECT_NEAR(in.q[1], -1.5840458, 1e-5);
  EXPECT_NEAR(in.dout[15], 0.2683918, 1e-5);
}

TEST(Inputs, ValuesFitTheElementType) {
  const Inputs in = make_inputs(AttnCase::parse("n64 d16 bf16"), InputKind::outlier, 2.0);
  for (const auto* x : {&in.q, &in.k, &in.v, &in.dout})
    for (float value : *x) ASSERT_EQ(value, to_float(from_float<bf16>(value)));
  const Inputs half = make_inputs(AttnCase::parse("n64 d16 f16"), InputKind::gaussian);
  for (float value : half.q) ASSERT_EQ(value, to_float(from_float<f16>(value)));
}

TEST(Inputs, SinkTakesItsShareOfEveryRow) {
  for (const char* text : {"n1024 d64 f32", "n1024 d64 f32 causal"}) {
    const auto c = AttnCase::parse(text);
    const Inputs in = make_inputs(c, InputKind::sink);
    double mean = 0;
    int64_t rows = 0;
    for (int64_t i = 64; i < c.nq; i += 16, ++rows) {
      const double p = row_of_p(c, in, i)[0];
      EXPECT_GT(p, 0.45) << text << " row " << i;
      EXPECT_LT(p, 0.8) << text << " row " << i;
      mean += p;
    }
    EXPECT_NEAR(mean / static_cast<double>(rows), 0.65, 0.03) << text;
  }
}

TEST(Inputs, SinkStaysBetweenNothingAndAllAtLargeSigma) {
  const auto c = AttnCase::parse("n1024 d64 f32");
  const Inputs in = make_inputs(c, InputKind::sink, 3.0);
  double mean = 0;
  for (int64_t i = 0; i < c.nq; i += 16) mean += row_of_p(c, in, i)[0] / 64;
  EXPECT_GT(mean, 0.3);
  EXPECT_LT(mean, 0.95);
}

/// Share of the keys `places` in the rows that see all of them and at least 64 keys.
double share_of(const AttnCase& c, const Inputs& in, const std::vector<int64_t>& places) {
  double share = 0;
  int64_t rows = 0;
  for (int64_t i = 7; i < c.nq; i += 16) {
    const spec::KeyRange r = c.visible(i);
    if (r.end <= places.back() || r.end < 64) continue;
    const std::vector<double> p = row_of_p(c, in, i);
    for (int64_t j : places) share += p[j];
    ++rows;
  }
  return share / static_cast<double>(rows);
}

TEST(Inputs, SinksAreWhereTheirNamesSay) {
  struct Sinks {
    InputKind kind;
    std::vector<int64_t> places;
    double share;
  };
  for (const char* text : {"n1024 d64 f32", "n1024 d128 f32 causal"}) {
    const auto c = AttnCase::parse(text);
    for (const Sinks& s : {Sinks{InputKind::sink_127, {127}, 0.65},
                           {InputKind::sink_128, {128}, 0.65},
                           {InputKind::sink_middle, {352}, 0.65},
                           {InputKind::sinks, {0, 160, 352, 704}, 0.65},
                           {InputKind::strong_sink, {752}, 0.95}}) {
      const Inputs in = make_inputs(c, s.kind);
      EXPECT_NEAR(share_of(c, in, s.places), s.share, s.share < 0.9 ? 0.05 : 0.015)
          << input_name(s.kind) << " " << text;
      for (int64_t j : s.places) {  // little value, and a key as long as others
        const auto length = [&](const std::vector<float>& x) {
          double square = 0;
          for (int64_t ch = 0; ch < c.d; ++ch) square += x[j * c.d + ch] * x[j * c.d + ch];
          return std::sqrt(square / static_cast<double>(c.d));
        };
        EXPECT_NEAR(length(in.v), 0.1, 0.03) << input_name(s.kind);
        EXPECT_NEAR(length(in.k), 1.0, 0.01) << input_name(s.kind);
      }
    }
  }
  const auto full = AttnCase::parse("n1024 d64 f32");
  EXPECT_NEAR(share_of(full, make_inputs(full, InputKind::sink_last), {1023}), 0.65, 0.05);
  const auto seven = AttnCase::parse("n7 d8 f32");  // too short for key 127: no sink, no crash
  EXPECT_EQ(make_inputs(seven, InputKind::sink_127).k.size(), 56u);
}

/// Deviations of the channels of one head.
std::vector<double> channel_deviations(const std::vector<float>& x, int64_t n, int64_t d) {
  std::vector<double> deviation(d);
  for (int64_t ch = 0; ch < d; ++ch) {
    std::vector<float> column;
    for (int64_t i = 0; i < n; ++i) column.push_back(x[i * d + ch]);
    const Moments m = moments(column);
    EXPECT_LT(std::fabs(m.mean), 0.1 * m.deviation) << "no mean that smoothing could take out";
    deviation[ch] = m.deviation;
  }
  return deviation;
}

TEST(Inputs, LargeChannelsHaveNoMean) {
  const auto c = AttnCase::parse("n2048 d64 f32");
  const auto check = [&](const std::vector<float>& x, double factor) {
    std::vector<double> deviation = channel_deviations(x, c.nk, c.d);
    std::sort(deviation.begin(), deviation.end());
    EXPECT_NEAR(deviation.back(), factor, 0.1 * factor);
    EXPECT_NEAR(deviation[c.d - 2], 1.0, 0.1);
  };
  const Inputs channels = make_inputs(c, InputKind::channels),
               value = make_inputs(c, InputKind::value_channel);
  check(channels.q, 6), check(channels.k, 12), check(channels.v, 1);
  check(value.q, 1), check(value.k, 1), check(value.v, 20);
}

TEST(Inputs, HeavyTails) {
  const auto c = AttnCase::parse("n2048 d64 f32");
  const Inputs in = make_inputs(c, InputKind::heavy);
  for (const auto* x : {&in.q, &in.k}) {
    // Beyond 5.84 on either side lies one value in a hundred of Student's t with three degrees.
    const auto far =
        std::count_if(x->begin(), x->end(), [](float v) { return std::fabs(v) > 5.84f; });
    EXPECT_NEAR(static_cast<double>(far) / static_cast<double>(x->size()), 0.01, 0.001);
  }
  EXPECT_NEAR(moments(in.v).kurtosis, 3.0, 0.1);
}

/// The key with the largest logit of each row, that logit, and the mean of the others.
TEST(Inputs, SharpRowsHaveTheirGap) {
  for (const char* text : {"n512 d64 f32", "n512 d64 f32 causal"}) {
    const auto c = AttnCase::parse(text);
    for (const auto& [kind, gap] : {std::pair{InputKind::previous, 10.0},
                                    {InputKind::one_hot, 14.0},
                                    {InputKind::dominant, 10.0}}) {
      const Inputs in = make_inputs(c, kind);
      std::set<int64_t> targets;
      double others = 0;
      for (int64_t i = 40; i < c.nq; i += 8) {
        const std::vector<double> p = row_of_p(c, in, i);
        const int64_t top = std::max_element(p.begin(), p.end()) - p.begin();
        targets.insert(top);
        if (kind == InputKind::previous) {
          EXPECT_EQ(top, i - 1);
        }
        double mean = 0;
        for (int64_t j = 0; j < static_cast<int64_t>(p.size()); ++j)
          if (j != top) mean += std::log(p[j] / p[top]) / static_cast<double>(p.size() - 1);
        EXPECT_NEAR(-mean, gap, 1.5) << input_name(kind) << " row " << i;
        others += 1 - p[top];
      }
      if (kind == InputKind::dominant) {
        EXPECT_LE(targets.size(), 4u) << "every 128 rows share a key";
      } else {
        EXPECT_GT(targets.size(), 50u) << "every row has its own key";
      }
      EXPECT_LT(others / 59, kind == InputKind::one_hot ? 0.02 : 0.25);
    }
  }
}

TEST(Inputs, DelimitersHaveTheirGapAndAQuietTail) {
  for (const auto& [kind, gap] : {std::pair{InputKind::delimiters6, 6.0},
                                  {InputKind::delimiters7, 7.0},
                                  {InputKind::delimiters8, 8.0}}) {
    const auto c = AttnCase::parse("n1024 d64 f32");
    const Inputs in = make_inputs(c, kind);
    for (int64_t i = 0; i < c.nq; i += 64) {
      const std::vector<double> p = row_of_p(c, in, i);
      double delimiter = 0, tail = 0, spread = 0;
      for (int64_t j = 0; j < c.nk; ++j) {
        if (j % 100 == 50)
          delimiter += std::log(p[j]) / 10;
        else
          tail += std::log(p[j]) / 1014;
      }
      for (int64_t j = 0; j < c.nk; ++j)
        if (j % 100 != 50) spread += std::pow(std::log(p[j]) - tail, 2) / 1014;
      EXPECT_NEAR(delimiter - tail, gap, 0.2) << input_name(kind) << " row " << i;
      EXPECT_LT(std::sqrt(spread), 1.0) << "the tail is flat";
    }
    // What is left of the delimiters' value, and the two sides of the others.
    double small = 0, product = 0;
    for (int64_t ch = 0; ch < c.d; ++ch) {
      small += in.v[50 * c.d + ch] * in.v[50 * c.d + ch];
      product += in.v[ch] * in.v[ch];
    }
    EXPECT_NEAR(std::sqrt(small / product), 0.1, 0.03);
  }
}

TEST(Inputs, LongRowsAreFlatWithRarePeaks) {
  const auto c = AttnCase::parse("n2048 d64 f32");
  const Inputs in = make_inputs(c, InputKind::long_rows);
  int64_t peaks = 0, rows = 0;
  double share = 0;
  for (int64_t i = 0; i < c.nq; i += 4, ++rows) {
    const auto p = row_of_p(c, in, i);
    const double top = *std::max_element(p.begin(), p.end());
    if (top > 0.1)
      ++peaks, share += top;
    else
      EXPECT_LT(top, 8.0 / 2048);
  }
  EXPECT_NEAR(static_cast<double>(peaks) / static_cast<double>(rows), 1.0 / 8, 0.04);
  EXPECT_NEAR(share / static_cast<double>(peaks), 0.3, 0.06);
}

TEST(Inputs, OutlierChannelsStandOut) {
  const auto c = AttnCase::parse("n256 d64 f32");
  const Inputs in = make_inputs(c, InputKind::outlier);
  for (const auto& [x, expected] : {std::pair{&in.q, 1}, {&in.k, 3}, {&in.v, 1}, {&in.dout, 1}}) {
    int large = 0;
    for (int64_t ch = 0; ch < c.d; ++ch) {
      double sum = 0;
      for (int64_t i = 0; i < c.nq; ++i) sum += std::abs((*x)[i * c.d + ch]);
      if (sum / static_cast<double>(c.nq) > 10) ++large;
    }
    EXPECT_GE(large, 1);
    EXPECT_LE(large, expected);
  }
}

TEST(Inputs, OffsetMovesTheMeanKeyOnly) {
  const auto c = AttnCase::parse("n256 d64 f32");
  const Inputs plain = make_inputs(c, InputKind::gaussian), in = make_inputs(c, InputKind::offset);
  EXPECT_EQ(in.q, plain.q);
  EXPECT_EQ(in.v, plain.v);
  double square = 0;
  for (int64_t ch = 0; ch < c.d; ++ch) {
    const float shift = in.k[ch] - plain.k[ch];
    square += static_cast<double>(shift) * shift / static_cast<double>(c.d);
    for (int64_t i = 1; i < c.nk; ++i)
      ASSERT_NEAR(in.k[i * c.d + ch] - plain.k[i * c.d + ch], shift, 1e-4);
  }
  EXPECT_NEAR(std::sqrt(square), 10.0, 3.0);
}

TEST(Inputs, RopeBiasTurnsAndIsNoMeanOfAll) {
  const auto c = AttnCase::parse("n2048 d64 f32");
  const Inputs plain = make_inputs(c, InputKind::gaussian),
               in = make_inputs(c, InputKind::rope_bias);
  EXPECT_EQ(in.q, plain.q);
  EXPECT_EQ(in.v, plain.v);
  int biased = 0;
  for (int64_t ch = 0; ch < c.d / 2; ++ch) {
    for (int64_t i = 0; i < c.nk; ++i) {
      const float a = in.k[i * c.d + ch] - plain.k[i * c.d + ch];
      const float b = in.k[i * c.d + ch + 32] - plain.k[i * c.d + ch + 32];
      const float length = std::hypot(a, b);
      if (length < 1) continue;
      ASSERT_NEAR(length, 30, 1e-3) << "channel " << ch << ", key " << i;
      if (i == 0) ++biased;
      if (i == c.nk - 1) {
        EXPECT_GT(std::hypot(a - 30, b), 30) << "it has turned by more than 60 degrees";
      }
    }
  }
  EXPECT_EQ(biased, 2);
}

TEST(Inputs, LongKeys) {
  const auto c = AttnCase::parse("n512 d64 f32");
  const Inputs plain = make_inputs(c, InputKind::gaussian);
  for (InputKind kind : {InputKind::long_key, InputKind::late_long}) {
    const Inputs in = make_inputs(c, kind);
    for (int64_t i = 0; i < c.nk; ++i) {
      const bool longer = kind == InputKind::long_key ? i % 128 == 50 : i >= 306;
      EXPECT_FLOAT_EQ(in.k[i * c.d], plain.k[i * c.d] * (longer ? 20.0f : 1.0f))
          << input_name(kind) << " key " << i;
    }
    EXPECT_EQ(in.v, plain.v);
  }
}

TEST(Inputs, NamesRoundTripAndBadOnesAreRefused) {
  for (const char* name : {"gaussian", "outlier", "sink", "long", "offset", "delimiters7"})
    EXPECT_STREQ(input_name(input_by_name(name)), name);
  std::set<std::string> names, descriptions;
  for (InputKind kind : all_inputs()) {
    EXPECT_EQ(input_by_name(input_name(kind)), kind);
    names.insert(input_name(kind)), descriptions.insert(input_description(kind));
  }
  EXPECT_EQ(names.size(), 23u);
  EXPECT_EQ(descriptions.size(), 23u);
  EXPECT_THROW(input_by_name("easy"), Error);
  try {
    input_by_name("delimiter8");
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("delimiters7 or delimiters8"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("did you mean"), std::string::npos) << e.what();
  }
  EXPECT_THROW(make_inputs(AttnCase{}, InputKind::gaussian, 0.0), Error);
  EXPECT_THROW(make_inputs(AttnCase{}, InputKind::gaussian, std::nan("")), Error);
}

TEST(Inputs, EmptyShapesAreFine) {
  for (InputKind kind : all_inputs()) {
    EXPECT_TRUE(make_inputs(AttnCase::parse("nq0 nk4 d8"), kind).q.empty());
    EXPECT_EQ(make_inputs(AttnCase::parse("nq4 nk0 d8"), kind).q.size(), 32u);
  }
}

}  // namespace
}  // namespace sagebwd::trace
