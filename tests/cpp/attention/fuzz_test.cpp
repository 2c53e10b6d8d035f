// SPDX-License-Identifier: Apache-2.0
// Random problems, each a pure function of its number. Every implementation must agree with the
// recipe oracle, and with exact attention where the problem is large enough to have an accuracy.
// SAGEBWD_FUZZ_CASES sets how many (256), SAGEBWD_FUZZ_FIRST the number of the first one; a failure
// prints the line that repeats it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "support/attention_problem.h"
#include "support/compare.h"
#include "support/implementations.h"
#include "support/random.h"

namespace sagebwd::testing {
namespace {

using trace::InputKind;

constexpr int kShards = 4;  // run side by side by ctest

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoll(text, nullptr, 10) : otherwise;
}

/// A random length, often near the edge of a tile.
int64_t random_length(Random& r) {
  if (r.chance(0.02)) return 0;
  if (r.chance(0.2)) return r.integer(1, 20);
  if (r.chance(0.4)) return 64 * r.integer(1, 4) + r.integer(-2, 2);
  return r.integer(21, 330);
}

/// Documents that cover n tokens; about one in ten is empty.
std::vector<int32_t> random_cuts(Random& r, int64_t n, int64_t documents) {
  std::vector<int32_t> cuts = {0, static_cast<int32_t>(n)};
  for (int64_t i = 1; i < documents; ++i)
    cuts.push_back(r.chance(0.1) ? r.pick(cuts) : static_cast<int32_t>(r.integer(0, n)));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

/// `lead`: of block lists, for problems that have some.
Recipe random_recipe(Random& r, int& lead) {
  Recipe recipe = r.chance(0.4) ? Recipe::paper() : Recipe::vectorwise();
  const bool paper = recipe.scheme == Scheme::paper;
  if (r.chance(0.4)) {
    recipe.tile_q = 64 * static_cast<int>(r.integer(1, 4));
    recipe.tile_k = 64 * static_cast<int>(r.integer(1, paper ? 4 : 2));
  }
  if (r.chance(0.2)) recipe.smooth_k = !recipe.smooth_k;
  recipe.smooth_q = r.chance(0.3) && paper;
  recipe.rounding = r.chance(0.25) ? Rounding::dither : Rounding::nearest;
  lead = r.chance(0.3) ? static_cast<int>(r.integer(-1, 2)) : 0;
  if (r.chance(0.25)) recipe.high_precision = static_cast<uint32_t>(r.integer(1, kMatmulAll));
  if (r.chance(0.25)) recipe.rotate = !recipe.rotate;
  if (r.chance(0.3)) {
    const std::vector<uint32_t> some = {kMatmulDQ, kMatmulO, kMatmulDV | kMatmulDK};
    recipe.dithered = r.pick(some);
  }
  return recipe;
}

/// Layouts of all tensors of a problem.
using Placements = std::map<std::string, Placement>;

/// A random order of batch, head and token, gaps in between, an odd offset, absurd strides where
/// they mean nothing.
Placement random_placement(Random& r, const Shape& shape) {
  std::vector<size_t> order = {0, 1, 2};
  std::swap(order[2], order[static_cast<size_t>(r.integer(0, 2))]);
  std::swap(order[1], order[static_cast<size_t>(r.integer(0, 1))]);
  Placement place;
  place.stride[3] = 1;
  place.offset = r.integer(0, 9);
  int64_t span = shape[3];
  for (size_t dim : {order[2], order[1], order[0]}) {
    place.stride[dim] = span + (r.chance(0.3) ? r.integer(1, 40) : 0);
    span = place.stride[dim] * std::max<int64_t>(shape[dim], 1);
  }
  for (size_t dim = 0; dim < 3; ++dim)
    if (shape[dim] == 1 && r.chance(0.2)) place.stride[dim] = int64_t{1} << r.integer(0, 60);
  return place;
}

/// Makes an input constant along its batches or heads, with stride zero there.
void expand(Random& r, std::vector<float>& x, const Shape& s, Placement& place) {
  const size_t dim = r.chance(0.5) ? 0 : 1;
  const int64_t block = s[2] * s[3];
  for (int64_t b = 0; b < s[0]; ++b)
    for (int64_t h = 0; h < s[1]; ++h) {
      const int64_t from = (dim == 0 ? h : b * s[1]) * block;
      std::copy_n(x.begin() + from, block, x.begin() + (b * s[1] + h) * block);
    }
  place.stride[dim] = 0;
}

/// Block lists for a problem whose tiles, documents and inputs are known.
void add_lists(Random& r, AttentionProblem& p) {
  spec::AttnCase& c = p.c;
  const auto block = [&](int tile) {
    return tile != 0 ? tile * static_cast<int>(r.integer(1, 2))
                     : 64 * static_cast<int>(r.integer(1, 4));
  };
  c.block_q = block(c.recipe.tile_q), c.block_k = block(c.recipe.tile_k);
  c.lists = r.pick(std::vector<spec::ListKind>{spec::ListKind::random, spec::ListKind::mass,
                                               spec::ListKind::diagonal, spec::ListKind::skewed});
  const double blocks = std::ceil(static_cast<double>(c.nk) / c.block_k);
  c.keep = std::min(
      1.0, std::max(static_cast<double>(r.between(0.1f, 1.0f)), 1 / std::max(blocks, 1.0)));
  p.make_lists();
}

struct FuzzCase {
  AttentionProblem p;
  Placements places;
  bool has_accuracy;
};

FuzzCase make_case(int64_t number) {
  Random r(hash64({0xf022, static_cast<uint64_t>(number)}));
  FuzzCase f;
  AttentionProblem& p = f.p;
  spec::AttnCase& c = p.c;
  const bool packed = r.chance(0.25);
  c.b = packed ? 1 : r.integer(1, 3);
  c.hk = r.integer(1, 3);
  c.h = c.hk * r.integer(1, 3);
  c.nq = random_length(r);
  c.nk = r.chance(0.4) ? c.nq : random_length(r);
  c.d = 8 * (r.chance(0.5) ? r.integer(1, 10) : r.integer(1, 32));
  // A generator of its own, so that a number keeps the rest of its problem.
  Random values(hash64({0xd5, static_cast<uint64_t>(number)}));
  if (values.chance(0.25)) c.dv = 8 * values.integer(1, 32);
  if (c.dv == c.d) c.dv = 0;
  // Large problems take fewer heads: the oracle is a scalar program.
  while (c.b * c.h > 1 && c.b * c.h * c.nq * c.nk * (c.d + c.value_dim()) > 24'000'000)
    c.b = 1, c.h = c.hk = 1;
  c.dtype = r.pick(std::vector<Dtype>{Dtype::f32, Dtype::bf16, Dtype::f16});
  c.mask.causal = r.chance(0.4);
  c.mask.align = r.chance(0.5) ? Align::bottom_right : Align::top_left;
  const bool window = r.chance(0.25);
  if (window) {
    c.mask.window_left = r.integer(-1, 150);
    c.mask.window_right = r.integer(-1, 150);
  }
  c.seed = static_cast<uint64_t>(number);
  c.recipe = random_recipe(r, c.lead);
  // Where S or S' alone is lifted, P need not sum to one, and a gradient may leave FP16.
  const uint32_t logits = kMatmulS | kMatmulSRecompute, lifted = c.recipe.high_precision & logits;
  if (c.dtype == Dtype::f16 && lifted != 0 && lifted != logits) c.dtype = Dtype::bf16;
  if (number % 2 == 0) p.levels_of_p = 127;
  c.recipe.seed = c.seed;
  const InputKind kind =
      r.pick(std::vector<InputKind>{InputKind::gaussian, InputKind::gaussian, InputKind::outlier,
                                    InputKind::sink, InputKind::long_rows, InputKind::offset});
  const double sigma = static_cast<double>(r.between(0.3f, 1.5f));
  p.in = trace::make_inputs(c, kind, sigma);
  if (packed) {
    const int64_t documents = r.integer(1, 6);
    p.cu_q = random_cuts(r, c.nq, documents);
    p.cu_k = random_cuts(r, c.nk, documents);
  }
  if (r.chance(0.3))
    p.scale =
        r.between(0.1f, 2.0f) * (r.chance(0.3) ? -1.0f : 1.0f) / std::sqrt(static_cast<float>(c.d));
  if (r.chance(0.3)) p.dlse = random_rows(p, 1);
  p.partial_kv = r.chance(0.15);

  const std::pair<const char*, Shape> tensors[] = {
      {"q", p.q_shape()},     {"k", p.k_shape()},     {"v", p.v_shape()},  {"o", p.o_shape()},
      {"dq", p.q_shape()},    {"dk", p.k_shape()},    {"dv", p.v_shape()}, {"dout", p.o_shape()},
      {"lse", p.row_shape()}, {"dlse", p.row_shape()}};
  for (const auto& [name, shape] : tensors) f.places[name] = random_placement(r, shape);
  if (r.chance(0.15)) expand(r, p.in.q, p.q_shape(), f.places["q"]);
  if (r.chance(0.15)) expand(r, p.in.k, p.k_shape(), f.places["k"]);
  if (r.chance(0.15)) expand(r, p.in.v, p.v_shape(), f.places["v"]);
  if (r.chance(0.15)) expand(r, p.in.dout, p.o_shape(), f.places["dout"]);

  if (r.chance(0.25)) add_lists(r, p);
  if (r.chance(0.25)) c.softcap = r.pick(std::vector<float>{1e-3f, 0.3f, 2.0f, 10.0f, 50.0f, 1e5f});

  f.has_accuracy = !c.has_lists() && !packed && !window && !p.partial_kv && p.scale == 0.0f &&
                   sigma <= 1.2 && kind == InputKind::gaussian && std::min(c.nq, c.nk) >= 100 &&
                   std::min(c.d, c.value_dim()) >= 24 && (c.softcap == 0.0f || c.softcap >= 10.0f);
  return f;
}

std::string repro(int64_t number, const FuzzCase& f) {
  std::ostringstream s;
  s << "\n  repeat: SAGEBWD_FUZZ_FIRST=" << number
    << " SAGEBWD_FUZZ_CASES=1 sagebwd_tests --gtest_filter='Fuzz*'  # " << f.p.describe();
  return s.str();
}

void check_case(int64_t number) {
  const FuzzCase f = make_case(number);
  const AttentionProblem& p = f.p;
  const auto place = [&](const std::string& tensor, const Shape&) { return f.places.at(tensor); };
  std::map<int, Results> references;  // by the levels of P
  const auto reference_of = [&](const AttentionProblem& levelled) -> const Results& {
    const auto [at, is_new] = references.try_emplace(levelled.levels_of_p);
    if (is_new) at->second = run(reference(), levelled);
    return at->second;
  };
  Exact truth;
  if (f.has_accuracy) truth = exact(p);
  // Dither has 1.5 times the error of nearest rounding. One scale per tile has three times the
  // error of one scale per line.
  const double gate = (p.c.recipe.scheme == Scheme::paper ? 0.12 : 0.06) *
                      (p.c.recipe.rounding == Rounding::dither ? 1.5 : 1.0);
  for (const dispatch::Implementation* impl : available_production()) {
    const Results& want = reference_of(with_levels_of(*impl, p));
    // FP32 logits of size x carry an error of 6e-8·x into P.
    double largest = 30;
    for (float x : want.max_logit)
      if (std::isfinite(x)) largest = std::max<double>(largest, std::fabs(x));
    const Parity parity{2e-3 * largest / 30, 1e-5 * largest / 30, 5e-5 * largest / 30};
    const Results got = run(*impl, p, {.place = place});
    EXPECT_TRUE(elementwise("LSE", got.lse, widened(want.lse), p.row_shape(), parity.lse, 1e-6, p))
        << impl->name << repro(number, f);
    ::testing::AssertionResult same = agrees(got, want, parity, p);
    if (!same) {
      // Some gradients are mostly quantisation error, for example where a large mean key is not
      // smoothed. One code of dS that rounds the other way is a large part of such a gradient, but
      // a small part of its error.
      if (truth.o.empty()) truth = exact(p);
      if (differs_less_than_its_error(got, want, truth, 0.3, p))
        same = ::testing::AssertionSuccess();
    }
    EXPECT_TRUE(same) << impl->name << repro(number, f);
    if (f.has_accuracy) {
      EXPECT_TRUE(accurate(got, truth, {.o = 0.06, .dq = gate, .dk = gate, .dv = gate}, p))
          << impl->name << repro(number, f);
    }
  }
}

class Fuzz : public ::testing::TestWithParam<int> {};

TEST_P(Fuzz, RandomProblems) {
  const int64_t first = from_environment("SAGEBWD_FUZZ_FIRST", 0);
  const int64_t count = from_environment("SAGEBWD_FUZZ_CASES", 256);
  for (int64_t number = first; number < first + count; ++number) {
    if (number % kShards != GetParam()) continue;
    ASSERT_NO_THROW(check_case(number)) << repro(number, make_case(number));
  }
}

INSTANTIATE_TEST_SUITE_P(, Fuzz, ::testing::Range(0, kShards));

}  // namespace
}  // namespace sagebwd::testing
