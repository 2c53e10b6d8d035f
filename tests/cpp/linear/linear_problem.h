// SPDX-License-Identifier: Apache-2.0
// A problem of the linear branch with all its memory, and the exact answer to it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "base/dispatch_dtype.h"
#include "ref/linear_exact.h"
#include "sagebwd/linear.h"
#include "support/random.h"

namespace sagebwd::testing {

struct LinearSizes {
  int64_t b = 1, h = 2, hk = 1, nq = 200, nk = 330, d = 32;
  double share = 0.5;  // of the key blocks that each list has
  Dtype dtype = Dtype::f32;
  bool mean_free_keys = true;
  int block_q = 64, block_k = 64;
  bool tokens_first = false;  // [b, n, h, d] instead of [b, h, n, d]
  int64_t behind = 0;         // rows of NaN behind the last token of each head
  float spread = 1.0f;        // of q and k

  std::string text() const {
    return "b" + std::to_string(b) + " h" + std::to_string(h) + " hk" + std::to_string(hk) + " nq" +
           std::to_string(nq) + " nk" + std::to_string(nk) + " d" + std::to_string(d) + " share " +
           std::to_string(share) + " " + dtype_name(dtype) + (mean_free_keys ? "" : " raw keys") +
           " blocks " + std::to_string(block_q) + "x" + std::to_string(block_k);
  }
};

/// A strided tensor in memory of its own.
struct LinearTensor {
  LinearTensor() = default;
  LinearTensor(const LinearSizes& s, int64_t heads, int64_t n) {
    const int64_t rows = n + s.behind;
    view.dtype = s.dtype;
    view.shape = {s.b, heads, n, s.d};
    view.stride = {heads * rows * s.d, rows * s.d, s.d, 1};
    if (s.tokens_first) view.stride = {heads * rows * s.d, s.d, heads * s.d, 1};
    memory.assign(static_cast<size_t>(s.b * heads * rows * s.d * dtype_size(s.dtype)),
                  std::byte{0xFF});  // NaN in every dtype
  }
  TensorView at() {
    TensorView v = view;
    v.data = memory.data();
    return v;
  }
  template <typename F>
  void for_each(F&& f) const {
    const auto& n = view.shape;
    for (int64_t b = 0; b < n[0]; ++b)
      for (int64_t h = 0; h < n[1]; ++h)
        for (int64_t t = 0; t < n[2]; ++t)
          for (int64_t c = 0; c < n[3]; ++c)
            f(b * view.stride[0] + h * view.stride[1] + t * view.stride[2] + c, b, h, t, c);
  }
  void set(int64_t at, float x) {
    with_dtype(view.dtype, [&](auto type) {
      reinterpret_cast<decltype(type)*>(memory.data())[at] = from_float<decltype(type)>(x);
    });
  }
  double get(int64_t at) const {
    return with_dtype(view.dtype, [&](auto type) {
      return static_cast<double>(
          to_float(reinterpret_cast<const decltype(type)*>(memory.data())[at]));
    });
  }
  void fill(uint64_t seed, float spread = 1.0f) {
    Random random(seed);
    for_each([&](int64_t at, auto...) {
      // The sum of four uniform numbers is close to a Gaussian.
      float x = -2.0f;
      for (int i = 0; i < 4; ++i) x += random.unit();
      set(at, x * 1.7320508f * spread);
    });
  }
  /// All values in the order [b, h, n, d], or those of one head.
  std::vector<double> values(int64_t batch = -1, int64_t head = -1) const {
    std::vector<double> out;
    for_each([&](int64_t at, int64_t b, int64_t h, int64_t, int64_t) {
      if ((batch < 0 || b == batch) && (head < 0 || h == head)) out.push_back(get(at));
    });
    return out;
  }

  TensorView view;
  std::vector<std::byte> memory;
};

struct LinearAnswer {
  std::vector<double> o, norm, dq, dk, dv;
};

class LinearProblem {
 public:
  explicit LinearProblem(const LinearSizes& sizes, uint64_t seed = 1)
      : s(sizes),
        q(s, s.h, s.nq),
        k(s, s.hk, s.nk),
        v(s, s.hk, s.nk),
        dout(s, s.h, s.nq),
        o(s, s.h, s.nq),
        dq(s, s.h, s.nq),
        dk(s, s.hk, s.nk),
        dv(s, s.hk, s.nk),
        norm(static_cast<size_t>(s.b * s.h * s.nq), std::nanf("")),
        dnorm(norm.size()) {
    q.fill(seed, s.spread), k.fill(seed + 1, s.spread), v.fill(seed + 2), dout.fill(seed + 3);
    Random random(seed + 4);
    // So small that dout and dnorm have a like share in the gradients: norms are about nk / d.
    for (float& x : dnorm) x = random.between(-0.02f, 0.02f);
    make_lists(Random(seed + 5));
  }
  LinearProblem(const LinearProblem&) = delete;

