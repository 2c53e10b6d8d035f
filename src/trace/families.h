// SPDX-License-Identifier: Apache-2.0
// The families of synthetic inputs, head by head.
#pragma once

#include "trace/inputs.h"
#include "trace/rows.h"

namespace sagebwd::trace {

/// Makes the heads of a case, one at a time, so that they can run in parallel.
class Family {
 public:
  Family(const spec::AttnCase& c, InputKind kind, double sigma)
      : c_(c), kind_(kind), sigma_(sigma) {}

  void kv_head(int64_t batch, int64_t head, Rows k, Rows v) const;
  /// `k` is the finished kv head the query head reads.
  void q_head(int64_t batch, int64_t head, int64_t kv_head, Rows k, Rows q, Rows dout) const;

 private:
  double root_d() const { return std::sqrt(static_cast<double>(c_.d)); }
  double logit_variance() const { return sigma_ * sigma_ * sigma_ * sigma_; }
  double ordinary_length() const { return sigma_ * root_d(); }
  uint64_t row_key(Stream what, int64_t batch, int64_t head, int64_t i) const {
    return hash64({c_.seed, what, static_cast<uint64_t>(batch), static_cast<uint64_t>(head),
                   static_cast<uint64_t>(i)});
  }

  void place_sinks(std::span<const float> u, Rows k, Rows v) const;
  double sink_logit(int64_t i) const;
  void place_delimiters(int64_t batch, int64_t head, std::span<const float> u, Rows k,
                        Rows v) const;
  void add_peak(int64_t batch, int64_t head, int64_t i, Rows k, std::span<float> q) const;
  /// Keys that query i looks at: any that it sees, one that it shares with its neighbours, or that
  /// of the token before its own.
  int64_t random_key(int64_t batch, int64_t head, int64_t i) const;
  int64_t shared_key(int64_t batch, int64_t head, int64_t i) const;
  int64_t previous_key(int64_t i) const;

  const spec::AttnCase& c_;
  InputKind kind_;
  double sigma_;
};

}  // namespace sagebwd::trace
