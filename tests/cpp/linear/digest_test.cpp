// SPDX-License-Identifier: Apache-2.0
// Bits of the linear branch and of what stands around the branches (support/digest.h).
#include "support/digest.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "linear/linear_cases.h"
#include "linear/linear_problem.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

template <typename Args, typename F>
void with_workspace(LinearProblem& problem, Args args, F&& call) {
  problem.give_workspace(args, workspace_size(args));
  call(args);
}

TEST(Digest, LinearBits) {
  DigestFile file;
  if (!file.wanted()) GTEST_SKIP() << "SAGEBWD_DIGEST names no file";
  for (const dispatch::Implementation* impl : available_production()) {
    setenv("SAGEBWD_IMPL", impl->name, 1);
    for (int64_t number = 0; number < file.count(); ++number) {
      LinearProblem x(random_linear_sizes(number), static_cast<uint64_t>(number));
      with_workspace(x, x.forward_args(), [](const LinearForwardArgs& a) { linear_forward(a); });
      with_workspace(x, x.backward_args(), [](const LinearBackwardArgs& a) { linear_backward(a); });
      const LinearAnswer got = x.results();
      file.line(impl->name + (" | linear " + x.s.text()), got.o, got.norm, got.dq, got.dk, got.dv);
    }
  }
  unsetenv("SAGEBWD_IMPL");
}

/// q is the sparse branch's output here, o the linear branch's, and dout the gradient of their mix.
TEST(Digest, MixBits) {
  DigestFile file;
  if (!file.wanted()) GTEST_SKIP() << "SAGEBWD_DIGEST names no file";
  for (int64_t number = 0; number < file.count(); ++number) {
    LinearProblem x(random_linear_sizes(number), static_cast<uint64_t>(number));
    x.o.fill(7);
    const int64_t block = number % 3 == 0 ? 1 : 64 * (number % 3),
                  rows = (x.s.nq + block - 1) / block;
    std::vector<float> alpha(static_cast<size_t>(x.s.h * rows)), dalpha(alpha.size());
    Random random(static_cast<uint64_t>(number));
    for (float& a : alpha) a = random.between(0.0f, 1.0f);
    LinearTensor out(x.s, x.s.h, x.s.nq), dsparse(x.s, x.s.h, x.s.nq), dlinear(x.s, x.s.h, x.s.nq);
    const auto fill = [&](MixArgs& a) {
      a.sparse = x.q.at(), a.linear = x.o.at();
      a.alpha = {.data = alpha.data(), .batches = 1, .rows = rows, .block = block};
    };
    MixForwardArgs f;
    fill(f);
    f.out = out.at();
    mix_forward(f);
    MixBackwardArgs b;
    fill(b);
    b.dout = x.dout.at(), b.dsparse = dsparse.at(), b.dlinear = dlinear.at();
    b.dalpha = dalpha.data();
    std::vector<float> space(workspace_size(b) / sizeof(float) + 1);
    b.workspace = space.data(), b.workspace_bytes = space.size() * sizeof(float);
    mix_backward(b);
    const auto blocks = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
    BlockMeansArgs m;
    m.q = x.q.at(), m.k = x.k.at(), m.mean_free_keys = x.s.mean_free_keys;
    std::vector<float> q_means(static_cast<size_t>(x.s.b * x.s.h * blocks(x.s.nq, 128) * x.s.d)),
        k_means(static_cast<size_t>(x.s.b * x.s.hk * blocks(x.s.nk, 64) * x.s.d));
    m.q_means = q_means.data(), m.k_means = k_means.data();
    std::vector<float> raw(workspace_size(m) / sizeof(float) + 1);
    m.workspace = raw.data(), m.workspace_bytes = raw.size() * sizeof(float);
    block_means(m);
    file.line("mix " + x.s.text(), out.values(), dsparse.values(), dlinear.values(), dalpha,
              q_means, k_means);
  }
}

}  // namespace
}  // namespace sagebwd::testing
