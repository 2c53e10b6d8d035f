// SPDX-License-Identifier: Apache-2.0
// Times forward and backward, everything included (means, quantisation, copies), with device
// events.
//
//   gpu_bench [--deterministic] [--partial] [--codes] [--linear] [--sustained] [case …]
//   e.g. gpu_bench "b8 h16 n4096 d128 causal bf16 vectorwise"
//
// --partial: the backward of a call that sees a part of the keys.
// --linear: the linear branch, over what the lists of the case leave out.
// --codes: the forward saves its codes, and the backward takes them instead of q, k and v.
// --sustained: also forward and backward in turn for a second and a half, at the clock that the
// power limit leaves. One line per case: median milliseconds of 20 runs and TF/s of 4·N²·d per head
// forward, 2.5 times that backward. With block lists (keep=0.1, lists=random or diagonal) only
// listed pairs count.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "sagebwd/sagebwd.hpp"
#include "spec/attn_case.h"
#include "trace/lists.h"

namespace {

using namespace sagebwd;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

void* device(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, std::max<size_t>(bytes, 1)));
  return p;
}

/// bf16 or f16 Gaussian values: one random megabyte, repeated.
void* gaussian(int64_t elements, Dtype dtype, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> block(1 << 20);
  for (uint16_t& x : block) {
    const float v = normal(rng);
    if (dtype == Dtype::bf16) {
      uint32_t u;
      std::memcpy(&u, &v, 4);
      x = static_cast<uint16_t>((u + 0x8000u) >> 16);
    } else {
      const _Float16 h = static_cast<_Float16>(v);
      std::memcpy(&x, &h, 2);
    }
  }
  auto* p = static_cast<uint16_t*>(device(static_cast<size_t>(elements) * 2));
  for (int64_t at = 0; at < elements; at += 1 << 20)
    check(cudaMemcpy(p + at, block.data(),
                     static_cast<size_t>(std::min<int64_t>(1 << 20, elements - at)) * 2,
                     cudaMemcpyHostToDevice));
  return p;
}

