// SPDX-License-Identifier: Apache-2.0
// Synthetic attention inputs, easy and hard. Every value is a pure function of (seed, tensor,
// batch, head, index), so a case string and a kind name give the same tensors anywhere.
//
// sigma is the deviation of Q and K; V and dO have deviation 1. With the default logit scale
// 1/sqrt(d) the logits of Gaussian inputs have deviation sigma².
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "spec/attn_case.h"

namespace sagebwd::trace {

enum class InputKind {
  gaussian,  // independent normal values
  outlier,   // a few channels of Q, K, V and dO 20 to 100 times larger; in Q, K and V mostly a bias
             // all tokens share
  sink,  // every query is aligned with the first key, which takes 0.65 of each row and has a small
         // value
  sink_127,     // the same with the last key of the first block of 128,
  sink_128,     // the first of the second block,
  sink_middle,  // a key a third of the way,
  sink_last,    // or the last key
  sinks,        // four sinks that share 0.65 of each row
  strong_sink,  // a sink with 0.95, three quarters of the way
  long_rows,  // nearly uniform rows; one query in eight has a single key that takes 0.3 of its row
  offset,     // every channel of K has a mean, of deviation 10·sigma across channels
  rope_bias,  // two channels of K have a mean of 30·sigma that rotary positions then turn: a mean
              // that no stretch of keys shares
  channels,   // a channel of Q 6 times and another of K 12 times larger, without a mean
  value_channel,  // a channel of V 20 times larger, without a mean
  heavy,          // Student-t Q and K with three degrees of freedom
  long_key,       // a key of every 128 is 20 times longer
  late_long,      // keys from beyond the middle on are 20 times longer
  previous,       // previous-token heads: the token before a query has a logit of 10
  one_hot,        // a random key of each row has a logit of 14
  dominant,       // a random key for every 128 queries has a logit of 10
  delimiters6,    // every 100th key has a logit of 6, is long and has little value; values of the
                  // other keys follow their keys, so that their small dS add up to most of dQ
  delimiters7,    // the same with a logit of 7
  delimiters8,    // or of 8
};

/// The name of the enumerator, but "long" for long_rows.
const char* input_name(InputKind kind);
/// Every kind, in the order of tables.
std::vector<InputKind> all_inputs();
/// Throws Error(invalid_argument) for an unknown name.
InputKind input_by_name(std::string_view name);
/// One sentence for tables and reports.
const char* input_description(InputKind kind);

/// Contiguous tensors, each value representable in the case's element type.
struct Inputs {
  std::vector<float> q, dout;  // [b, h, nq, d] and [b, h, nq, dv]
  std::vector<float> k, v;     // [b, hk, nk, d] and [b, hk, nk, dv]
};

/// Sizes, mask, element type and seed come from the case. Uses the library's own threads.
Inputs make_inputs(const spec::AttnCase& c, InputKind kind, double sigma = 1.0);

}  // namespace sagebwd::trace
