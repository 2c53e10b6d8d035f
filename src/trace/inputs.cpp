// SPDX-License-Identifier: Apache-2.0
#include "trace/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <span>

#include "base/check.h"
#include "base/dispatch_dtype.h"
#include "base/hash.h"
#include "base/parallel.h"
#include "base/suggest.h"

namespace sagebwd::trace {
namespace {

using spec::AttnCase;

/// What a stream of random numbers is for: part of its key.
enum Stream : uint64_t {
  kQ,
  kK,
  kV,
  kDout,
  kSinkDirection,
  kChannels,
  kFactors,
  kOffset,
  kPeakRow,
  kPeakKey
};

constexpr double kSinkShare = 0.65;      // of each row, as a sink of a trained model may take
constexpr double kSinkValue = 0.1;       // deviation of the sink's value; trained sinks have little
constexpr double kPeakShare = 0.3;       // of a row that has a peak
constexpr uint64_t kPeakEvery = 8;       // one row in this many has one
constexpr double kPeakLogit = 24.0;      // bound of its logit
constexpr double kPeakNoise = 0.3;       // of Q in long rows, times sigma: the rest stays uniform
constexpr double kOffsetSpread = 10.0;   // of the mean of K across channels, times sigma
constexpr double kOutlierSpread = 0.03;  // between tokens, relative to what a channel shares

/// Independent normal numbers by index: Box-Muller on two 32-bit uniforms of one hash.
class Normal {
 public:
  Normal(uint64_t seed, Stream stream, int64_t batch, int64_t head)
      : key_(hash64({seed, stream, static_cast<uint64_t>(batch), static_cast<uint64_t>(head)})) {}

  double operator()(int64_t index) const {
    const uint64_t bits = mix64(key_ ^ static_cast<uint64_t>(index >> 1));
    const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;  // in (0, 1)
    const double angle = static_cast<double>(bits & 0xffffffffu) * 0x1p-32 * 2 * std::numbers::pi;
    const double radius = std::sqrt(-2 * std::log(u));
    return radius * ((index & 1) ? std::sin(angle) : std::cos(angle));
  }

 private:
  uint64_t key_;
};

void fill(std::span<float> out, const Normal& normal, double sigma) {
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<float>(sigma * normal(static_cast<int64_t>(i)));
}

/// One head of one tensor: rows of d values.
struct Rows {
  std::span<float> data;
  int64_t d;
  std::span<float> operator[](int64_t i) const { return data.subspan(i * d, d); }
  int64_t count() const { return static_cast<int64_t>(data.size()) / d; }
};

double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += static_cast<double>(a[c]) * b[c];
  return sum;
}

void add_scaled(std::span<float> x, double factor, std::span<const float> y) {
  for (size_t c = 0; c < x.size(); ++c) x[c] = static_cast<float>(x[c] + factor * y[c]);
}

/// A channel and its magnification, both fixed by the key.
struct Outlier {
  int64_t channel;
  double factor;
};

Outlier outlier_of(uint64_t seed, Stream tensor, int64_t batch, int64_t head, int index, int64_t d,
                   double low, double high) {
  const auto key = [&](Stream what) {
    return hash64({seed, what, tensor, static_cast<uint64_t>(batch), static_cast<uint64_t>(head),
                   static_cast<uint64_t>(index)});
  };
  return {static_cast<int64_t>(key(kChannels) % static_cast<uint64_t>(d)),
          low * std::pow(high / low, static_cast<double>(unit_float(key(kFactors))))};
}

/// The channel becomes factor·sigma for all tokens, plus a small part that differs by token. This
/// is what K looks like in trained models.
void share_channel(Rows x, Outlier o, double sigma) {
  for (int64_t i = 0; i < x.count(); ++i) {
    float& value = x[i][o.channel];
    value = static_cast<float>(o.factor * (sigma + kOutlierSpread * value));
  }
}

void scale_channel(Rows x, Outlier o) {
  for (int64_t i = 0; i < x.count(); ++i)
    x[i][o.channel] = static_cast<float>(o.factor * x[i][o.channel]);
}

/// Logit at which one key takes `share` of a row whose `others` keys have normal logits of this
/// variance. The sum over n keys is n·exp(variance / 2) while many keys contribute. Once the
/// deviation exceeds sqrt(2 ln n), the largest logit alone dominates the sum.
double logit_for_share(double share, int64_t others, double variance) {
  const double log_n = std::log(static_cast<double>(std::max<int64_t>(others, 1)));
  const double log_sum =
      variance < 2 * log_n ? log_n + variance / 2 : std::sqrt(2 * log_n * variance);
  return std::log(share / (1 - share)) + log_sum;
}

std::vector<float> unit_direction(uint64_t seed, int64_t batch, int64_t kv_head, int64_t d) {
  std::vector<float> u(d);
  fill(u, Normal(seed, kSinkDirection, batch, kv_head), 1.0);
  const double norm = std::sqrt(dot(u, u));
  for (float& x : u) x = static_cast<float>(x / norm);
  return u;
}

void remove_direction(Rows x, std::span<const float> u) {
  for (int64_t i = 0; i < x.count(); ++i) add_scaled(x[i], -dot(x[i], u), u);
}

/// Makes the heads of a case, one at a time, so that they can run in parallel.
class Generator {
 public:
  Generator(const AttnCase& c, InputKind kind, double sigma) : c_(c), kind_(kind), sigma_(sigma) {}

