// SPDX-License-Identifier: Apache-2.0
#include "trace/inputs.h"

#include <array>
#include <cmath>
#include <span>

#include "base/check.h"
#include "base/dispatch_dtype.h"
#include "base/parallel.h"
#include "base/suggest.h"
#include "trace/families.h"

namespace sagebwd::trace {
namespace {

using spec::AttnCase;

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
constexpr std::array<KindText, 23> kKinds{{
    {InputKind::gaussian, "gaussian", "independent normal values"},
    {InputKind::outlier, "outlier",
     "a few channels of Q, K, V and dO are 20 to 100 times larger than the rest"},
    {InputKind::sink, "sink",
     "the first key takes about 65% of every row and carries little value"},
    {InputKind::sink_127, "sink_127", "the same with key 127, the last of a block"},
    {InputKind::sink_128, "sink_128", "the same with key 128, the first of the second block"},
    {InputKind::sink_middle, "sink_middle", "the same with a key a third of the way"},
    {InputKind::sink_last, "sink_last", "the same with the last key"},
    {InputKind::sinks, "sinks", "four keys share 65% of every row and carry little value"},
    {InputKind::strong_sink, "strong_sink",
     "one key, three quarters of the way, takes about 95% of every row"},
    {InputKind::long_rows, "long",
     "nearly uniform rows, where one query in eight puts 30% on a single key"},
    {InputKind::offset, "offset", "every channel of K has a large mean that all tokens share"},
    {InputKind::rope_bias, "rope_bias",
     "two channels of K have a mean of 30, turned by rotary positions of base 5e5"},
    {InputKind::channels, "channels",
     "a channel of Q is 6 times and one of K 12 times larger, without a mean"},
    {InputKind::value_channel, "value_channel",
     "a channel of V is 20 times larger, without a mean"},
    {InputKind::heavy, "heavy",
     "Q and K have the heavy tails of a t distribution with 3 degrees of freedom"},
    {InputKind::long_key, "long_key", "a key of every 128 is 20 times longer"},
    {InputKind::late_long, "late_long",
     "keys from the middle on are 20 times longer, beginning within a block"},
    {InputKind::previous, "previous",
     "every query looks at the token before it, with a logit of 10"},
    {InputKind::one_hot, "one_hot", "every query looks at one key of its own, with a logit of 14"},
    {InputKind::dominant, "dominant",
     "every 128 queries look at one key of their own, with a logit of 10"},
    {InputKind::delimiters6, "delimiters6",
     "every 100th key has a logit of 6, a long key and little value; the others add up"},
    {InputKind::delimiters7, "delimiters7", "the same with a logit of 7"},
    {InputKind::delimiters8, "delimiters8", "the same with a logit of 8"},
}};

const KindText& text_of(InputKind kind) {
  for (const KindText& t : kKinds)
    if (t.kind == kind) return t;
  SAGE_THROW(ErrorKind::internal, "input kind " << static_cast<int>(kind) << " has no name");
}

}  // namespace

const char* input_name(InputKind kind) { return text_of(kind).name; }
const char* input_description(InputKind kind) { return text_of(kind).description; }

std::vector<InputKind> all_inputs() {
  std::vector<InputKind> kinds;
  for (const KindText& t : kKinds) kinds.push_back(t.kind);
  return kinds;
}

InputKind input_by_name(std::string_view name) {
  std::vector<std::string> known;
  for (const KindText& t : kKinds) {
    if (name == t.name) return t.kind;
    known.push_back(t.name);
  }
  std::string list;
  for (size_t i = 0; i < known.size(); ++i)
    list += (i == 0 ? "" : i + 1 < known.size() ? ", " : " or ") + known[i];
  SAGE_THROW(ErrorKind::invalid_argument, "inputs: expected " << list << ", got \"" << name << "\""
                                                              << did_you_mean(name, known));
}

Inputs make_inputs(const AttnCase& c, InputKind kind, double sigma) {
  SAGE_CHECK(std::isfinite(sigma) && sigma > 0, "sigma: expected a positive number, got " << sigma);
  Inputs in;
  in.q.resize(c.q_elements()), in.dout.resize(c.o_elements());
  in.k.resize(c.k_elements()), in.v.resize(c.v_elements());
  const auto head_of = [](std::vector<float>& x, int64_t index, int64_t n, int64_t d) {
    return Rows{std::span(x).subspan(index * n * d, n * d), d};
  };
  const int64_t d = c.d, dv = c.value_dim();
  const Family family(c, kind, sigma);
  parallel_for({}, c.b * c.hk, [&](int64_t i) {
    family.kv_head(i / c.hk, i % c.hk, head_of(in.k, i, c.nk, d), head_of(in.v, i, c.nk, dv));
  });
  parallel_for({}, c.b * c.h, [&](int64_t i) {
    const int64_t batch = i / c.h, head = i % c.h, kv_head = head / (c.h / c.hk);
    family.q_head(batch, head, kv_head, head_of(in.k, batch * c.hk + kv_head, c.nk, d),
                  head_of(in.q, i, c.nq, d), head_of(in.dout, i, c.nq, dv));
  });
  for (auto* x : {&in.q, &in.k, &in.v, &in.dout}) round_to(c.dtype, *x);
  return in;
}

}  // namespace sagebwd::trace
