// SPDX-License-Identifier: Apache-2.0
#include "cpu/sla2/mix.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <vector>

#include "base/dispatch_dtype.h"
#include "base/parallel.h"

namespace sagebwd::cpu::sla2 {
namespace {

using spec::AlphaParts;
using spec::kMixPiece;
using spec::MeansProblem;
using spec::MixProblem;

template <typename T>
T* row_of(const TensorView& t, int64_t batch, int64_t head, int64_t token) {
  return static_cast<T*>(t.data) + batch * t.stride[0] + head * t.stride[1] + token * t.stride[2];
}

/// f(batch, head, token, α, whether anything is left for the linear branch) for all queries; a
/// worker takes a piece of a head.
template <typename Args, typename F>
void for_rows(const MixProblem& p, const Args& a, F&& f) {
  const int64_t pieces = p.pieces();
  parallel_for(a.parallel_for, p.b * p.h * pieces, [&](int64_t item) {
    const int64_t batch = item / pieces / p.h, head = item / pieces % p.h;
    const int64_t first = item % pieces * kMixPiece, end = std::min(p.n, first + kMixPiece);
    const Alpha& alpha = a.alpha;
    const float* of_head =
        alpha.data + ((alpha.batches == 1 ? 0 : batch) * p.h + head) * alpha.rows;
    const float* norm = a.norm.data == nullptr
                            ? nullptr
                            : a.norm.data + batch * a.norm.stride[0] + head * a.norm.stride[1];
    for (int64_t token = first; token < end; ++token) {
      const bool left = norm == nullptr || norm[token * a.norm.stride[2]] != 0.0f;
      f(batch, head, token, left ? of_head[token / alpha.block] : 1.0f, left);
    }
  });
}

template <typename T>
void mean_of_blocks(const TensorView& x, const ParallelFor& pf, int64_t block, int64_t blocks,
                    float* means) {
  const int64_t heads = x.shape[1], tokens = x.shape[2], d = x.shape[3];
  parallel_for(pf, x.shape[0] * heads * blocks, [&](int64_t item) {
    const int64_t batch = item / blocks / heads, head = item / blocks % heads;
    const int64_t first = item % blocks * block, end = std::min(tokens, first + block);
    std::array<float, 256> sum{};
    for (int64_t token = first; token < end; ++token) {
      const T* row = row_of<const T>(x, batch, head, token);
      for (int64_t c = 0; c < d; ++c) sum[static_cast<size_t>(c)] += to_float(row[c]);
    }
    const auto size = static_cast<float>(end - first);
    for (int64_t c = 0; c < d; ++c) means[item * d + c] = sum[static_cast<size_t>(c)] / size;
  });
}

void mix_forward(const MixProblem& p, const MixForwardArgs& a) {
  with_dtype(a.sparse.dtype, [&](auto type) {
    using T = decltype(type);
    for_rows(p, a, [&](int64_t b, int64_t h, int64_t t, float alpha, bool left) {
      const T *sparse = row_of<const T>(a.sparse, b, h, t),
              *linear = row_of<const T>(a.linear, b, h, t);
      T* out = row_of<T>(a.out, b, h, t);
      for (int64_t c = 0; c < p.d; ++c)
        out[c] =
            left ? from_float<T>(alpha * to_float(sparse[c]) + (1.0f - alpha) * to_float(linear[c]))
                 : sparse[c];
    });
  });
}

void mix_backward(const MixProblem& p, const MixBackwardArgs& a, float* parts) {
  const AlphaParts size(p, a.alpha);
  if (a.dalpha != nullptr && size.are_results()) parts = a.dalpha;
  if (a.dalpha != nullptr) std::fill_n(parts, size.count, 0.0f);
  with_dtype(a.sparse.dtype, [&](auto type) {
    using T = decltype(type);
    for_rows(p, a, [&](int64_t b, int64_t h, int64_t t, float alpha, bool left) {
      const T *sparse = row_of<const T>(a.sparse, b, h, t),
              *linear = row_of<const T>(a.linear, b, h, t),
              *dout = row_of<const T>(a.dout, b, h, t);
      T *dsparse = row_of<T>(a.dsparse, b, h, t), *dlinear = row_of<T>(a.dlinear, b, h, t);
      float sum = 0.0f;
      for (int64_t c = 0; c < p.d; ++c) {
        const float g = to_float(dout[c]);
        dsparse[c] = left ? from_float<T>(alpha * g) : dout[c];
        dlinear[c] = from_float<T>(left ? (1.0f - alpha) * g : 0.0f);
        sum += g * (to_float(sparse[c]) - to_float(linear[c]));
      }
      if (a.dalpha != nullptr && left) parts[(b * p.h + h) * size.of_head + t / size.unit] += sum;
    });
  });
  if (a.dalpha == nullptr || size.are_results()) return;
  parallel_for(a.parallel_for, a.alpha.batches * p.h * a.alpha.rows, [&](int64_t item) {
    const int64_t row = item % a.alpha.rows, head = item / a.alpha.rows;
    const int64_t first = row * size.of_row, end = std::min(size.of_head, first + size.of_row);
    float sum = 0.0f;
    for (int64_t batch = 0; batch < size.batches; ++batch)
      for (int64_t i = first; i < end; ++i) sum += parts[(batch * p.h + head) * size.of_head + i];
    a.dalpha[item] = sum;
  });
}

void mix_sparse_backward(const MixProblem& p, const MixSparseArgs& a) {
  if (a.parts != nullptr) std::fill_n(a.parts, p.b * p.h * p.pieces(), 0.0f);
  with_dtype(a.sparse.dtype, [&](auto type) {
    using T = decltype(type);
    for_rows(p, a, [&](int64_t b, int64_t h, int64_t t, float alpha, bool left) {
      const T *sparse = row_of<const T>(a.sparse, b, h, t),
              *dout = row_of<const T>(a.dout, b, h, t);
      T* dsparse = row_of<T>(a.dsparse, b, h, t);
      float sum = 0.0f;
      for (int64_t c = 0; c < p.d; ++c) {
        const float g = to_float(dout[c]);
        dsparse[c] = left ? from_float<T>(alpha * g) : dout[c];
        if (a.parts != nullptr) sum += g * to_float(sparse[c]);
      }
      if (a.parts != nullptr && left) a.parts[(b * p.h + h) * p.pieces() + t / kMixPiece] += sum;
    });
  });
}

void block_means(const MeansProblem& p, const BlockMeansArgs& a, float* raw) {
  float* const k_means = a.mean_free_keys ? raw : a.k_means;
  with_dtype(a.q.dtype, [&](auto type) {
    using T = decltype(type);
    mean_of_blocks<T>(a.q, a.parallel_for, a.block_q, p.q_blocks, a.q_means);
    mean_of_blocks<T>(a.k, a.parallel_for, a.block_k, p.k_blocks, k_means);
  });
  if (!a.mean_free_keys) return;
  parallel_for(a.parallel_for, p.b * p.hk, [&](int64_t head) {
    const float* const means = raw + head * p.k_blocks * p.d;
    float* const to = a.k_means + head * p.k_blocks * p.d;
    for (int64_t c = 0; c < p.d; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < p.k_blocks; ++i)
        sum += double{means[i * p.d + c]} *
               static_cast<double>(std::min(a.block_k, p.nk - i * a.block_k));
      const auto mean = static_cast<float>(sum / static_cast<double>(p.nk));
      for (int64_t i = 0; i < p.k_blocks; ++i) to[i * p.d + c] = means[i * p.d + c] - mean;
    }
  });
}

void top_k(const TopKArgs& a) {
  parallel_for(a.parallel_for, a.rows, [&](int64_t row) {
    const float* const scores = a.scores + row * a.columns;
    std::vector<int32_t> order(static_cast<size_t>(a.columns));
    std::iota(order.begin(), order.end(), 0);
    const auto middle = order.begin() + static_cast<std::ptrdiff_t>(a.k);
    std::partial_sort(order.begin(), middle, order.end(), [&](int32_t x, int32_t y) {
      return scores[x] > scores[y] || (!(scores[x] < scores[y]) && x < y);
    });
    int32_t* const index = a.index + row * a.k;
    std::copy(order.begin(), middle, index);
    a.count[row] = static_cast<int32_t>(std::count_if(index, index + a.k, [&](int32_t i) {
      return scores[i] != -std::numeric_limits<float>::infinity();
    }));
  });
}

}  // namespace

const backend::Mix& mix_calls() {
  static const backend::Mix table{Device::cpu,         mix_forward, mix_backward,
                                  mix_sparse_backward, block_means, top_k};
  return table;
}

}  // namespace sagebwd::cpu::sla2
