// SPDX-License-Identifier: Apache-2.0
// What only a real device can show of cuda-plain: far addresses, and graphs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "base/half.h"
#include "device_array.h"
#include "device_case.h"

namespace sagebwd::gpu {
namespace {

/// Forward and backward of one bf16 problem [b, 1, n, d] whose batches lie `batch` elements apart:
/// q, k, v, dout behind one another in `in`, o, dq, dk, dv in `out`.
struct FourInFourOut {
  static constexpr int64_t n = 100, d = 64, size = n * d;
  FourInFourOut(int64_t batch, int64_t b, const Recipe& recipe = {})
      : in(static_cast<size_t>(batch * (b - 1) + 4 * size)),
        out(static_cast<size_t>(4 * b * size)),
        lse(static_cast<size_t>(b * n)) {
    for (int64_t t = 0; t < b; ++t) {
      std::vector<uint16_t> x(static_cast<size_t>(4 * size));
      for (size_t i = 0; i < x.size(); ++i)
        x[i] =
            from_float<bf16>(std::sin(static_cast<float>(i % 7919) + 31.0f * static_cast<float>(t)))
                .bits;
      in.write(x, t * batch);
    }
    const auto input = [&](int64_t slot) {
      return TensorView{in.data + slot * size, Dtype::bf16, {b, 1, n, d}, {batch, size, d, 1}};
    };
    const auto output = [&](int64_t slot) {
      return contiguous(out.data + slot * b * size, Dtype::bf16, {b, 1, n, d});
    };
    f.device = Device::cuda;
    f.q = input(0), f.k = input(1), f.v = input(2), f.o = output(0);
    f.lse = contiguous_stats(lse.data, 1, n);
    f.recipe = recipe;
    static_cast<AttentionArgs&>(g) = f;
    g.dout = input(3), g.dq = output(1), g.dk = output(2), g.dv = output(3);
    setenv("SAGEBWD_IMPL", "cuda-plain", 1);
    workspace = std::make_unique<Array<std::byte>>(std::max(workspace_size(f), workspace_size(g)));
    f.workspace = g.workspace = workspace->data;
    f.workspace_bytes = g.workspace_bytes = workspace->count;
  }
  ~FourInFourOut() { unsetenv("SAGEBWD_IMPL"); }
  /// The forward leaves its codes, and the backward takes them.
  void save_codes() {
    codes = std::make_unique<Array<std::byte>>(codes_size(f));
    f.codes = g.codes = codes->data, f.codes_bytes = g.codes_bytes = codes->count;
    g.q.data = g.k.data = g.v.data = nullptr;
    workspace = std::make_unique<Array<std::byte>>(std::max(workspace_size(f), workspace_size(g)));
    f.workspace = g.workspace = workspace->data;
    f.workspace_bytes = g.workspace_bytes = workspace->count;
  }
  void run(cudaStream_t stream) {
    f.stream = g.stream = stream;
    forward(f);
    backward(g);
  }
  Array<uint16_t> in, out;
  Array<float> lse;
  std::unique_ptr<Array<std::byte>> workspace, codes;
  ForwardArgs f;
  BackwardArgs g;
};

TEST(Plain, BatchesFarApart) {
  NEED_DEVICE();
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < size_t{5} << 30) GTEST_SKIP() << "needs 5 GiB of device memory";
  FourInFourOut near(4 * FourInFourOut::size, 2);
  near.run(nullptr);
  FourInFourOut far((int64_t{1} << 31) + 64, 2);
  far.run(nullptr);
  EXPECT_TRUE(near.out.read() == far.out.read());
}

/// With saved codes, which change no bit.
TEST(Plain, CapturedIntoAGraph) {
  NEED_DEVICE();
  Recipe recipe;
  recipe.rounding = Rounding::dither;
  FourInFourOut direct(4 * FourInFourOut::size, 3, recipe),
      replayed(4 * FourInFourOut::size, 3, recipe);
  replayed.save_codes();
  direct.run(nullptr);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  replayed.run(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(cudaMemset(replayed.out.data, 0x7f, replayed.out.count * 2), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(ready, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(direct.out.read() == replayed.out.read());
  }
  cudaGraphExecDestroy(ready), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace sagebwd::gpu
