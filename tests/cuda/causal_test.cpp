// SPDX-License-Identifier: Apache-2.0
// On GPUs, in `vectorwise`: under a causal mask no later token changes a bit of an earlier
// output, and a query's row depends on nothing but the query and the keys up to those it sees. O
// and LSE only: gradients flow back in time. tests/cpp/attention/causality_test.cpp is the same for
// CPUs.
//
// Every test runs on cuda-plain and on the tuned implementation, and there skips what that
// declines. An implementation is pinned once for a whole problem and all of its parts, so that one
// which declines a part fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/dispatch_dtype.h"
#include "base/hash.h"
#include "codes_parity.h"
#include "device_array.h"
#include "device_case.h"
#include "numerics/octaves.h"
#include "random_cases.h"
#include "spec/codes.h"

namespace sagebwd::gpu {
namespace {

/// O [b, h, nq, dv] and LSE [b, h, nq] of a forward, and its saved codes where they are asked for.
struct Outputs {
  std::vector<float> o, lse;
  std::vector<std::byte> codes;
};

/// A problem with its inputs, [b, heads, n, d], and the implementation that runs it.
struct Call {
  spec::AttnCase c;
  std::vector<int32_t> cu_q, cu_k;  // packed when not empty
  std::vector<float> q, k, v;
  std::string impl;

