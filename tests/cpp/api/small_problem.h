// SPDX-License-Identifier: Apache-2.0
// A small attention problem with all its memory, for tests of the public calls. Outputs and
// workspace start as a byte pattern, so that a write shows; the same arguments are available
// through the C++ and the C interface.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <list>
#include <vector>

#include "base/half.h"
#include "base/hash.h"
#include "sagebwd/attention.h"
#include "sagebwd/sagebwd.h"

namespace sagebwd::testing {

struct Sizes {
  int64_t b = 2, h = 4, hk = 2, nq = 5, nk = 7, d = 16;
};

class SmallProblem {
 public:
  static constexpr unsigned char kPattern = 0xA5;

  explicit SmallProblem(Sizes s = {}, Dtype dtype = Dtype::f32) : sizes_(s), dtype_(dtype) {
    const int64_t nq = s.b * s.h * s.nq, nk = s.b * s.hk * s.nk;
    q_ = random(nq * s.d, 1), k_ = random(nk * s.d, 2), v_ = random(nk * s.d, 3);
    dout_ = random(nq * s.d, 4);
    o_ = pattern(nq * s.d * dtype_size(dtype)), lse_ = pattern(nq * 4);
    max_logit_ = pattern(s.b * s.h * 4);
    dq_ = pattern(nq * s.d * dtype_size(dtype));
    dk_ = pattern(nk * s.d * dtype_size(dtype)), dv_ = pattern(nk * s.d * dtype_size(dtype));
  }

  /// Valid arguments, workspace included.
  ForwardArgs forward_args() {
    ForwardArgs a;
    fill(a);
    a.max_logit = floats(max_logit_);
    give_workspace(a);
    return a;
  }
  /// Valid arguments; o and lse are whatever the buffers hold.
  BackwardArgs backward_args() {
    BackwardArgs a;
    fill(a);
    a.dout = view(dout_, sizes_.h, sizes_.nq);
    a.dq = view(dq_, sizes_.h, sizes_.nq);
    a.dk = view(dk_, sizes_.hk, sizes_.nk);
    a.dv = view(dv_, sizes_.hk, sizes_.nk);
    give_workspace(a);
    return a;
  }

  /// Everything either call may write, one after the other.
  std::vector<std::byte> outputs() const {
    std::vector<std::byte> all;
    for (const auto* v : {&o_, &lse_, &max_logit_, &dq_, &dk_, &dv_})
      all.insert(all.end(), v->begin(), v->end());
    return all;
  }
  bool untouched() const {
    const auto kept = [](const std::vector<std::byte>& bytes) {
      return std::all_of(bytes.begin(), bytes.end(),
                         [](std::byte x) { return x == std::byte{kPattern}; });
    };
    return kept(outputs()) && std::all_of(workspaces_.begin(), workspaces_.end(), kept);
  }
  float* lse() { return floats(lse_); }
  float* max_logit() { return floats(max_logit_); }
  std::vector<float> values(const TensorView& t) const {
    std::vector<float> out;
    const int64_t n = t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3];
    for (int64_t i = 0; i < n; ++i)
      out.push_back(dtype_ == Dtype::f32    ? static_cast<const float*>(t.data)[i]
                    : dtype_ == Dtype::bf16 ? to_float(static_cast<const bf16*>(t.data)[i])
                                            : to_float(static_cast<const f16*>(t.data)[i]));
    return out;
  }

 private:
  static std::vector<std::byte> pattern(int64_t bytes) {
    return std::vector<std::byte>(static_cast<size_t>(bytes), std::byte{kPattern});
  }
  static float* floats(std::vector<std::byte>& v) { return reinterpret_cast<float*>(v.data()); }
  std::vector<std::byte> random(int64_t n, uint64_t key) const {
    std::vector<std::byte> out(static_cast<size_t>(n * dtype_size(dtype_)));
    for (int64_t i = 0; i < n; ++i) {
      const float x = 2.0f * unit_float(hash64({key, static_cast<uint64_t>(i)})) - 1.0f;
      if (dtype_ == Dtype::f32) put(out, i, x);
      if (dtype_ == Dtype::bf16) put(out, i, from_float<bf16>(x));
      if (dtype_ == Dtype::f16) put(out, i, from_float<f16>(x));
    }
    return out;
  }
  template <typename T>
  static void put(std::vector<std::byte>& out, int64_t i, T x) {
    std::memcpy(out.data() + static_cast<size_t>(i) * sizeof(T), &x, sizeof(T));
  }
  TensorView view(std::vector<std::byte>& data, int64_t h, int64_t n) {
    return contiguous(data.data(), dtype_, {sizes_.b, h, n, sizes_.d});
  }
  void fill(AttentionArgs& a) {
    a.q = view(q_, sizes_.h, sizes_.nq);
    a.k = view(k_, sizes_.hk, sizes_.nk);
    a.v = view(v_, sizes_.hk, sizes_.nk);
    a.o = view(o_, sizes_.h, sizes_.nq);
    a.lse = contiguous_stats(floats(lse_), sizes_.h, sizes_.nq);
  }
  template <typename Args>
  void give_workspace(Args& a) {
    std::vector<std::byte>& memory =
        workspaces_.emplace_back(pattern(static_cast<int64_t>(workspace_size(a))));
    a.workspace = memory.data();
    a.workspace_bytes = memory.size();
  }