const int32_t* on_device(const std::vector<int32_t>& x) {
  void* p = device(x.size() * 4);
  check(cudaMemcpy(p, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
  return static_cast<const int32_t*>(p);
}

template <typename F>
double median_ms(F f) {
  cudaEvent_t a, b;
  check(cudaEventCreate(&a));
  check(cudaEventCreate(&b));
  for (int i = 0; i < 3; ++i) f();
  std::vector<float> times;
  for (int i = 0; i < 20; ++i) {
    float ms = 0;
    check(cudaEventRecord(a, nullptr));
    f();
    check(cudaEventRecord(b, nullptr));
    check(cudaEventSynchronize(b));
    check(cudaEventElapsedTime(&ms, a, b));
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// Milliseconds of a call among many behind one another: the mean of the last third of a second
/// and a half.
template <typename F>
double sustained_ms(F f, double about_ms) {
  const int calls = std::max(2, static_cast<int>(500.0 / about_ms));
  cudaEvent_t a, b;
  check(cudaEventCreate(&a));
  check(cudaEventCreate(&b));
  for (int i = 0; i < 2 * calls; ++i) f();
  check(cudaEventRecord(a, nullptr));
  for (int i = 0; i < calls; ++i) f();
  check(cudaEventRecord(b, nullptr));
  check(cudaEventSynchronize(b));
  float ms = 0;
  check(cudaEventElapsedTime(&ms, a, b));
  return ms / calls;
}

void run(const std::string& text, bool deterministic, bool partial, bool codes, bool sustained) {
  const spec::AttnCase c = spec::AttnCase::parse(text);
  ForwardArgs f;
  f.device = Device::cuda;
  f.q = c.q_view(gaussian(c.q_elements(), c.dtype, 1)),
  f.k = c.k_view(gaussian(c.k_elements(), c.dtype, 2));
  f.v = c.v_view(gaussian(c.v_elements(), c.dtype, 3));
  const auto bytes = [](int64_t elements) { return static_cast<size_t>(elements) * 2; };
  f.o = c.o_view(device(bytes(c.o_elements())));
  f.lse = contiguous_stats(static_cast<float*>(device(static_cast<size_t>(c.b * c.h * c.nq) * 4)),
                           c.h, c.nq);
  f.mask = c.mask, f.recipe = c.recipe;
  f.scale = c.scale, f.softcap = c.softcap;
  const trace::Lists lists = trace::make_lists(c, {});
  if (c.has_lists()) {
    f.blocks = lists.shape;
    f.blocks.on_device = true;
    f.blocks.index = on_device(lists.index), f.blocks.count = on_device(lists.count);
  }
  if (codes) f.codes_bytes = codes_size(f), f.codes = device(f.codes_bytes);
  BackwardArgs g;
  static_cast<AttentionArgs&>(g) = f;
  g.deterministic = deterministic, g.partial_kv = partial;
  g.dout = c.o_view(gaussian(c.o_elements(), c.dtype, 4));
  g.dq = c.q_view(device(bytes(c.q_elements())));
  g.dk = c.k_view(device(bytes(c.k_elements())));
  g.dv = c.v_view(device(bytes(c.v_elements())));
  f.workspace_bytes = workspace_size(f), f.workspace = device(f.workspace_bytes);
  g.workspace_bytes = workspace_size(g), g.workspace = device(g.workspace_bytes);

  const double fwd = median_ms([&] { forward(f); }), bwd = median_ms([&] { backward(g); });
  spec::Problem on_host = c.problem();
  on_host.blocks = lists.view();
  const int64_t pairs =
      c.has_lists() ? spec::count_listed_pairs(on_host).all : c.visible_pairs() * c.b * c.h;
  const double one = 2.0 * static_cast<double>(pairs), of_d = one * static_cast<double>(c.d),
               of_dv = one * static_cast<double>(c.value_dim());
  const double flops = of_d + of_dv, flops_back = 3 * of_d + 2 * of_dv;
  std::printf("%-58s fwd %8.3f ms %6.0f TF/s  bwd %8.3f ms %6.0f TF/s  sum %8.3f ms %6.0f TF/s\n",
              text.c_str(), fwd, flops / fwd * 1e-9, bwd, flops_back / bwd * 1e-9, fwd + bwd,
              (flops + flops_back) / (fwd + bwd) * 1e-9);
  if (sustained) {
    const auto both = [&] { forward(f), backward(g); };
    std::printf("%-58s sustained %8.3f ms\n", text.c_str(), sustained_ms(both, fwd + bwd));
  }
  std::fflush(stdout);
  for (void* p : {f.q.data, f.k.data, f.v.data, f.o.data, static_cast<void*>(f.lse.data),
                  g.dout.data, g.dq.data, g.dk.data, g.dv.data, f.workspace, g.workspace, f.codes,
                  static_cast<void*>(const_cast<int32_t*>(f.blocks.index)),
                  static_cast<void*>(const_cast<int32_t*>(f.blocks.count))})
    check(cudaFree(p));
}

/// The linear branch: its time alone, because it does much the same for any lists.
void run_linear(const std::string& text) {
  const spec::AttnCase c = spec::AttnCase::parse(text);
  LinearForwardArgs f;
  f.device = Device::cuda;
  f.q = c.q_view(gaussian(c.q_elements(), c.dtype, 1));
  f.k = c.k_view(gaussian(c.k_elements(), c.dtype, 2));
  f.v = c.k_view(gaussian(c.k_elements(), c.dtype, 3));
  const size_t q_bytes = static_cast<size_t>(c.q_elements()) * 2,
               k_bytes = static_cast<size_t>(c.k_elements()) * 2;
  const trace::Lists lists = trace::make_lists(c, {});
  if (c.has_lists()) {
    f.excluded = lists.shape;
    f.excluded.on_device = true;
    f.excluded.index = on_device(lists.index), f.excluded.count = on_device(lists.count);
  }
  LinearBackwardArgs g;
  static_cast<LinearArgs&>(g) = f;
  f.o = c.q_view(device(q_bytes));
  g.dout = c.q_view(gaussian(c.q_elements(), c.dtype, 4));
  g.dq = c.q_view(device(q_bytes)), g.dk = c.k_view(device(k_bytes)),
  g.dv = c.k_view(device(k_bytes));
  f.workspace_bytes = workspace_size(f), f.workspace = device(f.workspace_bytes);
  g.workspace_bytes = workspace_size(g), g.workspace = device(g.workspace_bytes);
  const double fwd = median_ms([&] { linear_forward(f); }),
               bwd = median_ms([&] { linear_backward(g); });
  std::printf("%-58s linear fwd %8.3f ms  bwd %8.3f ms  workspace %.0f and %.0f MB\n", text.c_str(),
              fwd, bwd, static_cast<double>(f.workspace_bytes) * 1e-6,
              static_cast<double>(g.workspace_bytes) * 1e-6);
  std::fflush(stdout);
  for (void* p :
       {f.q.data, f.k.data, f.v.data, f.o.data, g.dout.data, g.dq.data, g.dk.data, g.dv.data,
        f.workspace, g.workspace, static_cast<void*>(const_cast<int32_t*>(f.excluded.index)),
        static_cast<void*>(const_cast<int32_t*>(f.excluded.count))})
    check(cudaFree(p));
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> cases(argv + 1, argv + argc);
  const auto asked = [&](const char* option) { return std::erase(cases, option) > 0; };
  const bool deterministic = asked("--deterministic"), partial = asked("--partial"),
             codes = asked("--codes"), linear = asked("--linear"), sustained = asked("--sustained");
  if (cases.empty())
    for (const char* d : {"h16 d128", "h32 d64"})
      for (const char* mask : {"causal", "full"})
        for (const char* n : {"b32 n1024", "b8 n4096", "b2 n16384"})
          cases.push_back(std::string(n) + " " + d + " " + mask);
  try {
    for (const std::string& text : cases)
      linear ? run_linear(text) : run(text, deterministic, partial, codes, sustained);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpu_bench: %s\n", e.what());
    return 1;
  }
}
