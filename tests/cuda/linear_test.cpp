// SPDX-License-Identifier: Apache-2.0
// The linear branch on the GPU against the FP64 oracle.
#include "cuda/sla2/linear/linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "device_array.h"
#include "device_case.h"
#include "linear/linear_cases.h"
#include "linear/linear_problem.h"
#include "support/digest.h"

namespace sagebwd::gpu {
namespace {

using sagebwd::testing::LinearAnswer;
using sagebwd::testing::LinearProblem;
using sagebwd::testing::LinearSizes;
using sagebwd::testing::LinearTensor;

/// Relative L2.
double error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (size_t n = 0; n < want.size(); ++n) {
    difference += (got[n] - want[n]) * (got[n] - want[n]);
    size += want[n] * want[n];
  }
  if (std::isnan(difference)) return difference;
  return difference == 0 ? 0 : std::sqrt(difference / size);
}

/// A tensor's memory on the device, `shift` bytes behind an aligned address.
class OnDevice {
 public:
  OnDevice(LinearTensor& t, size_t shift) : host_(t), shift_(shift), memory_(bytes()) {
    memory_.write(t.memory, static_cast<int64_t>(shift));
  }
  TensorView view() const {
    TensorView v = host_.view;
    v.data = memory_.data + shift_;
    return v;
  }
  void fetch() {
    const std::vector<std::byte> all = memory_.read();
    std::copy(all.begin() + static_cast<std::ptrdiff_t>(shift_), all.end(), host_.memory.begin());
  }