  void kv_head(int64_t batch, int64_t head, Rows k, Rows v) const {
    fill(k.data, Normal(c_.seed, kK, batch, head), sigma_);
    fill(v.data, Normal(c_.seed, kV, batch, head), 1.0);
    if (k.count() == 0) return;
    if (kind_ == InputKind::outlier) {
      for (int i = 0; i < 3; ++i)
        share_channel(k, outlier_of(c_.seed, kK, batch, head, i, c_.d, 20, 100), sigma_);
      share_channel(v, outlier_of(c_.seed, kV, batch, head, 0, c_.d, 20, 20), 1.0);
    } else if (kind_ == InputKind::sink) {
      const std::vector<float> u = unit_direction(c_.seed, batch, head, c_.d);
      remove_direction(k, u);
      for (size_t ch = 0; ch < u.size(); ++ch) {
        k[0][ch] = static_cast<float>(sink_length() * u[ch]);
        v[0][ch] = static_cast<float>(kSinkValue * v[0][ch]);
      }
    } else if (kind_ == InputKind::offset) {
      const Normal mean(c_.seed, kOffset, batch, head);
      for (int64_t i = 0; i < k.count(); ++i)
        for (int64_t ch = 0; ch < c_.d; ++ch)
          k[i][ch] = static_cast<float>(k[i][ch] + kOffsetSpread * sigma_ * mean(ch));
    }
  }

  /// `k` is the finished kv head the query head reads.
  void q_head(int64_t batch, int64_t head, int64_t kv_head, Rows k, Rows q, Rows dout) const {
    const bool long_rows = kind_ == InputKind::long_rows;
    fill(q.data, Normal(c_.seed, kQ, batch, head), long_rows ? kPeakNoise * sigma_ : sigma_);
    fill(dout.data, Normal(c_.seed, kDout, batch, head), 1.0);
    if (k.count() == 0) return;
    if (kind_ == InputKind::outlier) {
      share_channel(q, outlier_of(c_.seed, kQ, batch, head, 0, c_.d, 20, 20), sigma_);
      scale_channel(dout, outlier_of(c_.seed, kDout, batch, head, 0, c_.d, 20, 20));
    } else if (kind_ == InputKind::sink) {
      const std::vector<float> u = unit_direction(c_.seed, batch, kv_head, c_.d);
      remove_direction(q, u);
      for (int64_t i = 0; i < q.count(); ++i)
        add_scaled(q[i], sink_logit(i) * root_d() / sink_length(), u);
    } else if (long_rows) {
      for (int64_t i = 0; i < q.count(); ++i) add_peak(batch, head, i, k, q[i]);
    }
  }

 private:
  double root_d() const { return std::sqrt(static_cast<double>(c_.d)); }
  double logit_variance() const { return sigma_ * sigma_ * sigma_ * sigma_; }

  int64_t visible_count(int64_t i) const {
    const spec::KeyRange r = c_.visible(i);
    return r.end - r.begin;
  }
  double sink_logit(int64_t i) const {
    return logit_for_share(kSinkShare, visible_count(i) - 1, logit_variance());
  }
  /// Length of the sink key: that of an ordinary key, so that it is no outlier of its block.
  double sink_length() const { return sigma_ * root_d(); }

