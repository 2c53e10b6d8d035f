// SPDX-License-Identifier: Apache-2.0
// Mixing, means of blocks and the largest scores on the GPU, against the same calls on the CPU.
#include "sagebwd/mix.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <ostream>
#include <random>
#include <utility>
#include <vector>

#include "base/dispatch_dtype.h"
#include "base/math.h"
#include "device_array.h"
#include "device_case.h"
#include "support/digest.h"

namespace sagebwd::gpu {
namespace {

/// A tensor [b, h, n, d] on both machines; tokens before heads, `gap` elements behind each row.
struct Twin {
  Twin(Dtype dtype, std::array<int64_t, 4> shape, int64_t gap, uint32_t seed)
      : host(static_cast<size_t>((shape[0] * shape[1] * shape[2] * (shape[3] + gap) + 8) *
                                 dtype_size(dtype))),
        device(host.size()) {
    const int64_t row = shape[3] + gap;
    view = {nullptr, dtype, shape, {shape[2] * shape[1] * row, row, shape[1] * row, 1}};
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    with_dtype(dtype, [&](auto type) {
      using T = decltype(type);
      for (size_t i = 0; i < host.size() / sizeof(T); ++i) {
        const T x = from_float<T>(seed == 0 ? 0.0f : normal(random));
        std::memcpy(host.data() + i * sizeof(T), &x, sizeof(T));
      }
    });
    device.write(host, 0);
  }
  /// `shift`: elements before the first.
  TensorView on(Device where, int64_t shift) {
    TensorView v = view;
    v.data = (where == Device::cuda ? device.data : host.data()) + shift * dtype_size(v.dtype);
    return v;
  }
  /// The relative L2 distance of what the two have.
  double error() const {
    const std::vector<std::byte> got = device.read();
    double difference = 0, size = 0;
    with_dtype(view.dtype, [&](auto type) {
      using T = decltype(type);
      for (size_t i = 0; i < host.size() / sizeof(T); ++i) {
        T a, b;
        std::memcpy(&a, got.data() + i * sizeof(T), sizeof(T));
        std::memcpy(&b, host.data() + i * sizeof(T), sizeof(T));
        const double x = double{to_float(a)}, y = double{to_float(b)};
        difference += (x - y) * (x - y), size += y * y;
      }
    });
    return difference == 0 ? 0 : std::sqrt(difference / size);
  }
  std::vector<std::byte> host;
  Array<std::byte> device;
  TensorView view;
};

/// Numbers on both machines.
template <typename T>
struct Numbers {
  explicit Numbers(std::vector<T> x) : host(std::move(x)), device(host) {}
  T* on(Device where) { return where == Device::cuda ? device.data : host.data(); }
  double error() const {
    const std::vector<T> got = device.read();
    double difference = 0, size = 0;
    for (size_t i = 0; i < host.size(); ++i) {
      const double x = static_cast<double>(got[i]), y = static_cast<double>(host[i]);
      difference += (x - y) * (x - y), size += y * y;
    }
    return difference == 0 ? 0 : std::sqrt(difference / size);
  }
  std::vector<T> host;
  Array<T> device;
};

std::vector<float> random_numbers(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform;
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x) value = uniform(random);
  return x;
}

/// Calls with a workspace where that is needed.
template <typename Args, typename F>
void call(Args& args, Device where, F&& function) {
  args.device = where;
  const size_t bytes = workspace_size(args);
  const Array<std::byte> on_device(bytes + 16);
  std::vector<float> on_host(bytes / sizeof(float) + 1);
  args.workspace = where == Device::cuda ? static_cast<void*>(on_device.data) : on_host.data();
  args.workspace_bytes = bytes;
  function(args);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

struct MixSizes {
  Dtype dtype = Dtype::bf16;
  int64_t b = 1, h = 2, n = 130, d = 64;
  int64_t block = 128, batches = 1;
  int64_t gap = 0, shift = 0;
};
void PrintTo(const MixSizes& s, std::ostream* out) {
  *out << dtype_name(s.dtype) << " b" << s.b << " h" << s.h << " n" << s.n << " d" << s.d
       << " block " << s.block << " batches " << s.batches << " gap " << s.gap << " shift "
       << s.shift;
}

class MixCase : public ::testing::TestWithParam<MixSizes> {};

TEST_P(MixCase, AgreesWithTheCpu) {
  NEED_DEVICE();
  const MixSizes s = GetParam();
  const std::array<int64_t, 4> shape{s.b, s.h, s.n, s.d};
  const auto twin = [&](uint32_t seed) { return Twin(s.dtype, shape, s.gap, seed); };
  Twin sparse = twin(1), linear = twin(2), dout = twin(3), out = twin(0), dsparse = twin(0),
       dlinear = twin(0);
  const int64_t rows = ceil_div(s.n, s.block);
  Numbers<float> alpha(random_numbers(s.batches * s.h * rows, 4)),
      dalpha(std::vector<float>(alpha.host.size())), norm(random_numbers(s.b * s.h * s.n, 5));
  for (size_t i = 0; i < norm.host.size(); i += 7) norm.host[i] = 0.0f;
  norm.device.write(norm.host, 0);
  for (const Device where : {Device::cpu, Device::cuda}) {
    const auto fill = [&](MixArgs& a) {
      a.sparse = sparse.on(where, s.shift), a.linear = linear.on(where, s.shift);
      a.alpha = {alpha.on(where), s.batches, rows, s.block};
      a.norm = contiguous_stats(norm.on(where), s.h, s.n);
    };
    MixForwardArgs f;
    fill(f);
    f.device = where, f.out = out.on(where, s.shift);
    mix_forward(f);
    MixBackwardArgs b;
    fill(b);
    b.dout = dout.on(where, s.shift);
    b.dsparse = dsparse.on(where, s.shift), b.dlinear = dlinear.on(where, s.shift);
    b.dalpha = dalpha.on(where);
    call(b, where, [](const MixBackwardArgs& a) { mix_backward(a); });
  }
  if (testing::DigestFile file; file.wanted())
    file.line("mix " + ::testing::PrintToString(s), out.device.read(), dsparse.device.read(),
              dlinear.device.read(), dalpha.device.read());
  // Fused multiplications may round the last bit the other way.
  const double gate = s.dtype == Dtype::f32 ? 1e-6 : s.dtype == Dtype::f16 ? 1e-4 : 1e-3;
  EXPECT_LE(out.error(), gate);
  EXPECT_LE(dsparse.error(), gate);
  EXPECT_LE(dlinear.error(), gate);
  EXPECT_LE(dalpha.error(), 1e-5);
}

TEST_P(MixCase, TheSparseBranchAgreesWithTheCpu) {
  NEED_DEVICE();
  const MixSizes s = GetParam();
  const std::array<int64_t, 4> shape{s.b, s.h, s.n, s.d};
  const auto twin = [&](uint32_t seed) { return Twin(s.dtype, shape, s.gap, seed); };
  Twin sparse = twin(1), dout = twin(3), dsparse = twin(0);
  const int64_t rows = ceil_div(s.n, s.block), pieces = ceil_div(s.n, int64_t{64});
  Numbers<float> alpha(random_numbers(s.batches * s.h * rows, 4)),
      parts(std::vector<float>(static_cast<size_t>(s.b * s.h * pieces))),
      norm(random_numbers(s.b * s.h * s.n, 5));
  for (size_t i = 0; i < norm.host.size(); i += 7) norm.host[i] = 0.0f;
  norm.device.write(norm.host, 0);
  for (const Device where : {Device::cpu, Device::cuda}) {
    MixSparseArgs a;
    a.device = where;
    a.sparse = sparse.on(where, s.shift), a.dout = dout.on(where, s.shift);
    a.alpha = {alpha.on(where), s.batches, rows, s.block};
    a.norm = contiguous_stats(norm.on(where), s.h, s.n);
    a.dsparse = dsparse.on(where, s.shift), a.parts = parts.on(where);
    if (s.block == 1) {  // an α for each query: its parts would be those of queries
      EXPECT_THROW(mix_sparse_backward(a), Error);
      return;
    }
    mix_sparse_backward(a);
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  if (testing::DigestFile file; file.wanted())
    file.line("sparse " + ::testing::PrintToString(s), dsparse.device.read(), parts.device.read());
  EXPECT_LE(dsparse.error(), s.dtype == Dtype::f32 ? 1e-6 : s.dtype == Dtype::f16 ? 1e-4 : 1e-3);
  EXPECT_LE(parts.error(), 1e-5);
}

TEST_P(MixCase, MeansAgreeWithTheCpu) {
  NEED_DEVICE();
  const MixSizes s = GetParam();
  Twin q(s.dtype, {s.b, s.h, s.n, s.d}, s.gap, 1), k(s.dtype, {s.b, 1, s.n + 9, s.d}, s.gap, 2);
  for (const bool mean_free : {false, true}) {
    const int64_t q_blocks = ceil_div(s.n, 128), k_blocks = ceil_div(s.n + 9, 64);
    Numbers<float> q_means(std::vector<float>(static_cast<size_t>(s.b * s.h * q_blocks * s.d))),
        k_means(std::vector<float>(static_cast<size_t>(s.b * k_blocks * s.d)));
    for (const Device where : {Device::cpu, Device::cuda}) {
      BlockMeansArgs a;
      a.q = q.on(where, s.shift), a.k = k.on(where, s.shift);
      a.mean_free_keys = mean_free;
      a.q_means = q_means.on(where), a.k_means = k_means.on(where);
      call(a, where, [](const BlockMeansArgs& x) { block_means(x); });
    }
    if (testing::DigestFile file; file.wanted())
      file.line("means " + ::testing::PrintToString(s), q_means.device.read(),
                k_means.device.read());
    EXPECT_LE(q_means.error(), 1e-6);
    EXPECT_LE(k_means.error(), 1e-6);
  }
}

constexpr Dtype kBf16 = Dtype::bf16, kF16 = Dtype::f16, kF32 = Dtype::f32;

INSTANTIATE_TEST_SUITE_P(Sanitized, MixCase,
                         ::testing::Values(MixSizes{.h = 3, .n = 70, .d = 72, .gap = 3},
                                           MixSizes{.dtype = kF16, .n = 65, .d = 128, .block = 1}));
// Every kernel once.
INSTANTIATE_TEST_SUITE_P(
    Every, MixCase,
    ::testing::Values(MixSizes{.dtype = kBf16, .d = 64}, MixSizes{.dtype = kBf16, .d = 128},
                      MixSizes{.dtype = kBf16, .d = 256}, MixSizes{.dtype = kF16, .d = 64},
                      MixSizes{.dtype = kF16, .d = 128}, MixSizes{.dtype = kF16, .d = 256},
                      MixSizes{.dtype = kF32, .d = 64}, MixSizes{.dtype = kF32, .d = 128},
                      MixSizes{.dtype = kF32, .d = 256}));
INSTANTIATE_TEST_SUITE_P(
    Mix, MixCase,
    ::testing::Values(MixSizes{.b = 2, .n = 300, .d = 8, .block = 1, .batches = 2},
                      MixSizes{.b = 2, .n = 300, .d = 40, .block = 1},
                      MixSizes{
                          .dtype = kF32, .b = 3, .n = 200, .d = 104, .block = 64, .batches = 3},
                      MixSizes{.b = 2, .n = 333, .d = 128, .block = 64},
                      MixSizes{.dtype = kF16, .b = 2, .h = 1, .n = 400, .d = 200, .block = 1024},
                      MixSizes{.n = 190, .d = 64, .gap = 8, .shift = 1},
                      MixSizes{.dtype = kF32, .n = 190, .d = 64, .gap = 4, .shift = 2}));

void expect_top_k(int64_t rows, int64_t columns, int64_t k) {
  Numbers<float> scores(random_numbers(rows * columns, 6));
  for (size_t i = 0; i < scores.host.size(); ++i) {
    if (i % 5 == 0) scores.host[i] = 0.5f;  // ties
    if (i % 11 == 0) scores.host[i] = -INFINITY;
    if (i % 3 == 0) scores.host[i] -= 0.7f;
  }
  scores.device.write(scores.host, 0);
  Numbers<int32_t> index(std::vector<int32_t>(static_cast<size_t>(rows * k + 1))),
      count(std::vector<int32_t>(static_cast<size_t>(rows)));
  for (const Device where : {Device::cpu, Device::cuda}) {
    TopKArgs a;
    a.device = where;
    a.scores = scores.on(where), a.rows = rows, a.columns = columns, a.k = k;
    a.index = index.on(where), a.count = count.on(where);
    top_k(a);
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(index.device.read(), index.host) << columns << " " << k;
  EXPECT_EQ(count.device.read(), count.host) << columns << " " << k;
}

class TopKCase : public ::testing::TestWithParam<std::array<int64_t, 3>> {};
TEST_P(TopKCase, AgreesWithTheCpu) {
  NEED_DEVICE();
  expect_top_k(GetParam()[0], GetParam()[1], GetParam()[2]);
}
using TopKSizes = std::array<int64_t, 3>;
INSTANTIATE_TEST_SUITE_P(Every, TopKCase, ::testing::Values(TopKSizes{3, 100, 30}));
INSTANTIATE_TEST_SUITE_P(Mix, TopKCase,
                         ::testing::Values(TopKSizes{2, 1, 1}, TopKSizes{2, 3, 0},
                                           TopKSizes{3, 64, 64}, TopKSizes{2, 1025, 700},
                                           TopKSizes{3, 512, 15}, TopKSizes{3, 512, 1},
                                           TopKSizes{2, 700, 32}, TopKSizes{2, 300, 129},
                                           TopKSizes{1, 8192, 3}));

}  // namespace
}  // namespace sagebwd::gpu