  Sizes sizes_;
  Dtype dtype_;
  std::vector<std::byte> q_, k_, v_, o_, lse_, max_logit_, dout_, dq_, dk_, dv_;
  std::list<std::vector<std::byte>> workspaces_;  // of all arguments that were asked for
};

/// The same call through the C interface. Holds the recipe the arguments point to: do not copy.
struct CForward {
  sagebwd_forward_args args;
  sagebwd_recipe recipe;
  sagebwd_block_lists blocks;
  explicit CForward(const ForwardArgs& a);
  CForward(const CForward&) = delete;
};
struct CBackward {
  sagebwd_backward_args args;
  sagebwd_recipe recipe;
  sagebwd_block_lists blocks;
  explicit CBackward(const BackwardArgs& a);
  CBackward(const CBackward&) = delete;
};

namespace detail {

inline sagebwd_tensor to_c(const TensorView& t) {
  sagebwd_tensor c{t.data, {}, {}, static_cast<int>(t.dtype), 0};
  std::copy_n(t.shape.begin(), 4, c.shape);
  std::copy_n(t.stride.begin(), 4, c.stride);
  return c;
}

inline sagebwd_stats to_c(const StatsView& s) {
  return {s.data, {s.stride[0], s.stride[1], s.stride[2]}};
}

template <typename C>
void shared_to_c(const AttentionArgs& a, C& c, sagebwd_recipe& r, sagebwd_block_lists& l) {
  c.q = to_c(a.q), c.k = to_c(a.k), c.v = to_c(a.v), c.o = to_c(a.o), c.lse = to_c(a.lse);
  c.scale = a.scale, c.softcap = a.softcap;
  c.causal = a.mask.causal;
  c.align = static_cast<int>(a.mask.align);
  c.window_left = a.mask.window_left, c.window_right = a.mask.window_right;
  c.cu_q = a.documents.cu_q, c.cu_k = a.documents.cu_k, c.num_documents = a.documents.count;
  c.cu_on_device = a.documents.on_device;
  c.device = static_cast<int>(a.device);
  c.workspace = a.workspace, c.workspace_bytes = a.workspace_bytes;
  c.parallel_for = a.parallel_for.run, c.parallel_context = a.parallel_for.context;
  c.stream = a.stream;
  sagebwd_recipe_init(&r, sizeof r, "vectorwise");
  r.scheme = static_cast<int>(a.recipe.scheme);
  r.tile_q = a.recipe.tile_q, r.tile_k = a.recipe.tile_k;
  r.smooth_k = a.recipe.smooth_k, r.smooth_q = a.recipe.smooth_q;
  r.rounding = static_cast<int>(a.recipe.rounding);
  r.seed = a.recipe.seed;
  r.high_precision = a.recipe.high_precision;
  r.dithered = a.recipe.dithered;
  r.rotate = a.recipe.rotate;
  c.recipe = &r;
  sagebwd_block_lists_init(&l, sizeof l);
  l.index = a.blocks.index, l.count = a.blocks.count, l.offset = a.blocks.offset;
  l.width = a.blocks.width, l.rows = a.blocks.rows;
  l.stride_batch = a.blocks.stride_batch, l.stride_head = a.blocks.stride_head;
  l.block_q = a.blocks.block_q, l.block_k = a.blocks.block_k, l.lead = a.blocks.lead;
  l.on_device = a.blocks.on_device;
  c.blocks = &l;
}

}  // namespace detail

inline CForward::CForward(const ForwardArgs& a) {
  sagebwd_forward_args_init(&args, sizeof args);
  detail::shared_to_c(a, args, recipe, blocks);
  args.max_logit = a.max_logit;
}

inline CBackward::CBackward(const BackwardArgs& a) {
  sagebwd_backward_args_init(&args, sizeof args);
  detail::shared_to_c(a, args, recipe, blocks);
  args.dout = detail::to_c(a.dout);
  args.dq = detail::to_c(a.dq), args.dk = detail::to_c(a.dk), args.dv = detail::to_c(a.dv);
  args.dlse = detail::to_c(a.dlse);
  args.partial_kv = a.partial_kv;
  args.deterministic = a.deterministic;
}

}  // namespace sagebwd::testing