  int64_t sequences() const { return cu_q.empty() ? c.b : static_cast<int64_t>(cu_q.size()) - 1; }
};

/// The values in the type of the case.
template <typename T>
std::vector<T> rounded(const std::vector<float>& x) {
  std::vector<T> out;
  for (float value : x) out.push_back(from_float<T>(value));
  return out;
}

Outputs forward_of(const Call& call, bool saves_codes = false) {
  const spec::AttnCase& c = call.c;
  return with_dtype(c.dtype, [&](auto type) {
    using T = decltype(type);
    const Array<T> q(rounded<T>(call.q)), k(rounded<T>(call.k)), v(rounded<T>(call.v)),
        o(std::vector<T>(static_cast<size_t>(c.o_elements()), from_float<T>(NAN)));
    const Array<float> lse(std::vector<float>(static_cast<size_t>(c.b * c.h * c.nq), NAN));
    ForwardArgs f;
    f.device = Device::cuda;
    f.q = c.q_view(q.data), f.k = c.k_view(k.data), f.v = c.v_view(v.data), f.o = c.o_view(o.data);
    f.lse = contiguous_stats(lse.data, c.h, c.nq);
    f.mask = c.mask, f.recipe = c.recipe, f.softcap = c.softcap;
    if (!call.cu_q.empty()) f.documents = {call.cu_q.data(), call.cu_k.data(), call.sequences()};
    const Array<std::byte> codes(
        std::vector<std::byte>(saves_codes ? codes_size(f) : 0, std::byte{0x7f}));
    if (saves_codes) f.codes = codes.data, f.codes_bytes = codes.count;
    setenv("SAGEBWD_IMPL", call.impl.c_str(), 1);
    const Array<std::byte> workspace(std::vector<std::byte>(workspace_size(f), std::byte{0x7f}));
    f.workspace = workspace.data, f.workspace_bytes = workspace.count;
    forward(f);
    unsetenv("SAGEBWD_IMPL");
    Outputs out{{}, lse.read(), codes.read()};
    for (T value : o.read()) out.o.push_back(to_float(value));
    return out;
  });
}

/// Tokens [begin, end) of a contiguous [heads, n, d] tensor.
std::vector<float> tokens(const std::vector<float>& x, int64_t heads, int64_t n, int64_t d,
                          int64_t begin, int64_t end) {
  std::vector<float> out;
  for (int64_t head = 0; head < heads; ++head)
    out.insert(out.end(), x.begin() + (head * n + begin) * d, x.begin() + (head * n + end) * d);
  return out;
}

/// Queries [begin, end) have the same bits in both, where those of `part` begin at its `from`.
void expect_same_rows(const Call& whole, const Outputs& all, int64_t begin, int64_t end,
                      const Call& part, const Outputs& some, int64_t from) {
  const int64_t heads = whole.c.b * whole.c.h, dv = whole.c.value_dim(), to = from + end - begin;
  EXPECT_TRUE(same_bits(tokens(all.o, heads, whole.c.nq, dv, begin, end),
                        tokens(some.o, heads, part.c.nq, dv, from, to)))
      << "O of " << whole.c.to_string();
  EXPECT_TRUE(same_bits(tokens(all.lse, heads, whole.c.nq, 1, begin, end),
                        tokens(some.lse, heads, part.c.nq, 1, from, to)))
      << "LSE of " << whole.c.to_string();
}

/// The problem of queries [q0, q1) and keys [k0, k1) alone.
Call part_of(const Call& whole, int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
  const spec::AttnCase& c = whole.c;
  Call part = whole;
  part.cu_q.clear(), part.cu_k.clear();
  part.c.nq = q1 - q0, part.c.nk = k1 - k0;
  part.q = tokens(whole.q, c.b * c.h, c.nq, c.d, q0, q1);
  part.k = tokens(whole.k, c.b * c.hk, c.nk, c.d, k0, k1);
  part.v = tokens(whole.v, c.b * c.hk, c.nk, c.value_dim(), k0, k1);
  return part;
}

/// What tokens may become.
enum class Change { others, long_ones, huge, zeros, nan, inf };
constexpr Change kChanges[] = {Change::others, Change::long_ones, Change::huge,
                               Change::zeros,  Change::nan,       Change::inf};

float changed(float x, Change change, uint64_t number) {
  const uint64_t bits = hash64({number, 0xca05a1});
  const float other = 4.0f * unit_float(bits) - 2.0f;
  switch (change) {
    case Change::others:
      return other;
    case Change::long_ones:
      return 20.0f * x;
    case Change::huge:
      return 1e4f * other;
    case Change::zeros:
      return 0.0f;
    case Change::nan:
      return NAN;
    case Change::inf:
      break;
  }
  return bits % 3 == 0 ? INFINITY : other;
}

/// Tokens from `cut` on of a contiguous [heads, n, d] tensor become something else.
void change_from(int64_t cut, Change change, int64_t heads, int64_t n, int64_t d,
                 std::vector<float>& x) {
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t at = (head * n + cut) * d; at < (head + 1) * n * d; ++at) {
      float& value = x[static_cast<size_t>(at)];
      value = changed(value, change, static_cast<uint64_t>(at));
    }
}

/// The same for the tensors that are named.
Call with_other_future(const Call& call, int64_t cut, Change change, const std::string& tensors) {
  Call other = call;
  const spec::AttnCase& c = call.c;
  const auto has = [&](char name) { return tensors.find(name) != std::string::npos; };
  if (has('q')) change_from(cut, change, c.b * c.h, c.nq, c.d, other.q);
  if (has('k')) change_from(cut, change, c.b * c.hk, c.nk, c.d, other.k);
  if (has('v')) change_from(cut, change, c.b * c.hk, c.nk, c.value_dim(), other.v);
  return other;
}

/// Parameter: "plain" or "tuned".
class Causality : public testing::TestWithParam<const char*> {
 protected:
  std::string implementation() const {
    return std::string(GetParam()) == "plain" ? "cuda-plain" : tuned_implementation();
  }
  /// visit(call) for each problem that the implementation serves; skips the test if there is none.
  template <typename Visit>
  void for_each_call(const std::vector<const char*>& texts, Visit visit,
                     trace::InputKind kind = trace::InputKind::gaussian, double sigma = 1.0) {
    if (const char* why = no_device()) GTEST_SKIP() << "no usable CUDA device: " << why;
    std::string reason;
    int served = 0;
    for (const char* text : texts) {
      DeviceCase dc(text);
      dc.impl = implementation(), dc.kind = kind, dc.sigma = sigma;
      const Candidate candidate = device_candidate(dc, false);
      if (!candidate.supported) {
        reason = candidate.name + " " + candidate.reason + ": " + text;
        continue;
      }
      const CaseInputs in = make_case_inputs(dc);
      ++served;
      SCOPED_TRACE(candidate.name);
      visit(Call{dc.c, {}, {}, in.x.q, in.x.k, in.x.v, candidate.name});
    }
    if (served == 0) GTEST_SKIP() << reason;
  }
};

TEST_P(Causality, APrefixHasTheBitsOfTheWhole) {
  const auto check = [](const Call& whole) {
    const Outputs all = forward_of(whole);
    for (int64_t t : {1,   2,   15,  16,  17,  63,  64,  65,   127,  128, 129,
                      191, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025}) {
      if (t >= whole.c.nq || (whole.c.nq > 1000 && t < 1000)) continue;
      SCOPED_TRACE(testing::Message() << t << " tokens");
      const Call prefix = part_of(whole, 0, t, 0, t);
      expect_same_rows(whole, all, 0, t, prefix, forward_of(prefix), 0);
    }
  };
  for_each_call(
      {"h2 hk1 n520 d64 bf16 causal", "h1 n150 d128 f16 causal window=70,-1",
       "h1 n1030 d16 bf16 causal", "h1 n200 d96 bf16 causal smooth_k=off",
       "h1 n200 d64 bf16 causal softcap=5", "h1 n200 d64 causal rotate=off",
       "h1 n260 d64 f32 causal tile=128x64 rounding=dither seed5", "h1 n140 d40 dv=24 f32 causal",
       "h1 n140 d256 f32 causal", "h1 n200 d40 f32 causal lift=S"},
      check);
  // Keys that have something in common, and logits whose exponents differ a lot.
  for_each_call({"h1 n300 d64 bf16 causal"}, check, trace::InputKind::offset);
  for_each_call({"h1 n300 d128 bf16 causal"}, check, trace::InputKind::gaussian, 6.0);
}

TEST_P(Causality, LaterTokensChangeNoBit) {
  const auto check = [](const Call& call, const std::vector<int64_t>& cuts,
                        const std::vector<const char*>& names) {
    const Outputs before = forward_of(call);
    for (int64_t cut : cuts)
      for (Change change : kChanges)
        for (const char* tensors : names) {
          // Of one tensor alone, the changes that go furthest.
          if (std::strlen(tensors) == 1 && change != Change::huge && change != Change::nan)
            continue;
          SCOPED_TRACE(testing::Message()
                       << tensors << " from " << cut << " on, change " << static_cast<int>(change));
          const Call other = with_other_future(call, cut, change, tensors);
          expect_same_rows(call, before, 0, cut, other, forward_of(other), 0);
        }
  };
  for_each_call({"h1 n200 d64 bf16 causal"}, [&](const Call& call) {
    check(call, {1, 5, 64, 100, 128, 190}, {"q", "k", "v", "qkv"});
  });
  for_each_call({"h1 n300 d128 f16 causal", "h1 n140 d72 dv=40 f32 causal"}, [&](const Call& call) {
    check(call, {70, 128}, {"qkv"});
  });
  for_each_call({"h1 n530 d64 bf16 causal"}, [&](const Call& call) {
    check(call, {256, 511, 512}, {"qkv"});
  });
}

// The tests above can fail: the scales and means of `paper` look ahead.
TEST_P(Causality, PaperLooksAhead) {
  for_each_call({"h1 n300 d64 bf16 causal paper"}, [](const Call& call) {
    const Call other = with_other_future(call, 150, Change::others, "qkv"),
               prefix = part_of(call, 0, 150, 0, 150);
    const std::vector<float> o = tokens(forward_of(call).o, 1, call.c.nq, call.c.d, 0, 150);
    EXPECT_FALSE(same_bits(tokens(forward_of(other).o, 1, call.c.nq, call.c.d, 0, 150), o));
    EXPECT_FALSE(same_bits(forward_of(prefix).o, o));
  });
}

// A small early value beside a large later one (TransformerEngine#3248): the early one stays.
TEST_P(Causality, SmallValuesSurviveLargeLaterOnes) {
  struct Case {
    float early, late;
    int64_t at;
  };
  for_each_call({"h1 n128 d128 bf16 causal"}, [](Call call) {
    for (const Case& c : {Case{0x1p-20f, 1.0f, 16}, Case{0x1p-10f, 1024.0f, 64},
                          Case{0x1p-24f, 1.0f, 8}, Case{0x1p-30f, 0x1p20f, 100}}) {
      SCOPED_TRACE(testing::Message() << c.early << " before " << c.late);
      const auto row = [&](int64_t token) { return call.v.begin() + token * call.c.d; };
      for (std::vector<float>* x : {&call.q, &call.k}) std::fill(x->begin(), x->end(), 1.0f);
      std::fill(call.v.begin(), call.v.end(), 0.0f);
      std::fill_n(row(0), call.c.d, c.early);
      const Outputs before = forward_of(call);
      std::fill_n(row(c.at), call.c.d, c.late);
      const Outputs after = forward_of(call);
      expect_same_rows(call, before, 0, c.at, call, after, 0);
      for (int64_t channel = 0; channel < call.c.d; ++channel)
        ASSERT_NEAR(after.o[static_cast<size_t>(7 * call.c.d + channel)], c.early / 8.0f,
                    1e-2f * c.early);
    }
  });
}

// Rows of V that are zero have a scale all the same, which the rows behind them may not set.
TEST_P(Causality, ZeroValuesStayZeroBeforeLargeOnes) {
  for_each_call({"h1 n200 d64 bf16 causal"}, [](const Call& call) {
    for (int64_t cut : {20, 64, 140}) {
      Call zeros = call;
      std::fill_n(zeros.v.begin(), cut * call.c.d, 0.0f);
      const Call large = with_other_future(zeros, cut, Change::huge, "v");
      const Outputs before = forward_of(zeros), after = forward_of(large);
      expect_same_rows(zeros, before, 0, cut, large, after, 0);
      for (int64_t at = 0; at < cut * call.c.d; ++at)
        ASSERT_EQ(after.o[static_cast<size_t>(at)], 0.0f);
    }
  });
}

// NaN and Inf in V reach the rows that see them, whole rows, and not LSE.
TEST_P(Causality, ValuesThatAreNotFiniteMarkTheRowsThatSeeThem) {
  for_each_call({"h1 n200 d40 bf16 causal", "h1 n200 d128 f16 causal"}, [](Call call) {
    call.v[static_cast<size_t>(150 * call.c.d + 7)] = INFINITY;
    const Outputs r = forward_of(call);
    for (int64_t i = 0; i < 200; ++i) {
      EXPECT_TRUE(std::isfinite(r.lse[static_cast<size_t>(i)])) << i;
      for (int64_t c = 0; c < call.c.d; ++c)
        ASSERT_EQ(std::isnan(r.o[static_cast<size_t>(i * call.c.d + c)]), i >= 150) << i;
    }
  });
}

// Logits that grow along the keys move the reference of a row again and again, those of a long
// query most of all. That may not move its neighbours'.
TEST_P(Causality, AQueryChangesItsOwnRowAlone) {
  for_each_call({"h1 n150 d64 bf16", "h1 nq130 nk300 d128 f16", "h1 n140 d72 f32"}, [](Call call) {
    for (size_t at = 0; at < call.k.size(); ++at)
      call.k[at] *= 1.0f + 0.02f * static_cast<float>(at / static_cast<size_t>(call.c.d));
    const Outputs before = forward_of(call);
    for (int64_t row : {0, 9, 63, 64, 100})
      for (float factor : {0.0f, -3.0f, 50.0f, INFINITY}) {
        SCOPED_TRACE(testing::Message() << "query " << row << " times " << factor);
        Call other = call;
        for (int64_t c = 0; c < call.c.d; ++c)
          other.q[static_cast<size_t>(row * call.c.d + c)] *= factor;
        const Outputs after = forward_of(other);
        expect_same_rows(call, before, 0, row, other, after, 0);
        expect_same_rows(call, before, row + 1, call.c.nq, other, after, row + 1);
      }
  });
}

TEST_P(Causality, TheLastQueriesHaveTheBitsOfTheWhole) {
  for_each_call(
      {"h4 hk2 n300 d64 bf16 causal", "h1 n300 d128 f16 causal window=100,-1", "h1 n200 d40 f32"},
      [](const Call& whole) {
        const Outputs all = forward_of(whole);
        const int64_t n = whole.c.nq;
        for (int64_t first : {1, 37, 64, 100, 128, 255, 256, 299}) {
          if (first >= n) continue;
          SCOPED_TRACE(testing::Message() << "from " << first << " on");
          const Call last = part_of(whole, first, n, 0, n);
          expect_same_rows(whole, all, first, n, last, forward_of(last), 0);
        }
      });
}

TEST_P(Causality, ADocumentHasTheBitsOfThePack) {
  for_each_call({"h2 hk1 n500 d64 bf16 causal", "h1 n500 d40 f32 causal"}, [](Call pack) {
    pack.cu_q = {0, 1, 130, 131, 300, 300, 500};
    for (const std::vector<int32_t>& cu_k :
         {pack.cu_q, std::vector<int32_t>{0, 5, 140, 140, 310, 330, 500}}) {
      pack.cu_k = cu_k;
      const Outputs all = forward_of(pack);
      for (size_t t = 0; t + 1 < pack.cu_q.size(); ++t) {
        const int64_t begin = pack.cu_q[t], end = pack.cu_q[t + 1];
        if (begin == end || pack.cu_k[t] == pack.cu_k[t + 1]) continue;
        SCOPED_TRACE(testing::Message() << "document " << t);
        const Call one = part_of(pack, begin, end, pack.cu_k[t], pack.cu_k[t + 1]);
        expect_same_rows(pack, all, begin, end, one, forward_of(one), 0);
      }
    }
  });
}

// A batch entry, and a head of queries with its head of keys.
TEST_P(Causality, OneHeadHasTheBitsOfAll) {
  for_each_call(
      {"b2 h4 hk2 n150 d64 bf16 causal", "b2 h2 hk1 n140 d72 f32 causal"}, [](const Call& call) {
        const spec::AttnCase& c = call.c;
        const Outputs all = forward_of(call);
        const auto head = [](const std::vector<float>& x, int64_t heads, int64_t index) {
          const auto size = static_cast<std::ptrdiff_t>(x.size()) / heads;
          return std::vector<float>(x.begin() + index * size, x.begin() + (index + 1) * size);
        };
        for (int64_t h = 0; h < c.b * c.h; ++h) {
          const int64_t kv = h / (c.h / c.hk);
          Call one = call;
          one.c.b = one.c.h = one.c.hk = 1;
          one.q = head(call.q, c.b * c.h, h);
          one.k = head(call.k, c.b * c.hk, kv), one.v = head(call.v, c.b * c.hk, kv);
          const Outputs alone = forward_of(one);
          EXPECT_TRUE(same_bits(head(all.o, c.b * c.h, h), alone.o)) << h;
          EXPECT_TRUE(same_bits(head(all.lse, c.b * c.h, h), alone.lse)) << h;
        }
      });
}

// The cause, and not the symptom: codes, scales and centres of a prefix are the first rows of those
// of the whole.
TEST_P(Causality, CodesOfAPrefixAreTheFirstRows) {
  for_each_call(
      {"h1 n600 d64 bf16 causal", "h1 n300 d128 f16 causal", "h1 n300 d40 f32 causal"},
      [](const Call& whole) {
        const std::vector<std::byte> all = forward_of(whole, true).codes;
        for (int64_t t : {1, 100, 127, 128, 129, 256, 300, 513}) {
          if (t >= whole.c.nk) continue;
          SCOPED_TRACE(testing::Message() << t << " tokens of " << whole.c.to_string());
          const Call prefix = part_of(whole, 0, t, 0, t);
          const std::vector<std::byte> some = forward_of(prefix, true).codes;
          const CodesLayout at = spec::codes_layout(whole.c.problem()),
                            from = spec::codes_layout(prefix.c.problem());
          const auto same = [&](int64_t a, int64_t b, int64_t bytes) {
            return std::equal(all.begin() + a, all.begin() + a + bytes, some.begin() + b);
          };
          const int64_t d = whole.c.d;
          EXPECT_TRUE(same(at.q8, from.q8, t * d) && same(at.q_scale, from.q_scale, 4 * t));
          EXPECT_TRUE(same(at.k8, from.k8, t * d) && same(at.k_scale, from.k_scale, 4 * t));
          EXPECT_TRUE(same(at.v8, from.v8, t * d) && same(at.v_scale, from.v_scale, 4 * t));
          for (int octave = 0; octave < numerics::octaves_of(t); ++octave) {
            const int64_t row = numerics::first_block_of(octave);
            EXPECT_TRUE(same(at.centre8 + row * d, from.centre8 + row * d, d) &&
                        same(at.centre_scale + 4 * row, from.centre_scale + 4 * row, 4) &&
                        same(at.v_centre8 + row * d, from.v_centre8 + row * d, d) &&
                        same(at.v_centre_scale + 4 * row, from.v_centre_scale + 4 * row, 4))
                << "octave " << octave;
          }
        }
      });
}

/// A random problem, a function of its number.
std::string random_problem(Random& r) {
  constexpr int64_t kDims[] = {8, 32, 64, 64, 80, 96, 128, 128};
  const int64_t hk = r.integer(1, 2), nq = r.integer(1, 400),
                past = r.chance(0.3) ? r.integer(0, 300) : 0;
  std::string text = "h" + std::to_string(hk * r.integer(1, 2)) + " hk" + std::to_string(hk) +
                     " nq" + std::to_string(nq) + " nk" + std::to_string(nq + past) + " d" +
                     std::to_string(kDims[r.integer(0, 7)]) + (r.chance(0.5) ? " f16" : " bf16") +
                     " causal seed" + std::to_string(r.integer(0, 1 << 20));
  if (r.chance(0.2)) text += " window=" + std::to_string(r.integer(0, 300)) + ",-1";
  if (r.chance(0.2)) text += " smooth_k=off";
  return text;
}

// SAGEBWD_FUZZ_CASES sets how many (24), SAGEBWD_FUZZ_FIRST the number of the first one. Queries
// are the last of the keys.
TEST_P(Causality, RandomProblemsKeepTheirPast) {
  const int64_t first = from_environment("SAGEBWD_FUZZ_FIRST", 0),
                count = from_environment("SAGEBWD_FUZZ_CASES", 24);
  for (int64_t number = first; number < first + count; ++number) {
    Random r(number);
    const std::string text = random_problem(r);
    SCOPED_TRACE(testing::Message() << "SAGEBWD_FUZZ_FIRST=" << number << " SAGEBWD_FUZZ_CASES=1");
    const trace::InputKind kinds[] = {trace::InputKind::gaussian, trace::InputKind::offset,
                                      trace::InputKind::heavy};
    const trace::InputKind kind = kinds[r.integer(0, 2)];
    const double sigma = 0.1 * static_cast<double>(r.integer(3, 60));
    for_each_call(
        {text.c_str()},
        [&](const Call& call) {
          const spec::AttnCase& c = call.c;
          const int64_t past = c.nk - c.nq, cut = r.integer(0, c.nq - 1);
          const Change change = kChanges[r.integer(0, 5)];
          const Outputs before = forward_of(call);
          Call other = call;
          change_from(cut, change, c.h, c.nq, c.d, other.q);
          change_from(cut + past, change, c.hk, c.nk, c.d, other.k);
          change_from(cut + past, change, c.hk, c.nk, c.d, other.v);
          expect_same_rows(call, before, 0, cut, other, forward_of(other), 0);
          const int64_t from = r.chance(0.5) ? 0 : cut, to = from == 0 ? cut : c.nq;
          if (from == to) return;
          const Call part = part_of(call, from, to, 0, to + past);
          expect_same_rows(call, before, from, to, part, forward_of(part), 0);
        },
        kind, sigma);
  }
}

INSTANTIATE_TEST_SUITE_P(Bits, Causality, testing::Values("plain", "tuned"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace sagebwd::gpu