  int64_t rows() const { return (s.nq + s.block_q - 1) / s.block_q; }
  int64_t key_blocks() const { return (s.nk + s.block_k - 1) / s.block_k; }
  bool excludes(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t n = (b * s.h + h) * rows() + i;
    const int32_t* row = index.data() + n * width;
    return std::find(row, row + count[n], j) != row + count[n];
  }

  LinearForwardArgs forward_args() {
    LinearForwardArgs a;
    fill(a);
    a.o = o.at();
    a.norm = contiguous_stats(norm.data(), s.h, s.nq);
    return a;
  }
  LinearBackwardArgs backward_args() {
    LinearBackwardArgs a;
    fill(a);
    a.dout = dout.at(), a.dq = dq.at(), a.dk = dk.at(), a.dv = dv.at();
    a.dnorm = contiguous_stats(dnorm.data(), s.h, s.nq);
    return a;
  }
  template <typename Args>
  void give_workspace(Args& a, size_t bytes) {
    workspace.assign(bytes, std::byte{0xFF});
    a.workspace = workspace.data(), a.workspace_bytes = bytes;
  }

  LinearAnswer results() const {
    return {o.values(), {norm.begin(), norm.end()}, dq.values(), dk.values(), dv.values()};
  }
  LinearAnswer exact() const {
    LinearAnswer all;
    for (int64_t b = 0; b < s.b; ++b)
      for (int64_t g = 0; g < s.hk; ++g) {
        const auto kd = k.values(b, g), vd = v.values(b, g);
        std::vector<double> dk_sum(kd.size(), 0.0), dv_sum(kd.size(), 0.0);
        for (int64_t h = g * (s.h / s.hk); h < (g + 1) * (s.h / s.hk); ++h) {
          const auto qd = q.values(b, h), dod = dout.values(b, h);
          const float* from = dnorm.data() + (b * s.h + h) * s.nq;
          const std::vector<double> dn(from, from + s.nq);
          ref::LinearHead head{s.nq,
                               s.nk,
                               s.d,
                               qd.data(),
                               kd.data(),
                               vd.data(),
                               dod.data(),
                               dn.data(),
                               s.block_q,
                               s.block_k,
                               [&](int64_t i, int64_t j) { return excludes(b, h, i, j); },
                               s.mean_free_keys};
          const ref::LinearResult r = ref::linear_exact(head);
          const auto append = [](std::vector<double>& to, const std::vector<double>& x) {
            to.insert(to.end(), x.begin(), x.end());
          };
          append(all.o, r.o), append(all.norm, r.norm), append(all.dq, r.dq);
          for (size_t n = 0; n < dk_sum.size(); ++n) dk_sum[n] += r.dk[n], dv_sum[n] += r.dv[n];
        }
        all.dk.insert(all.dk.end(), dk_sum.begin(), dk_sum.end());
        all.dv.insert(all.dv.end(), dv_sum.begin(), dv_sum.end());
      }
    return all;
  }

  LinearSizes s;
  LinearTensor q, k, v, dout, o, dq, dk, dv;
  std::vector<float> norm, dnorm;
  std::vector<int32_t> index, count;
  int64_t width = 0;
  std::vector<std::byte> workspace;

 private:
  /// Random blocks in random order; the places behind them are no block numbers.
  void make_lists(Random random) {
    width = key_blocks() + 1;
    for (int64_t n = 0; n < s.b * s.h * rows(); ++n) {
      std::vector<int32_t> blocks(static_cast<size_t>(key_blocks()));
      for (int64_t j = 0; j < key_blocks(); ++j) blocks[j] = static_cast<int32_t>(j);
      for (int64_t j = key_blocks() - 1; j > 0; --j)
        std::swap(blocks[j], blocks[random.integer(0, j)]);
      const auto used =
          static_cast<int64_t>(std::llround(s.share * static_cast<double>(key_blocks())));
      count.push_back(static_cast<int32_t>(used));
      for (int64_t e = 0; e < width; ++e) index.push_back(e < used ? blocks[e] : 1 << 30);
    }
  }
  void fill(LinearArgs& a) {
    a.q = q.at(), a.k = k.at(), a.v = v.at();
    a.mean_free_keys = s.mean_free_keys;
    a.excluded = {.index = index.data(),
                  .count = count.data(),
                  .width = width,
                  .rows = rows(),
                  .stride_batch = s.h * rows(),
                  .stride_head = rows(),
                  .block_q = s.block_q,
                  .block_k = s.block_k};
  }
};

}  // namespace sagebwd::testing