 private:
  size_t bytes() const { return host_.memory.size() + shift_; }
  LinearTensor& host_;
  size_t shift_;
  Array<std::byte> memory_;
};

/// Forward and backward through the public calls. Lists go to the device as they are.
LinearAnswer run(LinearProblem& x, size_t shift = 0, bool with_lists = true,
                 bool with_dnorm = true) {
  LinearForwardArgs f = x.forward_args();
  LinearBackwardArgs b = x.backward_args();
  OnDevice q(x.q, shift), k(x.k, shift), v(x.v, shift), dout(x.dout, shift), o(x.o, shift),
      dq(x.dq, shift), dk(x.dk, shift), dv(x.dv, shift);
  const Array<float> norm(x.norm), dnorm(x.dnorm);
  const Array<int32_t> index(x.index), count(x.count);
  const auto fill = [&](LinearArgs& a) {
    a.device = Device::cuda;
    a.q = q.view(), a.k = k.view(), a.v = v.view();
    a.excluded.index = index.data, a.excluded.count = count.data, a.excluded.on_device = true;
    if (!with_lists) a.excluded = {};
  };
  fill(f), fill(b);
  f.o = o.view(), f.norm.data = norm.data;
  b.dout = dout.view(), b.dq = dq.view(), b.dk = dk.view(), b.dv = dv.view();
  b.dnorm.data = with_dnorm ? dnorm.data : nullptr;
  const auto call = [](auto& args, auto&& function) {
    const Array<std::byte> workspace(
        std::vector<std::byte>(workspace_size(args) + 1, std::byte{0x7f}));
    args.workspace = workspace.data + 1, args.workspace_bytes = workspace.count - 1;
    function(args);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  call(f, [](const LinearForwardArgs& a) { linear_forward(a); });
  call(b, [](const LinearBackwardArgs& a) { linear_backward(a); });
  o.fetch(), dq.fetch(), dk.fetch(), dv.fetch();
  x.norm = norm.read();
  return x.results();
}

void expect_close(const LinearAnswer& got, const LinearAnswer& want, const std::string& text) {
  EXPECT_LE(error(got.o, want.o), 3e-3) << "o, " << text;
  EXPECT_LE(error(got.norm, want.norm), 1e-5) << "norm, " << text;
  EXPECT_LE(error(got.dq, want.dq), 5e-3) << "dq, " << text;
  EXPECT_LE(error(got.dk, want.dk), 5e-3) << "dk, " << text;
  EXPECT_LE(error(got.dv, want.dv), 5e-3) << "dv, " << text;
}
void expect_accurate(LinearProblem& x, size_t shift = 0) {
  const LinearAnswer got = run(x, shift);
  expect_close(got, x.exact(), x.s.text());
}

class LinearCase : public ::testing::TestWithParam<LinearSizes> {};
TEST_P(LinearCase, IsAccurate) {
  NEED_DEVICE();
  LinearProblem x(GetParam());
  expect_accurate(x);
}

/// What a mix adds to a problem: O of the sparse branch, α, and the gradients that are added.
struct Mixed {
  explicit Mixed(const LinearSizes& s, int64_t alpha_block = 128, int64_t batches = 1)
      : sparse(s, s.h, s.nq),
        dq(s, s.h, s.nq),
        dk(s, s.hk, s.nk),
        dv(s, s.hk, s.nk),
        block(alpha_block),
        rows((s.nq + alpha_block - 1) / alpha_block),
        alpha(static_cast<size_t>(batches * s.h * rows)),
        of_batch(batches > 1) {
    sparse.fill(11), dq.fill(12, 0.1f), dk.fill(13, 0.1f), dv.fill(14, 0.1f);
    testing::Random random(15);
    for (float& a : alpha) a = random.between(0.0f, 1.0f);
    alpha[0] = 1.0f;
  }
  float alpha_of(const LinearSizes& s, int64_t b, int64_t h, int64_t t) const {
    return alpha[static_cast<size_t>(((of_batch ? b : 0) * s.h + h) * rows + t / block)];
  }
  LinearTensor sparse, dq, dk, dv;
  int64_t block, rows;
  std::vector<float> alpha, dalpha;
  bool of_batch;
};

/// Of keys or values, [b, hk, d].
std::vector<float> means_of(const LinearTensor& t, const LinearSizes& s) {
  std::vector<double> sums(static_cast<size_t>(s.b * s.hk * s.d));
  t.for_each([&](int64_t at, int64_t b, int64_t h, int64_t, int64_t c) {
    sums[static_cast<size_t>((b * s.hk + h) * s.d + c)] += t.get(at);
  });
  std::vector<float> means;
  for (double sum : sums) means.push_back(static_cast<float>(sum / static_cast<double>(s.nk)));
  return means;
}

/// out, norm and the gradients of q, k and v of a call that mixes; `m` gets dα.
LinearAnswer run_mixed(LinearProblem& x, Mixed& m, bool keep_averages, size_t shift = 0,
                       bool with_means = false) {
  LinearForwardArgs f = x.forward_args();
  LinearBackwardArgs b = x.backward_args();
  OnDevice q(x.q, shift), k(x.k, shift), v(x.v, shift), dout(x.dout, shift), o(x.o, shift),
      dq(x.dq, shift), dk(x.dk, shift), dv(x.dv, shift), sparse(m.sparse, shift),
      dq_sparse(m.dq, shift), dk_sparse(m.dk, shift), dv_sparse(m.dv, shift);
  LinearTensor host_dsparse(x.s, x.s.h, x.s.nq);
  OnDevice dsparse(host_dsparse, shift);
  const int64_t pieces = (x.s.nq + 63) / 64;
  const Array<float> norm(x.norm), alpha(m.alpha),
      dalpha(std::vector<float>(m.alpha.size(), std::nanf(""))),
      parts(std::vector<float>(static_cast<size_t>(x.s.b * x.s.h * pieces), std::nanf("")));
  const Array<int32_t> index(x.index), count(x.count);
  const Array<float> k_mean(means_of(x.k, x.s)), v_mean(means_of(x.v, x.s));
  const auto fill = [&](auto& a) {
    a.device = Device::cuda;
    a.q = q.view(), a.k = k.view(), a.v = v.view();
    a.excluded.index = index.data, a.excluded.count = count.data, a.excluded.on_device = true;
    a.alpha = {alpha.data, m.of_batch ? x.s.b : 1, m.rows, m.block};
    if (with_means) a.k_mean = k_mean.data, a.v_mean = v_mean.data;
  };
  fill(f), fill(b);
  f.o = o.view(), f.norm.data = norm.data, f.sparse = sparse.view();
  const Array<std::byte> averages(averages_size(f));
  if (keep_averages)
    f.averages = averages.data, f.averages_bytes = static_cast<size_t>(averages.count);
  const auto call = [](auto& args, auto&& function) {
    const Array<std::byte> workspace(
        std::vector<std::byte>(workspace_size(args) + 1, std::byte{0x7f}));
    args.workspace = workspace.data + 1, args.workspace_bytes = workspace.count - 1;
    function(args);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  call(f, [](const LinearForwardArgs& a) { linear_forward(a); });
  MixSparseArgs s;
  s.device = Device::cuda;
  s.sparse = sparse.view(), s.dout = dout.view(), s.dsparse = dsparse.view();
  s.alpha = f.alpha, s.norm = f.norm, s.parts = parts.data;
  mix_sparse_backward(s);
  b.dnorm = {};
  b.dout = dout.view(), b.dq = dq.view(), b.dk = dk.view(), b.dv = dv.view();
  b.dq_sparse = dq_sparse.view(), b.dk_sparse = dk_sparse.view(), b.dv_sparse = dv_sparse.view();
  b.alpha_parts = parts.data, b.dalpha = dalpha.data;
  b.averages = f.averages, b.averages_bytes = f.averages_bytes;
  call(b, [](const LinearBackwardArgs& a) { linear_backward(a); });
  o.fetch(), dq.fetch(), dk.fetch(), dv.fetch(), dsparse.fetch();
  x.norm = norm.read(), m.dalpha = dalpha.read();
  // What goes to the sparse branch.
  host_dsparse.for_each([&](int64_t at, int64_t i, int64_t h, int64_t t, int64_t) {
    const bool left = x.norm[static_cast<size_t>((i * x.s.h + h) * x.s.nq + t)] != 0.0f;
    const double want = x.dout.get(at) * (left ? double{m.alpha_of(x.s, i, h, t)} : 1.0);
    ASSERT_NEAR(host_dsparse.get(at), want, 5e-3 * std::fabs(want) + 1e-6);
  });
  return x.results();
}

void expect_mixed(const LinearSizes& sizes, Mixed& m, bool keep_averages, size_t shift = 0,
                  bool with_means = false) {
  LinearProblem x(sizes);
  const LinearAnswer got = run_mixed(x, m, keep_averages, shift, with_means);
  const std::string text = (keep_averages ? "kept, " : "made again, ") + sizes.text();
  // The answer is that of a linear branch that gets (1 − α)·dO, in floating point.
  LinearSizes wide = sizes;
  wide.dtype = Dtype::f32;
  LinearProblem twin(wide);
  const auto copy = [](LinearTensor& to, const LinearTensor& from) {
    to.for_each([&](int64_t at, auto...) { to.set(at, static_cast<float>(from.get(at))); });
  };
  copy(twin.q, x.q), copy(twin.k, x.k), copy(twin.v, x.v);
  std::fill(twin.dnorm.begin(), twin.dnorm.end(), 0.0f);
  twin.dout.for_each([&](int64_t at, int64_t b, int64_t h, int64_t t, int64_t) {
    twin.dout.set(at, static_cast<float>(x.dout.get(at)) * (1.0f - m.alpha_of(sizes, b, h, t)));
  });
  LinearAnswer want = twin.exact();
  std::vector<double> dalpha(m.alpha.size(), 0.0);
  size_t n = 0;
  m.sparse.for_each([&](int64_t at, int64_t b, int64_t h, int64_t t, int64_t) {
    const bool left = want.norm[static_cast<size_t>((b * sizes.h + h) * sizes.nq + t)] != 0;
    const double alpha = left ? double{m.alpha_of(sizes, b, h, t)} : 1.0, s = m.sparse.get(at);
    if (left)
      dalpha[static_cast<size_t>(((m.of_batch ? b : 0) * sizes.h + h) * m.rows + t / m.block)] +=
          x.dout.get(at) * (s - want.o[n]);
    want.o[n] = alpha * s + (1 - alpha) * want.o[n];
    ++n;
  });
  const auto add = [](std::vector<double>& to, const LinearTensor& from) {
    size_t i = 0;
    from.for_each([&](int64_t at, auto...) { to[i++] += from.get(at); });
  };
  add(want.dq, m.dq), add(want.dk, m.dk), add(want.dv, m.dv);
  expect_close(got, want, text);
  EXPECT_LE(error({m.dalpha.begin(), m.dalpha.end()}, dalpha), 3e-3) << text;
}

TEST_P(LinearCase, MixesAndAddsUp) {
  NEED_DEVICE();
  for (bool keep_averages : {false, true}) {
    Mixed m(GetParam());
    expect_mixed(GetParam(), m, keep_averages);
  }
}

constexpr Dtype kBf16 = Dtype::bf16, kF16 = Dtype::f16;

// Few and small: tools/gpu_check runs them under every tool of compute-sanitizer.
INSTANTIATE_TEST_SUITE_P(
    Sanitized, LinearCase,
    ::testing::Values(LinearSizes{.nq = 130, .nk = 200, .d = 64, .dtype = kBf16},
                      LinearSizes{.h = 2, .hk = 1, .nq = 70, .nk = 150, .d = 128, .dtype = kF16}));
// Every kernel once.
INSTANTIATE_TEST_SUITE_P(
    Every, LinearCase,
    ::testing::Values(LinearSizes{.h = 1, .nq = 70, .nk = 70, .d = 64, .share = 0, .dtype = kBf16},
                      LinearSizes{.h = 1, .nq = 70, .nk = 70, .d = 128, .share = 0, .dtype = kBf16},
                      LinearSizes{.h = 1, .nq = 70, .nk = 70, .d = 64, .share = 0, .dtype = kF16},
                      LinearSizes{
                          .h = 1, .nq = 70, .nk = 70, .d = 128, .share = 0, .dtype = kF16}));
INSTANTIATE_TEST_SUITE_P(
    Linear, LinearCase,
    ::testing::Values(
        LinearSizes{.nq = 300, .nk = 1000, .d = 64, .share = 0.03, .dtype = kBf16},
        LinearSizes{.nq = 300, .nk = 1000, .d = 64, .share = 0.9, .dtype = kF16, .spread = 2.0f},
        LinearSizes{.nq = 200, .nk = 300, .d = 128, .dtype = kBf16, .mean_free_keys = false},
        // More blocks than 32, by queries and by keys: several words of bits.
        LinearSizes{.h = 1, .nq = 130, .nk = 4600, .d = 64, .share = 0.3, .dtype = kBf16},
        LinearSizes{.h = 1, .nq = 4600, .nk = 130, .d = 64, .share = 0.3, .dtype = kBf16},
        LinearSizes{.h = 6,
                    .hk = 2,
                    .nq = 270,
                    .nk = 650,
                    .d = 64,
                    .share = 0.34,
                    .dtype = kBf16,
                    .block_q = 192,
                    .block_k = 128,
                    .tokens_first = true},
        LinearSizes{.b = 2,
                    .h = 2,
                    .hk = 2,
                    .nq = 129,
                    .nk = 190,
                    .d = 64,
                    .dtype = kF16,
                    .block_q = 128,
                    .block_k = 64,
                    .spread = 4.0f}));

TEST(GpuLinear, NoLists) {
  NEED_DEVICE();
  LinearProblem x({.nq = 70, .nk = 300, .d = 64, .share = 0, .dtype = kBf16});
  const LinearAnswer got = run(x, 0, false);
  expect_close(got, x.exact(), x.s.text());
}

/// Without a gradient of norms, dK passes through its own type before the mean is subtracted.
TEST(GpuLinear, NoGradientOfNorms) {
  NEED_DEVICE();
  for (Dtype dtype : {kBf16, kF16})
    for (size_t shift : {0, 2}) {
      LinearProblem x({.h = 2, .hk = 1, .nq = 200, .nk = 300, .d = 64, .dtype = dtype});
      std::fill(x.dnorm.begin(), x.dnorm.end(), 0.0f);
      const LinearAnswer got = run(x, shift, true, false);
      expect_close(got, x.exact(), "no dnorm, " + x.s.text());
    }
}

/// A gradient that is the same for all keys, but for little: dK is what is left without its mean.
TEST(GpuLinear, GradientOfNormsThatAgree) {
  NEED_DEVICE();
  LinearProblem x({.h = 1, .nq = 300, .nk = 300, .d = 64, .share = 0, .dtype = kBf16});
  std::fill(x.dnorm.begin(), x.dnorm.end(), 4.0f);
  x.k.for_each([&](int64_t at, int64_t, int64_t, int64_t, int64_t c) {
    x.k.set(at, 0.05f * static_cast<float>(x.k.get(at)) + static_cast<float>(c % 5));
  });
  x.q.for_each([&](int64_t at, int64_t, int64_t, int64_t, int64_t c) {
    x.q.set(at, static_cast<float>(x.q.get(at)) + static_cast<float>(c % 3));
  });
  const LinearAnswer got = run(x);
  EXPECT_LE(error(got.dk, x.exact().dk), 5e-3);
}

TEST(GpuLinear, TensorsWithoutAlignment) {
  NEED_DEVICE();
  for (Dtype dtype : {kBf16, kF16}) {
    LinearProblem x({.nq = 70, .nk = 100, .d = 64, .dtype = dtype});
    expect_accurate(x, 2);
  }
}

/// Lengths around blocks. What lies behind the last token has no part in anything.
TEST(GpuLinear, SeesNothingBehindTheLastToken) {
  NEED_DEVICE();
  for (auto [nq, nk] : {std::pair{1, 1}, {63, 65}, {64, 64}, {65, 127}, {129, 130}}) {
    LinearSizes sizes{.h = 1, .nq = nq, .nk = nk, .d = 64, .dtype = kBf16};
    LinearProblem clean(sizes);
    sizes.behind = 70;
    LinearProblem poisoned(sizes);
    const LinearAnswer got = run(poisoned), want = run(clean), exact = clean.exact();
    EXPECT_EQ(got.o, want.o) << sizes.text();
    EXPECT_EQ(got.norm, want.norm) << sizes.text();
    EXPECT_EQ(got.dq, want.dq) << sizes.text();
    EXPECT_EQ(got.dk, want.dk) << sizes.text();
    EXPECT_EQ(got.dv, want.dv) << sizes.text();
    EXPECT_LE(error(got.o, exact.o), 4e-3) << sizes.text();
    EXPECT_LE(error(got.dv, exact.dv), 5e-3) << sizes.text();
  }
}

TEST(GpuLinear, NothingLeftGivesZeros) {
  NEED_DEVICE();
  LinearProblem x({.nq = 70, .nk = 130, .d = 64, .share = 1.0, .dtype = kBf16});
  const LinearAnswer got = run(x);
  for (const auto* part : {&got.o, &got.norm, &got.dq, &got.dk, &got.dv})
    for (double value : *part) ASSERT_EQ(value, 0.0);
}

/// Lists on the device are not checked: what is out of range excludes nothing, a block that comes
/// twice counts once, and counts end at the width.
TEST(GpuLinear, IgnoresWhatIsOutOfRange) {
  NEED_DEVICE();
  const LinearSizes sizes{.h = 1, .nq = 70, .nk = 300, .d = 64, .share = 0.4, .dtype = kBf16};
  LinearProblem good(sizes), bad(sizes);
  ASSERT_EQ(good.width, 6);
  ASSERT_EQ(good.count[0], 2);
  const LinearAnswer want = run(good);
  const int32_t wrong[] = {-1, 5, 1 << 30, std::numeric_limits<int32_t>::min()};
  for (int64_t row = 0; row < 2; ++row) {
    int32_t* entries = bad.index.data() + row * 6;
    for (int e = 2; e < 6; ++e) entries[e] = e == 4 ? entries[0] : wrong[e - 2];
    bad.count[row] = 1 << 30;
  }
  const LinearAnswer got = run(bad);
  EXPECT_EQ(got.o, want.o);
  EXPECT_EQ(got.norm, want.norm);
  EXPECT_EQ(got.dq, want.dq);
  EXPECT_EQ(got.dk, want.dk);
  EXPECT_EQ(got.dv, want.dv);
  for (int32_t& count : bad.count) count = -7;
  LinearProblem all({.h = 1, .nq = 70, .nk = 300, .d = 64, .share = 0, .dtype = kBf16});
  EXPECT_EQ(run(bad).o, run(all).o);
}

/// Only block 0 has keys with much of channel 0, where all queries look. Without it, a 1e-12th of
/// the total is left.
TEST(GpuLinear, ExcludedBlocksMayHoldNearlyEverything) {
  NEED_DEVICE();
  LinearProblem x({.h = 1,
                   .nq = 64,
                   .nk = 320,
                   .d = 64,
                   .share = 0.2,
                   .dtype = kBf16,
                   .mean_free_keys = false});
  for (int32_t& block : x.index) block = 0;
  x.k.for_each([&](int64_t at, int64_t, int64_t, int64_t t, int64_t c) {
    if (c == 0) x.k.set(at, t < 64 ? 20.0f : -26.0f);
  });
  x.q.for_each([&](int64_t at, int64_t, int64_t, int64_t, int64_t c) {
    if (c == 0) x.q.set(at, 90.0f);
  });
  // Features this close to one-hot leave nothing of dq in FP32.
  const LinearAnswer got = run(x), want = x.exact();
  EXPECT_LE(error(got.o, want.o), 3e-3);
  EXPECT_LE(error(got.norm, want.norm), 1e-5);
  EXPECT_LE(error(got.dv, want.dv), 5e-3);
}

/// Queries and keys in clusters, and lists that have the blocks of the own one: little is left.
TEST(GpuLinear, ClusteredQueries) {
  NEED_DEVICE();
  for (double share : {0.5, 0.1}) {
    LinearProblem x({.h = 1, .nq = 256, .nk = 1024, .d = 64, .share = share, .dtype = kBf16});
    const int64_t blocks = x.key_blocks();
    std::vector<float> centre(8 * 64);
    testing::Random random(7);
    for (float& c : centre) c = random.between(-7.0f, 7.0f);
    const auto move = [&](LinearTensor& t, int64_t tokens) {
      t.for_each([&](int64_t at, int64_t, int64_t, int64_t n, int64_t c) {
        t.set(at, static_cast<float>(t.get(at)) + centre[n * 8 / tokens * 64 + c]);
      });
    };
    move(x.q, x.s.nq), move(x.k, x.s.nk);
    for (int64_t i = 0; i < x.rows(); ++i)
      for (int64_t e = 0; e < x.count[i]; ++e)
        x.index[i * x.width + e] = static_cast<int32_t>((i * blocks / x.rows() + e) % blocks);
    const LinearAnswer got = run(x);
    expect_close(got, x.exact(), "clustered, " + x.s.text());
  }
}

/// A mean of V or dO that is large beside what differs between tokens.
TEST(GpuLinear, LargeMeans) {
  NEED_DEVICE();
  LinearProblem x({.h = 1, .nq = 1000, .nk = 1000, .d = 64, .share = 0.1, .dtype = kBf16});
  for (LinearTensor* t : {&x.v, &x.dout})
    t->for_each([&](int64_t at, int64_t, int64_t, int64_t, int64_t) {
      t->set(at, static_cast<float>(t->get(at)) + 4.0f);
    });
  for (float& dn : x.dnorm) dn = 0;
  expect_accurate(x);
}

/// Values far from one, in all tensors.
TEST(GpuLinear, AnyMagnitude) {
  NEED_DEVICE();
  for (int power : {-60, 120}) {
    LinearProblem x({.h = 1, .nq = 130, .nk = 200, .d = 64, .share = 0.4, .dtype = kBf16});
    for (LinearTensor* t : {&x.v, &x.dout})
      t->for_each([&](int64_t at, int64_t, int64_t, int64_t, int64_t) {
        t->set(at, std::ldexp(static_cast<float>(t->get(at)), t == &x.v ? power : -power / 2));
      });
    for (float& dn : x.dnorm) dn = std::ldexp(dn, power / 2);
    expect_accurate(x);
  }
}

TEST(GpuLinear, ExcludedNansReachNothing) {
  NEED_DEVICE();
  for (float value : {std::nanf(""), INFINITY}) {
    LinearProblem clean({.h = 1,
                         .nq = 64,
                         .nk = 320,
                         .d = 64,
                         .share = 0.4,
                         .dtype = kBf16,
                         .mean_free_keys = false});
    LinearProblem x(clean.s);
    for (LinearTensor* t : {&x.k, &x.v})
      t->for_each([&](int64_t at, int64_t, int64_t, int64_t n, int64_t) {
        if (clean.excludes(0, 0, 0, n / 64)) t->set(at, value);
      });
    const LinearAnswer got = run(x), want = clean.exact();
    EXPECT_LE(error(got.o, want.o), 3e-3);
    EXPECT_LE(error(got.norm, want.norm), 1e-5);
    EXPECT_LE(error(got.dq, want.dq), 5e-3);
  }
  // The other way: a query that has NaN, and the keys that it excludes.
  LinearProblem clean({.h = 1,
                       .nq = 128,
                       .nk = 192,
                       .d = 64,
                       .share = 0.34,
                       .dtype = kBf16,
                       .mean_free_keys = false});
  clean.index[0] = 1, clean.index[4] = 2;
  LinearProblem x(clean.s);
  x.index = clean.index;
  x.dout.set(3, std::nanf(""));
  const LinearAnswer got = run(x), want = clean.exact();
  for (int64_t n = 0; n < 192 * 64; ++n) ASSERT_EQ(std::isnan(got.dk[n]), n / 4096 != 1) << n;
  const auto second = [](const std::vector<double>& all) {
    return std::vector<double>(all.begin() + 4096, all.begin() + 8192);
  };
  EXPECT_LE(error(second(got.dk), second(want.dk)), 5e-3);
  EXPECT_LE(error(second(got.dv), second(want.dv)), 5e-3);
}

TEST(GpuLinear, NansThatAreSeenStay) {
  NEED_DEVICE();
  LinearProblem x({.h = 1, .nq = 64, .nk = 128, .d = 64, .share = 0.0, .dtype = kBf16});
  x.v.set(5, std::nanf(""));
  const LinearAnswer got = run(x);
  for (int64_t r = 0; r < 64; ++r)
    for (int64_t c = 0; c < 64; ++c) ASSERT_EQ(std::isnan(got.o[r * 64 + c]), c == 5) << r;
}

/// Results depend neither on the rest of the batch nor on how many heads are worked on at once.
/// More blocks than a thread block has bits of at once, by queries and by keys. (Too slow for the
/// emulator's everyday list.)
TEST(GpuLinearLong, ManyBlocks) {
  NEED_DEVICE();
  for (auto [nq, nk] : {std::pair{130, 66000}, {66000, 130}}) {
    LinearProblem x({.h = 1, .nq = nq, .nk = nk, .d = 64, .share = 0.3, .dtype = kBf16});
    expect_accurate(x);
  }
}

/// Long sequences: a thread block takes several blocks of tokens.
TEST(GpuLinear, SameBitsFromFewerThreadBlocks) {
  NEED_DEVICE();
  struct Small {
    int64_t before = std::exchange(cuda::sla2::linear::many_pieces, 1);
    ~Small() { cuda::sla2::linear::many_pieces = before; }
  };
  const LinearSizes cases[] = {
      {.h = 2, .hk = 1, .nq = 390, .nk = 650, .d = 64, .dtype = kBf16, .block_q = 128},
      {.h = 1, .nq = 200, .nk = 460, .d = 128, .dtype = kF16, .block_q = 192, .block_k = 128}};
  for (const LinearSizes& sizes : cases) {
    LinearProblem x(sizes), again(sizes);
    const LinearAnswer want = run(x);
    const Small small;
    const LinearAnswer got = run(again);
    for (auto part : {&LinearAnswer::o, &LinearAnswer::norm, &LinearAnswer::dq, &LinearAnswer::dk,
                      &LinearAnswer::dv})
      EXPECT_EQ(got.*part, want.*part) << sizes.text();
  }
}

TEST(GpuLinear, SameBitsInAnyCompany) {
  NEED_DEVICE();
  const LinearSizes sizes{.b = 2, .h = 2, .hk = 1, .nq = 70, .nk = 130, .d = 64, .dtype = kBf16};
  LinearProblem x(sizes), again(sizes);
  const LinearAnswer whole = run(x);
  struct Small {
    int64_t before = std::exchange(cuda::sla2::linear::most_bytes, 1);
    ~Small() { cuda::sla2::linear::most_bytes = before; }
  } small;
  const LinearAnswer parts = run(again);
  LinearSizes first = sizes;
  first.b = 1;
  LinearProblem alone(first);  // the same numbers, without the second batch entry
  const LinearAnswer one = run(alone);
  for (auto part : {&LinearAnswer::o, &LinearAnswer::norm, &LinearAnswer::dq, &LinearAnswer::dk,
                    &LinearAnswer::dv}) {
    EXPECT_EQ(whole.*part, parts.*part);
    EXPECT_TRUE(std::equal((one.*part).begin(), (one.*part).end(), (whole.*part).begin()));
  }
}

TEST(GpuLinear, FormsOfAlpha) {
  NEED_DEVICE();
  const LinearSizes sizes{.b = 2, .h = 2, .hk = 1, .nq = 200, .nk = 200, .d = 64, .dtype = kBf16};
  for (auto [block, batches] : {std::pair{64, 2}, {256, 1}, {1 << 20, 2}}) {
    Mixed m(sizes, block, batches);
    expect_mixed(sizes, m, true);
  }
  Mixed m(sizes);
  expect_mixed(sizes, m, true, 2);  // tensors without alignment
  std::fill(m.alpha.begin(), m.alpha.end(), 1.0f);
  expect_mixed(sizes, m, true);
}

/// With means that the caller has, and heads that are worked on one at a time.
TEST(GpuLinear, TakesMeansOfTheCaller) {
  NEED_DEVICE();
  struct Small {
    int64_t before = std::exchange(cuda::sla2::linear::most_bytes, 1);
    ~Small() { cuda::sla2::linear::most_bytes = before; }
  } small;
  LinearSizes sizes{.b = 2, .h = 4, .hk = 2, .nq = 150, .nk = 130, .d = 64, .dtype = kBf16};
  for (bool mean_free_keys : {true, false})
    for (bool keep_averages : {true, false}) {
      sizes.mean_free_keys = mean_free_keys;
      Mixed m(sizes);
      expect_mixed(sizes, m, keep_averages, 0, true);
    }
}

/// Where no key is left, the output is that of the sparse branch, and so are the gradients.
TEST(GpuLinear, MixesWhereNothingIsLeft) {
  NEED_DEVICE();
  const LinearSizes sizes{.nq = 70, .nk = 130, .d = 64, .share = 1.0, .dtype = kBf16};
  LinearProblem x(sizes);
  Mixed m(sizes);
  const LinearAnswer got = run_mixed(x, m, true);
  EXPECT_EQ(got.o, m.sparse.values());
  EXPECT_EQ(got.dq, m.dq.values());
  EXPECT_EQ(got.dk, m.dk.values());
  EXPECT_EQ(got.dv, m.dv.values());
  for (float d : m.dalpha) EXPECT_EQ(d, 0.0f);
}

/// What is kept gives the bits of what is made again, however many heads are worked on at once.
TEST(GpuLinear, SameBitsFromAverages) {
  NEED_DEVICE();
  const LinearSizes sizes{.b = 2, .h = 4, .hk = 2, .nq = 150, .nk = 130, .d = 64, .dtype = kBf16};
  LinearProblem made(sizes), kept(sizes), parts(sizes);
  Mixed a(sizes), b(sizes), c(sizes);
  const LinearAnswer want = run_mixed(made, a, false), got = run_mixed(kept, b, true);
  struct Small {
    int64_t before = std::exchange(cuda::sla2::linear::most_bytes, 1);
    ~Small() { cuda::sla2::linear::most_bytes = before; }
  } small;
  const LinearAnswer few = run_mixed(parts, c, true);
  for (auto part : {&LinearAnswer::o, &LinearAnswer::norm, &LinearAnswer::dq, &LinearAnswer::dk,
                    &LinearAnswer::dv}) {
    EXPECT_EQ(got.*part, want.*part);
    EXPECT_EQ(few.*part, want.*part);
  }
  EXPECT_EQ(a.dalpha, b.dalpha);
  EXPECT_EQ(a.dalpha, c.dalpha);
}

TEST(GpuLinear, EmptyProblems) {
  NEED_DEVICE();
  LinearProblem no_keys({.nq = 70, .nk = 0, .d = 64, .dtype = kBf16});
  const LinearAnswer a = run(no_keys);
  for (const auto* part : {&a.o, &a.norm, &a.dq})
    for (double value : *part) ASSERT_EQ(value, 0.0);
  LinearProblem no_queries({.nq = 0, .nk = 70, .d = 64, .dtype = kBf16});
  const LinearAnswer b = run(no_queries);
  for (const auto* part : {&b.dk, &b.dv})
    for (double value : *part) ASSERT_EQ(value, 0.0);
}

TEST(GpuLinear, DeclinesWithAReason) {
  NEED_DEVICE();
  const auto refusal = [](const LinearSizes& sizes) -> std::string {
    LinearProblem x(sizes);
    try {
      run(x);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_NE(refusal({.d = 64, .dtype = Dtype::f32}).find("bf16 and f16, not f32"),
            std::string::npos);
  EXPECT_NE(refusal({.d = 96, .dtype = kBf16}).find("head dims 64 and 128"), std::string::npos);
}

/// Who pins an implementation gets it or an error, with the reason of each.
TEST(GpuLinear, PinnedImplementationsThatHaveNoLinearBranch) {
  NEED_DEVICE();
  LinearProblem x({.d = 64, .dtype = kBf16});
  LinearForwardArgs args = x.forward_args();
  args.device = Device::cuda, args.excluded = {};
  EXPECT_EQ(refusal(args), "");
  for (const char* name : {"cuda-sm90", "cuda-plain"}) {
    setenv("SAGEBWD_IMPL", name, 1);
    const std::string reasons = refusal(args);
    unsetenv("SAGEBWD_IMPL");
    EXPECT_NE(reasons.find(std::string("\n  ") + name + ": has no linear branch"),
              std::string::npos)
        << reasons;
    EXPECT_NE(reasons.find(std::string("\n  cuda-sm80: SAGEBWD_IMPL pins ") + name),
              std::string::npos)
        << reasons;
  }
}

/// Bits of the linear branch, mixing and alone (support/digest.h).
TEST(GpuDigest, LinearBits) {
  NEED_DEVICE();
  testing::DigestFile file;
  if (!file.wanted()) GTEST_SKIP() << "SAGEBWD_DIGEST names no file";
  for (int64_t number = 0; number < file.count(); ++number) {
    const LinearSizes sizes = testing::random_linear_sizes(number, true);
    const auto write = [&](const char* kind, const LinearAnswer& a,
                           const std::vector<float>& dalpha) {
      file.line(std::string("linear ") + kind + " | " + sizes.text(), a.o, a.norm, a.dq, a.dk, a.dv,
                dalpha);
    };
    const size_t shift = number % 3 == 0 ? 2 : 0;
    LinearProblem alone(sizes);
    write("alone", run(alone, shift, true, number % 2 == 0), {});
    LinearProblem x(sizes);
    Mixed m(sizes);
    const LinearAnswer mixed = run_mixed(x, m, number % 2 == 0, shift, number % 5 == 0);
    write("mixed", mixed, m.dalpha);
  }
}

}  // namespace
}  // namespace sagebwd::gpu