  void add_peak(int64_t batch, int64_t head, int64_t i, Rows k, std::span<float> q) const {
    const auto key = [&](Stream what) {
      return hash64({c_.seed, what, static_cast<uint64_t>(batch), static_cast<uint64_t>(head),
                     static_cast<uint64_t>(i)});
    };
    const spec::KeyRange r = c_.visible(i);
    if (r.end - r.begin < 2 || key(kPeakRow) % kPeakEvery != 0) return;
    const int64_t j =
        r.begin + static_cast<int64_t>(key(kPeakKey) % static_cast<uint64_t>(r.end - r.begin));
    // The aligned part of q also adds variance to the logits of all other keys. Solving for both
    // together keeps the peak's share near kPeakShare.
    const double length = std::sqrt(dot(k[j], k[j]));
    const double noise = kPeakNoise * kPeakNoise * logit_variance();
    double logit = 0;
    for (int step = 0; step < 8; ++step) {
      // Deviation of the other logits that is due to the peak.
      const double along = logit * sigma_ / length;
      // A short key of few channels cannot reach that share; the bound then ends the iteration.
      logit = std::min(logit_for_share(kPeakShare, r.end - r.begin - 1, noise + along * along),
                       kPeakLogit);
    }
    add_scaled(q, (logit * root_d() - dot(q, k[j])) / (length * length), k[j]);
  }

  const AttnCase& c_;
  InputKind kind_;
  double sigma_;
};

void round_to(Dtype dtype, std::vector<float>& x) {
  with_dtype(dtype, [&](auto tag) {
    for (float& value : x) value = to_float(from_float<decltype(tag)>(value));
  });
}

struct KindText {
  InputKind kind;
  const char* name;
  const char* description;
};
constexpr std::array<KindText, 5> kKinds{{
    {InputKind::gaussian, "gaussian", "independent normal values"},
    {InputKind::outlier, "outlier",
     "a few channels of Q, K, V and dO are 20 to 100 times larger than the rest"},
    {InputKind::sink, "sink",
     "the first key takes about 65% of every row and carries little value"},
    {InputKind::long_rows, "long",
     "nearly uniform rows, where one query in eight puts 30% on a single key"},
    {InputKind::offset, "offset", "every channel of K has a large mean that all tokens share"},
}};

const KindText& text_of(InputKind kind) {
  for (const KindText& t : kKinds)
    if (t.kind == kind) return t;
  SAGE_THROW(ErrorKind::internal, "input kind " << static_cast<int>(kind) << " has no name");
}

}  // namespace

const char* input_name(InputKind kind) { return text_of(kind).name; }
const char* input_description(InputKind kind) { return text_of(kind).description; }

InputKind input_by_name(std::string_view name) {
  std::vector<std::string> known;
  for (const KindText& t : kKinds) {
    if (name == t.name) return t.kind;
    known.push_back(t.name);
  }
  SAGE_THROW(ErrorKind::invalid_argument,
             "inputs: expected gaussian, outlier, sink, long or offset, got \""
                 << name << "\"" << did_you_mean(name, known));
}

Inputs make_inputs(const AttnCase& c, InputKind kind, double sigma) {
  SAGE_CHECK(std::isfinite(sigma) && sigma > 0, "sigma: expected a positive number, got " << sigma);
  Inputs in;
  in.q.resize(c.q_elements()), in.dout.resize(c.q_elements());
  in.k.resize(c.k_elements()), in.v.resize(c.k_elements());
  const int64_t q_size = c.nq * c.d, k_size = c.nk * c.d;
  const auto head_of = [&](std::vector<float>& x, int64_t index, int64_t size) {
    return Rows{std::span(x).subspan(index * size, size), c.d};
  };
  const Generator generator(c, kind, sigma);
  parallel_for({}, c.b * c.hk, [&](int64_t i) {
    generator.kv_head(i / c.hk, i % c.hk, head_of(in.k, i, k_size), head_of(in.v, i, k_size));
  });
  parallel_for({}, c.b * c.h, [&](int64_t i) {
    const int64_t batch = i / c.h, head = i % c.h, kv_head = head / (c.h / c.hk);
    generator.q_head(batch, head, kv_head, head_of(in.k, batch * c.hk + kv_head, k_size),
                     head_of(in.q, i, q_size), head_of(in.dout, i, q_size));
  });
  for (auto* x : {&in.q, &in.k, &in.v, &in.dout}) round_to(c.dtype, *x);
  return in;
}

}  // namespace sagebwd::trace
