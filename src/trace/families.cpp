// SPDX-License-Identifier: Apache-2.0
#include "trace/families.h"

#include <algorithm>
#include <vector>

namespace sagebwd::trace {
namespace {

using spec::AttnCase;

constexpr double kSinkShare = 0.65;        // of each row (numerics.md 4.2)
constexpr double kStrongSinkShare = 0.95;  // likewise
constexpr double kSinkValue = 0.1;      // deviation of the sink's value; trained sinks have little
constexpr double kPeakShare = 0.3;      // of a row that has a peak
constexpr uint64_t kPeakEvery = 8;      // one row in this many has one
constexpr double kPeakLogit = 24.0;     // bound of its logit
constexpr double kFlatNoise = 0.3;      // of Q where rows are to be flat, times sigma
constexpr double kOffsetSpread = 10.0;  // of the mean of K across channels, times sigma
constexpr double kRopeBias = 30.0;  // mean of a channel of K before rotary positions, times sigma
constexpr double kRopeBase = 5e5;
constexpr int64_t kRopeChannels = 2;     // that have one
constexpr double kLongKey = 20.0;        // length of a long key, in ordinary lengths
constexpr int64_t kLongKeyEvery = 128;   // keys: one in every block that shares a scale
constexpr int64_t kLongKeyAt = 50;       // its place there
constexpr double kOutlierSpread = 0.03;  // between tokens, relative to what a channel shares
constexpr double kQueryChannel = 6.0;    // magnification of a channel without a mean, of Q
constexpr double kKeyChannel = 12.0;     // of K
constexpr double kValueChannel = 20.0;   // of V
constexpr double kPreviousGap = 10.0;    // logit of the previous token; the mean of the others is 0
constexpr double kOneHotGap = 14.0;      // logit of the one key of a row
constexpr int64_t kQueriesPerKey = 128;  // that share a dominant key
constexpr int64_t kDelimiterEvery = 100;  // keys
constexpr double kTailLength = 1.0;       // of what sets the two sorts of keys apart, likewise
constexpr double kTailNoise = 0.3;        // of what values of one sort do not share
constexpr double kDelimiterLength = 3.0;  // of the key of a delimiter, in ordinary lengths

bool is_sink(InputKind kind) {
  switch (kind) {
    case InputKind::sink:
    case InputKind::sink_127:
    case InputKind::sink_128:
    case InputKind::sink_middle:
    case InputKind::sink_last:
    case InputKind::sinks:
    case InputKind::strong_sink:
      return true;
    default:
      return false;
  }
}

/// Keys that are sinks, among n.
std::vector<int64_t> sink_places(InputKind kind, int64_t n) {
  std::vector<int64_t> places;
  const auto add = [&](int64_t place) {
    if (place < n && (places.empty() || places.back() < place)) places.push_back(place);
  };
  if (kind == InputKind::sink || kind == InputKind::sinks) add(0);
  if (kind == InputKind::sink_127) add(127);
  if (kind == InputKind::sink_128) add(128);
  if (kind == InputKind::sinks) add(n * 5 / 32);
  if (kind == InputKind::sink_middle || kind == InputKind::sinks) add(n * 11 / 32);
  if (kind == InputKind::sinks) add(n * 22 / 32);
  if (kind == InputKind::strong_sink) add(n * 47 / 64);
  if (kind == InputKind::sink_last) add(n - 1);
  return places;
}

/// Logit of delimiters, where the mean of the other keys is 0; 0 for a kind without.
double delimiter_gap(InputKind kind) {
  switch (kind) {
    case InputKind::delimiters6:
      return 6.0;
    case InputKind::delimiters7:
      return 7.0;
    case InputKind::delimiters8:
      return 8.0;
    default:
      return 0.0;
  }
}

bool is_delimiter(int64_t key) { return key % kDelimiterEvery == kDelimiterEvery / 2; }

/// Student's t with three degrees of freedom, times sigma.
void fill_heavy(std::span<float> out, const Normal& normal, double sigma) {
  for (size_t i = 0; i < out.size(); ++i) {
    double z[4];
    for (int64_t n = 0; n < 4; ++n) z[n] = normal(4 * static_cast<int64_t>(i) + n);
    out[i] =
        static_cast<float>(sigma * z[0] / std::sqrt((z[1] * z[1] + z[2] * z[2] + z[3] * z[3]) / 3));
  }
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

/// The channel becomes factor·sigma for all tokens, plus a little that differs: what trained K
/// looks like.
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
/// variance. The sum over n keys is n·exp(variance / 2) while many of them take part in it; once
/// the deviation passes sqrt(2 ln n) the largest one alone makes it.
double logit_for_share(double share, int64_t others, double variance) {
  const double log_n = std::log(static_cast<double>(std::max<int64_t>(others, 1)));
  const double log_sum =
      variance < 2 * log_n ? log_n + variance / 2 : std::sqrt(2 * log_n * variance);
  return std::log(share / (1 - share)) + log_sum;
}

std::vector<float> unit_direction(uint64_t seed, Stream stream, int64_t batch, int64_t kv_head,
                                  int64_t d) {
  std::vector<float> u(d);
  fill(u, Normal(seed, stream, batch, kv_head), 1.0);
  const double norm = std::sqrt(dot(u, u));
  for (float& x : u) x = static_cast<float>(x / norm);
  return u;
}

void remove_direction(Rows x, std::span<const float> u) {
  for (int64_t i = 0; i < x.count(); ++i) add_scaled(x[i], -dot(x[i], u), u);
}

/// Adds a multiple of k to q that makes their dot product `product`.
void set_logit(std::span<float> q, std::span<const float> k, double product) {
  add_scaled(q, (product - dot(q, k)) / dot(k, k), k);
}

/// A mean of K in the middle channels, as rotary positions turn it: channel c with channel c + d/2
/// by kRopeBase^(-2c/d) a token. Those in the middle turn neither so fast that they average out
/// within a block, nor so slowly that all keys share them.
void add_rope_bias(Rows k, double bias) {
  const int64_t half = k.d / 2, first = std::max<int64_t>(0, (half - kRopeChannels) / 2);
  for (int64_t c = first; c < std::min(first + kRopeChannels, half); ++c) {
    const double turn =
        std::pow(kRopeBase, -2.0 * static_cast<double>(c) / static_cast<double>(k.d));
    for (int64_t j = 0; j < k.count(); ++j) {
      const double angle = turn * static_cast<double>(j);
      k[j][c] = static_cast<float>(k[j][c] + bias * std::cos(angle));
      k[j][c + half] = static_cast<float>(k[j][c + half] + bias * std::sin(angle));
    }
  }
}

/// Whether a key is longer than others.
bool is_long(InputKind kind, int64_t key, int64_t keys) {
  if (kind == InputKind::long_key) return key % kLongKeyEvery == kLongKeyAt;
  return kind == InputKind::late_long && key >= keys / 2 + kLongKeyAt;
}

}  // namespace

void Family::kv_head(int64_t batch, int64_t head, Rows k, Rows v) const {
  const auto outlier = [&](Stream tensor, int index, double low, double high) {
    const int64_t channels = tensor == kV ? v.d : k.d;
    return outlier_of(c_.seed, tensor, batch, head, index, channels, low, high);
  };
  const Normal keys(c_.seed, kK, batch, head);
  if (kind_ == InputKind::heavy)
    fill_heavy(k.data, keys, sigma_);
  else
    fill(k.data, keys, sigma_);
  fill(v.data, Normal(c_.seed, kV, batch, head), 1.0);
  if (k.count() == 0) return;
  if (kind_ == InputKind::outlier) {
    for (int i = 0; i < 3; ++i) share_channel(k, outlier(kK, i, 20, 100), sigma_);
    share_channel(v, outlier(kV, 0, 20, 20), 1.0);
  } else if (kind_ == InputKind::channels) {
    scale_channel(k, outlier(kK, 0, kKeyChannel, kKeyChannel));
  } else if (kind_ == InputKind::value_channel) {
    scale_channel(v, outlier(kV, 0, kValueChannel, kValueChannel));
  } else if (kind_ == InputKind::offset) {
    const Normal mean(c_.seed, kOffset, batch, head);
    for (int64_t i = 0; i < k.count(); ++i)
      for (int64_t ch = 0; ch < c_.d; ++ch)
        k[i][ch] = static_cast<float>(k[i][ch] + kOffsetSpread * sigma_ * mean(ch));
  } else if (kind_ == InputKind::rope_bias) {
    add_rope_bias(k, kRopeBias * sigma_);
  } else if (kind_ == InputKind::long_key || kind_ == InputKind::late_long) {
    for (int64_t j = 0; j < k.count(); ++j)
      if (is_long(kind_, j, k.count()))
        for (float& x : k[j]) x = static_cast<float>(kLongKey * x);
  } else if (is_sink(kind_) || delimiter_gap(kind_) > 0) {
    const std::vector<float> u = unit_direction(c_.seed, kSinkDirection, batch, head, c_.d);
    remove_direction(k, u);
    if (is_sink(kind_))
      place_sinks(u, k, v);
    else
      place_delimiters(batch, head, u, k, v);
  }
}

void Family::q_head(int64_t batch, int64_t head, int64_t kv_head, Rows k, Rows q, Rows dout) const {
  const bool long_rows = kind_ == InputKind::long_rows, delimiters = delimiter_gap(kind_) > 0;
  // Logits of long keys alone are large; with ordinary queries they would be one-hot rows.
  const bool quiet = long_rows || delimiters || kind_ == InputKind::late_long;
  const Normal queries(c_.seed, kQ, batch, head);
  if (kind_ == InputKind::heavy)
    fill_heavy(q.data, queries, sigma_);
  else
    fill(q.data, queries, quiet ? kFlatNoise * sigma_ : sigma_);
  fill(dout.data, Normal(c_.seed, kDout, batch, head), 1.0);
  if (k.count() == 0) return;
  if (kind_ == InputKind::outlier) {
    share_channel(q, outlier_of(c_.seed, kQ, batch, head, 0, c_.d, 20, 20), sigma_);
    scale_channel(dout, outlier_of(c_.seed, kDout, batch, head, 0, dout.d, 20, 20));
  } else if (kind_ == InputKind::channels) {
    scale_channel(q, outlier_of(c_.seed, kQ, batch, head, 0, c_.d, kQueryChannel, kQueryChannel));
  } else if (is_sink(kind_) || delimiters) {
    const std::vector<float> u = unit_direction(c_.seed, kSinkDirection, batch, kv_head, c_.d);
    const double length = ordinary_length() * (is_sink(kind_) ? 1.0 : kDelimiterLength);
    remove_direction(q, u);
    for (int64_t i = 0; i < q.count(); ++i) {
      const double logit = is_sink(kind_) ? sink_logit(i) : delimiter_gap(kind_);
      add_scaled(q[i], logit * root_d() / length, u);
    }
  } else if (long_rows) {
    for (int64_t i = 0; i < q.count(); ++i) add_peak(batch, head, i, k, q[i]);
  } else if (kind_ == InputKind::previous || kind_ == InputKind::one_hot ||
             kind_ == InputKind::dominant) {
    for (int64_t i = 0; i < q.count(); ++i) {
      if (c_.visible(i).end == c_.visible(i).begin) continue;
      // The first of the queries that share a key chooses it: later ones see it under any mask
      // but a window.
      const int64_t j = kind_ == InputKind::previous  ? previous_key(i)
                        : kind_ == InputKind::one_hot ? random_key(batch, head, i)
                                                      : shared_key(batch, head, i);
      set_logit(q[i], k[j], (kind_ == InputKind::one_hot ? kOneHotGap : kPreviousGap) * root_d());
    }
  }
}

/// A sink's key has the length of an ordinary one, so that it is no outlier of its block.
void Family::place_sinks(std::span<const float> u, Rows k, Rows v) const {
  for (int64_t j : sink_places(kind_, k.count())) {
    for (int64_t ch = 0; ch < k.d; ++ch) k[j][ch] = static_cast<float>(ordinary_length() * u[ch]);
    for (float& x : v[j]) x = static_cast<float>(kSinkValue * x);
  }
}

/// The sinks that a query sees share what is theirs.
double Family::sink_logit(int64_t i) const {
  const spec::KeyRange r = c_.visible(i);
  const std::vector<int64_t> places = sink_places(kind_, c_.nk);
  const int64_t seen = std::count_if(places.begin(), places.end(),
                                     [&](int64_t j) { return r.begin <= j && j < r.end; });
  const double share = kind_ == InputKind::strong_sink ? kStrongSinkShare : kSinkShare;
  return logit_for_share(share, r.end - r.begin - seen, logit_variance()) -
         std::log(static_cast<double>(std::max<int64_t>(seen, 1)));
}

/// Delimiters all have the same long key and little value. Keys and values are of two sorts that
/// lie on opposite sides along one direction; so what the other keys add to dQ does not cancel,
/// small as each of them is.
void Family::place_delimiters(int64_t batch, int64_t head, std::span<const float> u, Rows k,
                              Rows v) const {
  const std::vector<float> along_k = unit_direction(c_.seed, kTailKey, batch, head, c_.d),
                           along_v = unit_direction(c_.seed, kTailValue, batch, head, v.d);
  for (int64_t j = 0; j < k.count(); ++j) {
    const bool delimiter = is_delimiter(j);
    // They take turns, so that O is small and its error with it: what counts is dS.
    const int64_t turn = delimiter ? j / kDelimiterEvery : j;
    const double side = turn % 2 == 0 ? 1.0 : -1.0;
    for (float& x : v[j]) x = static_cast<float>(kTailNoise * x);
    add_scaled(v[j], side * std::sqrt(static_cast<double>(v.d)), along_v);
    if (!delimiter) {
      add_scaled(k[j], side * kTailLength * ordinary_length(), along_k);
      continue;
    }
    for (int64_t ch = 0; ch < k.d; ++ch)
      k[j][ch] = static_cast<float>(kDelimiterLength * ordinary_length() * u[ch]);
    for (float& x : v[j]) x = static_cast<float>(kSinkValue * x);
  }
}

void Family::add_peak(int64_t batch, int64_t head, int64_t i, Rows k, std::span<float> q) const {
  const spec::KeyRange r = c_.visible(i);
  if (r.end - r.begin < 2 || row_key(kPeakRow, batch, head, i) % kPeakEvery != 0) return;
  const int64_t j = random_key(batch, head, i);
  // The aligned part of q adds to the logits of all other keys as well; solving for it together
  // with the variance it brings keeps the peak's share near kPeakShare.
  const double length = std::sqrt(dot(k[j], k[j]));
  const double noise = kFlatNoise * kFlatNoise * logit_variance();
  double logit = 0;
  for (int step = 0; step < 8; ++step) {
    // Deviation of the other logits that is due to the peak.
    const double along = logit * sigma_ / length;
    // A short key of few channels cannot have that share: the bound stops the steps.
    logit = std::min(logit_for_share(kPeakShare, r.end - r.begin - 1, noise + along * along),
                     kPeakLogit);
  }
  set_logit(q, k[j], logit * root_d());
}

int64_t Family::random_key(int64_t batch, int64_t head, int64_t i) const {
  const spec::KeyRange r = c_.visible(i);
  return r.begin + static_cast<int64_t>(row_key(kPeakKey, batch, head, i) %
                                        static_cast<uint64_t>(r.end - r.begin));
}

int64_t Family::shared_key(int64_t batch, int64_t head, int64_t i) const {
  const int64_t first = i / kQueriesPerKey * kQueriesPerKey;
  // The first query may see no key at all.
  return random_key(batch, head, c_.visible(first).end > c_.visible(first).begin ? first : i);
}

int64_t Family::previous_key(int64_t i) const {
  const spec::KeyRange r = c_.visible(i);
  const int64_t own = i + (c_.mask.align == Align::bottom_right ? c_.nk - c_.nq : 0);
  return std::clamp(own - 1, r.begin, r.end - 1);
}

}  // namespace sagebwd::trace
