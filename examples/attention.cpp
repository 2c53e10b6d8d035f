// SPDX-License-Identifier: Apache-2.0
// Forward and backward from C++: causal attention with grouped heads on bfloat16 data, then a step
// along the gradient of V to check it.
//
//   g++ -std=c++20 attention.cpp $(pkg-config --cflags --libs sagebwd) && ./a.out
//
// If ./a.out does not find libsagebwd.so, add -Wl,-rpath,$(pkg-config --variable=libdir sagebwd).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <sagebwd/sagebwd.hpp>
#include <vector>

namespace {

using Buffer = std::vector<uint16_t>;  // bfloat16: the upper half of a float

float to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
uint16_t to_bf16(float x) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + 0x8000u) >> 16);
}

Buffer normal(size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> gauss;
  Buffer out(count);
  for (uint16_t& x : out) x = to_bf16(gauss(engine));
  return out;
}

double dot(const Buffer& a, const Buffer& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(to_float(a[i])) * to_float(b[i]);
  return sum;
}

}  // namespace

int main() try {
  // Eight query heads share two key heads. Any layout is a choice of strides; these are contiguous
  // [b, h, n, d].
  constexpr int64_t b = 1, h = 8, hk = 2, n = 512, d = 64;
  constexpr size_t nq = b * h * n * d, nk = b * hk * n * d;
  Buffer q = normal(nq, 1), k = normal(nk, 2), v = normal(nk, 3), dout = normal(nq, 4);
  Buffer o(nq), dq(nq), dk(nk), dv(nk);
  std::vector<float> lse(b * h * n);

  const auto view = [](Buffer& x, int64_t heads) {
    return sagebwd::contiguous(x.data(), sagebwd::Dtype::bf16, {b, heads, n, d});
  };
  sagebwd::ForwardArgs f;
  f.q = view(q, h), f.k = view(k, hk), f.v = view(v, hk), f.o = view(o, h);
  f.lse = sagebwd::contiguous_stats(lse.data(), h, n);
  f.mask.causal = true;
  // For the published recipe, one scale per tile, instead of the default, one scale per token:
  // f.recipe = sagebwd::Recipe::paper();

  // The backward takes the same tensors, and tensors for the gradients.
  sagebwd::BackwardArgs g;
  static_cast<sagebwd::AttentionArgs&>(g) = f;
  g.dout = view(dout, h), g.dq = view(dq, h), g.dk = view(dk, hk), g.dv = view(dv, hk);

  // The library keeps no memory between calls. The caller provides scratch memory of any alignment.
  std::vector<std::byte> workspace(
      std::max(sagebwd::workspace_size(f), sagebwd::workspace_size(g)));
  f.workspace = g.workspace = workspace.data();
  f.workspace_bytes = g.workspace_bytes = workspace.size();

  std::printf("sagebwd %s\n", sagebwd::version());
  for (const sagebwd::Candidate& c : sagebwd::explain(g))
    std::printf("  %-16s %s\n", c.name.c_str(),
                c.chosen      ? "runs"
                : c.supported ? "could run"
                              : c.reason.c_str());
  sagebwd::forward(f);
  sagebwd::backward(g);

  // O is linear in V: when V moves along its gradient, the loss <dO, O> grows by |dV|².
  const double before = dot(dout, o), expected = dot(dv, dv);
  for (size_t i = 0; i < nk; ++i) v[i] = to_bf16(to_float(v[i]) + to_float(dv[i]));
  sagebwd::forward(f);
  const double moved = dot(dout, o) - before;
  std::printf("the loss moved by %.1f, the gradient of V said %.1f\n", moved, expected);
  return std::abs(moved - expected) < 0.02 * expected ? 0 : 1;
} catch (const sagebwd::Error& e) {
  std::fprintf(stderr, "sagebwd: %s\n", e.what());
  return 1;
}
