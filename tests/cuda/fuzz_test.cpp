// SPDX-License-Identifier: Apache-2.0
// Random problems on the GPU, each a pure function of its number, on every CUDA implementation
// that takes them, against the recipe oracle with that implementation's tiles.
// SAGEBWD_FUZZ_CASES sets how many (256), SAGEBWD_FUZZ_FIRST the number of the first one,
// SAGEBWD_FUZZ_ONLY the one implementation to look at.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "device_case.h"
#include "numerics/rotate.h"
#include "random_cases.h"

namespace sagebwd::gpu {
namespace {

using trace::InputKind;

/// A random length, often near the edge of a tile.
int64_t random_length(Random& r) {
  if (r.chance(0.02)) return 0;
  if (r.chance(0.2)) return r.integer(1, 20);
  if (r.chance(0.4)) return 64 * r.integer(1, 6) + r.integer(-2, 2);
  return r.integer(21, 400);
}

std::vector<int32_t> random_cuts(Random& r, int64_t n, int64_t documents) {
  std::vector<int32_t> cuts = {0, static_cast<int32_t>(n)};
  for (int64_t i = 1; i < documents; ++i)
    cuts.push_back(r.chance(0.1) ? cuts[static_cast<size_t>(r.integer(0, i))]
                                 : static_cast<int32_t>(r.integer(0, n)));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

Recipe random_recipe(Random& r, uint64_t seed) {
  Recipe recipe = r.chance(0.4) ? Recipe::paper() : Recipe::vectorwise();
  if (r.chance(0.2)) {
    recipe.tile_q = 64 * static_cast<int>(r.integer(1, 4));
    recipe.tile_k = 64 * static_cast<int>(r.integer(1, 4));
  }
  if (r.chance(0.2)) recipe.smooth_k = !recipe.smooth_k;
  recipe.smooth_q = r.chance(0.15);
  recipe.rounding = r.chance(0.2) ? Rounding::dither : Rounding::nearest;
  if (r.chance(0.1)) recipe.rounding = Rounding::dither, recipe.dithered = kMatmulDQ;
  if (r.chance(0.15)) recipe.high_precision = static_cast<uint32_t>(r.integer(1, kMatmulAll));
  recipe.seed = seed;
  if (recipe.scheme == Scheme::paper) return recipe;
  recipe.smooth_q = false;
  recipe.tile_k = std::min(recipe.tile_k, 128);  // keys of a tile share a centre
  return recipe;
}

DeviceCase make_case(int64_t number) {
  Random r(number);
  DeviceCase dc("n1");
  spec::AttnCase& c = dc.c;
  const bool packed = r.chance(0.25);
  c.b = packed ? 1 : r.integer(1, 3);
  c.hk = r.integer(1, 3);
  c.h = c.hk * r.integer(1, 3);
  c.nq = random_length(r);
  c.nk = r.chance(0.4) ? c.nq : random_length(r);
  c.d = r.chance(0.5) ? (r.chance(0.5) ? 64 : 128) : 8 * r.integer(1, 32);
  // A generator of its own, so that a number keeps the rest of its problem.
  Random values(number + (int64_t{1} << 40));
  if (values.chance(0.1)) c.dv = 8 * values.integer(1, 32);
  if (c.dv == c.d) c.dv = 0;
  while (c.b * c.h > 1 && c.b * c.h * c.nq * c.nk * (c.d + c.value_dim()) > 40'000'000)
    c.b = 1, c.h = c.hk = 1;
  c.dtype = r.chance(0.7) ? Dtype::bf16 : r.chance(0.7) ? Dtype::f16 : Dtype::f32;
  c.layout = r.chance(0.4) ? spec::Layout::bshd : spec::Layout::bhsd;
  c.mask.causal = r.chance(0.4);
  c.mask.align = r.chance(0.5) ? Align::bottom_right : Align::top_left;
  if (r.chance(0.25)) {
    c.mask.window_left = r.integer(-1, 150);
    c.mask.window_right = r.integer(-1, 150);
  }
  c.seed = static_cast<uint64_t>(number);
  c.recipe = random_recipe(r, c.seed);
  const InputKind kinds[] = {InputKind::gaussian, InputKind::gaussian,  InputKind::outlier,
                             InputKind::sink,     InputKind::long_rows, InputKind::offset};
  dc.kind = kinds[r.integer(0, 5)];
  dc.sigma = 0.3 + 0.1 * static_cast<double>(r.integer(0, 12));
  if (packed) {
    const int64_t documents = r.integer(1, 6);
    dc.cu_q = random_cuts(r, c.nq, documents);
    dc.cu_k = random_cuts(r, c.nk, documents);
  } else if (r.chance(0.3)) {
    dc.placement = Placement::gaps;
  }
  if (r.chance(0.3))
    dc.scale = 0.1f * static_cast<float>(r.integer(1, 20)) * (r.chance(0.3) ? -1.0f : 1.0f) /
               std::sqrt(static_cast<float>(c.d));
  dc.dlse = r.chance(0.3);
  dc.partial_kv = r.chance(0.15);
  dc.deterministic = r.chance(0.3);
  dc.poison = r.chance(0.5) ? 0x7f : 0x80;
  if (c.recipe.high_precision == 0 && r.chance(0.1)) c.recipe.high_precision = kMatmulDK;
  if (r.chance(0.1)) {
    const float caps[] = {0.3f, 2.0f, 10.0f, 50.0f, 1e5f};
    c.softcap = caps[r.integer(0, 4)];
  }
  return dc;
}

double norm(const std::vector<float>& x) {
  double sum = 0;
  for (float v : x) sum += std::isfinite(v) ? static_cast<double>(v) * v : 0.0;
  return std::sqrt(sum);
}

/// |a - b| is compared with |b|. Where b is mostly quantisation error it is compared with a share
/// of that error, because one code that rounds the other way is a large part of such a tensor. For
/// gradients it is also compared with a tenth of |dO|, because dQ and dK of a row with one key are
/// rounding noise.
void expect_close(const char* name, const std::vector<float>& got, const std::vector<float>& want,
                  const std::vector<float>& exact, double budget, double floor, double share) {
  const double gap = relative_error(got, want);
  if (gap <= budget || gap * norm(want) <= budget * floor) return;
  const double error = exact.empty() ? 0.0 : relative_error(want, exact);
  EXPECT_LE(gap, std::max(budget, share * error)) << name << ", error of the oracle " << error;
}

/// Tokens begin … end - 1 of each head, of a tensor [heads, n, width].
std::vector<float> tokens_of(const std::vector<float>& x, int64_t n, int64_t width, int64_t begin,
                             int64_t end) {
  std::vector<float> out;
  for (auto head = x.begin(); head != x.end(); head += n * width)
    out.insert(out.end(), head + begin * width, head + end * width);
  return out;
}

/// Puts them back.
void put_tokens(std::vector<float>& x, const std::vector<float>& part, int64_t n, int64_t width,
                int64_t begin, int64_t end) {
  auto from = part.begin();
  for (auto head = x.begin(); head != x.end(); head += n * width, from += (end - begin) * width)
    std::copy(from, from + (end - begin) * width, head + begin * width);
}

/// O and gradients in FP64, each document by itself.
Results exact_documents(const DeviceCase& dc, const CaseInputs& in) {
  const spec::AttnCase& c = dc.c;
  Results r;
  r.o.resize(in.x.dout.size()), r.dq.resize(in.x.q.size());
  r.dk.resize(in.x.k.size()), r.dv.resize(in.x.v.size());
  const int64_t dv = c.value_dim();
  for (size_t t = 0; t + 1 < dc.cu_q.size(); ++t) {
    const int64_t q0 = dc.cu_q[t], q1 = dc.cu_q[t + 1], k0 = dc.cu_k[t], k1 = dc.cu_k[t + 1];
    if (q0 == q1 || k0 == k1) continue;
    DeviceCase one = dc;
    one.cu_q.clear(), one.cu_k.clear(), one.c.nq = q1 - q0, one.c.nk = k1 - k0;
    CaseInputs part;
    part.x.q = tokens_of(in.x.q, c.nq, c.d, q0, q1),
    part.x.k = tokens_of(in.x.k, c.nk, c.d, k0, k1);
    part.x.v = tokens_of(in.x.v, c.nk, dv, k0, k1);
    part.x.dout = tokens_of(in.x.dout, c.nq, dv, q0, q1);
    if (dc.dlse) part.dlse = tokens_of(in.dlse, c.nq, 1, q0, q1);
    const Results exact = run_exact(one, part);
    put_tokens(r.o, exact.o, c.nq, dv, q0, q1), put_tokens(r.dq, exact.dq, c.nq, c.d, q0, q1);
    put_tokens(r.dk, exact.dk, c.nk, c.d, k0, k1), put_tokens(r.dv, exact.dv, c.nk, dv, k0, k1);
  }
  return r;
}

/// Largest magnitude of a tensor [tokens, d], rotated if codes are.
double largest_rotated(std::vector<float> x, const DeviceCase& dc) {
  double top = 0;
  for (size_t i = 0; i < x.size(); i += static_cast<size_t>(dc.c.d)) {
    if (dc.c.recipe.rotate) numerics::rotate(&x[i], static_cast<int>(dc.c.d));
    for (int64_t c = 0; c < dc.c.d; ++c)
      top = std::max<double>(top, std::fabs(x[i + static_cast<size_t>(c)]));
  }
  return top;
}

/// How far a logit moves, at most, if one code of Q or K is the neighbour of the oracle's. A few in
/// a million of cuda-sm90's are, because tensor cores rotate.
double of_one_code(const DeviceCase& dc, const CaseInputs& in) {
  const double scale = dc.scale != 0.0f ? std::fabs(dc.scale) : 1 / std::sqrt(double(dc.c.d));
  return scale * largest_rotated(in.x.q, dc) * largest_rotated(in.x.k, dc) / 127;
}

void check_case(const DeviceCase& dc) {
  const CaseInputs in = make_case_inputs(dc);
  const float shift = dc.partial_kv ? 0.4f : 0.0f;
  const Results got = run_on_device(dc, in, shift), want = run_oracle(dc, in, got, shift);
  Results exact;
  if (!dc.partial_kv) exact = dc.cu_q.empty() ? run_exact(dc, in) : exact_documents(dc, in);
  double largest = 30;
  for (float x : want.max_logit)
    if (std::isfinite(x)) largest = std::max<double>(largest, std::fabs(x));
  const bool halves = works_in_halves(dc);
  const double budget = (halves ? 2e-2 : dc.c.dtype == Dtype::bf16 ? 5e-3 : 2.5e-3) * largest / 30;
  const double floor = 0.1 * norm(in.x.dout);
  // Without smoothing the rounding of dS meets the mean of K. With few keys one code of dS that
  // rounds the other way is then a large part of the quantisation error.
  const double share = !halves ? 0.2 : dc.c.recipe.smooth_k ? 0.35 : 0.7;
  // Where nothing says how large the quantisation error is, half precision gets more room.
  const double unknown = halves && exact.o.empty() ? 2 : 1;
  expect_close("o", got.o, want.o, exact.o, budget, 0.0, share);
  expect_close("dq", got.dq, want.dq, exact.dq, unknown * budget, floor, share);
  expect_close("dk", got.dk, want.dk, exact.dk, unknown * budget, floor, share);
  expect_close("dv", got.dv, want.dv, exact.dv, budget, 0.0, share);
  // In half precision the row sums are rounded too.
  const double logits = 2e-4 * largest / 30, codes = halves ? of_one_code(dc, in) : 0.0;
  EXPECT_LE(largest_difference(got.lse, want.lse), (halves ? 4e-3 * largest / 30 : logits) + codes);
  EXPECT_LE(largest_difference(got.max_logit, want.max_logit), logits + codes);
}

TEST(GpuFuzz, RandomProblems) {
  NEED_DEVICE();
  const int64_t first = from_environment("SAGEBWD_FUZZ_FIRST", 0);
  const int64_t count = from_environment("SAGEBWD_FUZZ_CASES", 256);
  const char* only = std::getenv("SAGEBWD_FUZZ_ONLY");
  int64_t fast = 0;
  for (int64_t number = first; number < first + count; ++number) {
    DeviceCase dc = make_case(number);
    for (const char* impl : {"cuda-sm90", "cuda-sm80", "cuda-plain"}) {
      if (only != nullptr && std::strcmp(only, impl) != 0) continue;
      dc.impl = impl;
      if (dc.impl == "cuda-sm90" && !works_in_halves(dc)) continue;
      if (!device_candidate(dc, true).supported || !device_candidate(dc, false).supported) {
        EXPECT_STRNE(impl, "cuda-plain") << "takes every problem: " << dc.c.to_string();
        continue;
      }
      fast += dc.impl == "cuda-sm80";
      SCOPED_TRACE("repeat: SAGEBWD_FUZZ_FIRST=" + std::to_string(number) +
                   " SAGEBWD_FUZZ_CASES=1 gpu_tests --gtest_filter='GpuFuzz*'  # " + impl + " " +
                   dc.c.to_string() + (dc.cu_q.empty() ? "" : " packed") +
                   (dc.dlse ? " dlse" : "") + (dc.partial_kv ? " partial_kv" : "") +
                   (dc.deterministic ? " deterministic" : "") + " scale " +
                   std::to_string(dc.scale));
      ASSERT_NO_THROW(check_case(dc));
    }
  }
  if (count >= 100 && only == nullptr) {
    EXPECT_GE(5 * fast, count) << "the fast kernels took too few of the problems";
  }
}

}  // namespace
}  // namespace sagebwd::gpu
