// SPDX-License-Identifier: Apache-2.0
// Forward and backward as a sequence of kernels on the caller's stream: nothing here waits for the
// device, and nothing on the host has to outlive the call, so a call can be captured into a graph.
// Heads are taken a few at a time, so that their matrices stay within a fixed memory.
#include "cuda/sla2/linear/linear.h"

#include <algorithm>
#include <cstdint>

#include "base/math.h"
#include "cuda/host/arena.h"
#include "cuda/host/check.h"
#include "cuda/host/device.h"
#include "cuda/host/target.h"
#include "cuda/host/views.h"
#include "cuda/lists/job.h"
#include "cuda/sla2/implementation.h"
#include "cuda/sla2/linear/jobs.h"
#include "cuda/sla2/mix/jobs.h"
#include "spec/averages.h"
#include "spec/mix.h"

namespace sagebwd::cuda::sla2::linear {

int64_t most_bytes = int64_t{1} << 29;
int64_t many_pieces = 2048;

namespace {

using Problem = spec::LinearProblem;

constexpr int64_t kMostHeads = 65535;  // of a pass: a dimension of a grid

static_assert(kPiece == spec::kMixPiece);

struct Sizes {
  explicit Sizes(const Problem& p)
      : backward(p.direction == spec::Direction::backward),
        group(p.group()),
        block_q(p.blocks.block_q),
        block_k(p.blocks.block_k),
        q_blocks(ceil_div(p.nq, block_q)),
        k_blocks(ceil_div(p.nk, block_k)),
        query_words(words_of(k_blocks)),
        key_words(words_of(group * q_blocks)) {}

  /// Of a row of bits.
  static int64_t words_of(int64_t bits) { return 2 * ceil_div(std::max<int64_t>(bits, 1), 64); }

  bool backward;
  int64_t group;
  int block_q, block_k;
  int64_t q_blocks, k_blocks, query_words, key_words;
};

/// What lies where in the workspace.
struct Space {
  Space(const Problem& p, const Sizes& s, int64_t key_heads, Arena& arena) {
    const int64_t heads = key_heads * s.group;
    const auto take_mean = [&](Mean& m, int64_t parts) {
      m = {.part = arena.take<float>(key_heads * parts * p.d),
           .counted = arena.take<int>(key_heads * parts),
           .parts = parts,
           .mean = arena.take<float>(key_heads * p.d)};
    };
    const auto take_matrices = [&](int64_t blocks) {
      return arena.take<uint16_t>(blocks * p.d * p.d);
    };
    bad = arena.take<uint32_t>(2 * key_heads);
    by_query = arena.take<uint32_t>(heads * s.q_blocks * s.query_words);
    if (!p.has_means) take_mean(k_mean, mean_parts(p.nk)), take_mean(v_mean, mean_parts(p.nk));
    v_magnitude = arena.take<float>(key_heads);
    of_keys = take_matrices(key_heads * s.k_blocks);
    if (s.backward || !p.has_averages) of_queries = take_matrices(heads * s.q_blocks);
    average = of_queries;
    z = arena.take<float>(key_heads * s.k_blocks * p.d);
    z_seen = arena.take<float>(heads * s.q_blocks * p.d);
    if (!s.backward) return;
    by_key = arena.take<uint32_t>(key_heads * s.k_blocks * s.key_words);
    take_mean(dout_mean, s.group * mean_parts(p.nq)), take_mean(g_mean, ceil_div(p.nk, kPiece));
    dout_magnitude = arena.take<float>(key_heads);
    weight = arena.take<float>(heads * p.nq), extra = arena.take<float>(heads * p.nq);
    for (int i = 0; i < 2; ++i) {
      w[i] = arena.take<float>(heads * s.q_blocks * p.d);
      w_seen[i] = arena.take<float>(key_heads * s.k_blocks * p.d);
    }
    if (p.has_dnorm) g = arena.take<float>(key_heads * p.nk * p.d);
  }

  uint32_t* bad;                             // [2, key heads]: of h and dH
  uint16_t *of_keys, *of_queries = nullptr;  // h, then X; U, then dH
  uint16_t* average;                         // U: of_queries, or what is kept of a call
  uint32_t *by_query, *by_key = nullptr;     // bits of blocks that see each other
  Mean k_mean{}, v_mean{}, dout_mean{}, g_mean{};
  float *v_magnitude, *dout_magnitude = nullptr;  // [key heads]: of averages
  float *z, *z_seen;
  float *weight = nullptr, *extra = nullptr;
  float *w[2] = {}, *w_seen[2] = {};  // w, dz and W, dZ
  /// g in FP32, or null where the type of dK suffices. A gradient of norms may be nearly the same
  /// for all keys, and a hundred times what is left of g without its mean; nothing else in g is.
  float* g = nullptr;
};

/// The tables of a pass, with those that are kept in their place among those of all heads.
Space with_averages(Space space, const Problem& p, const Sizes& s, void* averages, int64_t first) {
  if (averages == nullptr) return space;
  const spec::AveragesLayout at(p);
  const auto part = [&](int64_t offset, int64_t numbers) {
    return reinterpret_cast<float*>(static_cast<char*>(averages) + offset) + numbers;
  };
  const int64_t blocks = first * s.group * s.q_blocks;
  space.average = reinterpret_cast<uint16_t*>(part(at.average, 0)) + blocks * p.d * p.d;
  space.z_seen = part(at.sum, blocks * p.d);
  space.k_mean.mean = part(at.k_mean, first * p.d);
  space.v_mean.mean = part(at.v_mean, first * p.d);
  space.v_magnitude = part(at.v_magnitude, first);
  return space;
}

int64_t bytes_for(const Problem& p, const Sizes& s, int64_t key_heads) {
  Arena arena(nullptr);
  Space(p, s, key_heads, arena);
  return static_cast<int64_t>(arena.used());
}

/// Key heads of a pass. All passes have about as many.
int64_t heads_of_pass(const Problem& p, const Sizes& s) {
  const int64_t all = p.b * p.hk;
  const int64_t most = std::clamp<int64_t>(
      std::min(most_bytes / std::max<int64_t>(bytes_for(p, s, 1), 1), kMostHeads / s.group), 1,
      std::max<int64_t>(all, 1));
  return ceil_div(all, ceil_div(all, most));
}

/// The kernels of a call, for the heads of a pass.
class Pass {
 public:
  Pass(const Problem& problem, const LinearArgs& args, const Sizes& sizes, const Space& space,
       float* alpha_parts, int64_t first, int64_t key_heads)
      : p_(problem),
        a_(args),
        s_(sizes),
        ws_(space),
        alpha_parts_(alpha_parts),
        kind_{problem.dtype, static_cast<int>(problem.d), static_cast<cudaStream_t>(args.stream),
              can_start_early() ? Start::early : Start::behind},
        first_(first),
        key_heads_(key_heads) {}

  /// Of V and, where it is wanted, of K, unless they are given or kept; and of dO in the backward.
  void means(const TensorView* dout) const {
    MeanJob job{};
    const bool there = p_.has_means || (s_.backward && p_.has_averages);
    if (!there) job.of[job.count++] = {keys(a_.v), 1, ws_.v_mean};
    if (!there && a_.mean_free_keys) job.of[job.count++] = {keys(a_.k), 1, ws_.k_mean};
    if (dout != nullptr)
      job.of[job.count++] = {queries_of(*dout), static_cast<int>(s_.group), ws_.dout_mean};
    launch_means(kind_, job);
  }

  /// The bits of lists, by queries.
  void see() const {
    const BlockLists& l = p_.blocks;
    const bool makes_averages = !s_.backward || !p_.has_averages;
    launch_seen(kind_, {.by_query = ws_.by_query,
                        .words = s_.query_words,
                        .rows = static_cast<int>(s_.q_blocks),
                        .columns = static_cast<int>(s_.k_blocks),
                        .index = p_.has_lists() ? l.index : nullptr,
                        .count = l.count,
                        .width = l.width,
                        .stride_batch = l.stride_batch,
                        .stride_head = l.stride_head,
                        .first = first_ * s_.group,
                        .of_batch = static_cast<int>(p_.h),
                        .heads = static_cast<int>(key_heads_ * s_.group),
                        .zeros = {ws_.bad, ws_.bad + key_heads_,
                                  makes_averages ? ws_.v_magnitude : nullptr, ws_.dout_magnitude},
                        .zero_words = static_cast<int>(key_heads_)});
  }

  /// U, and what it takes.
  void sum_keys() const {
    launch_block_sums(kind_, {.x = keys(a_.k),
                              .b = keys(a_.v),
                              .x_mean = k_mean(),
                              .b_mean = v_mean(),
                              .group = 1,
                              .weight = nullptr,
                              .extra = nullptr,
                              .block = s_.block_k,
                              .blocks = static_cast<int>(s_.k_blocks),
                              .matrix = ws_.of_keys,
                              .sum = ws_.z,
                              .extra_sum = nullptr,
                              .bad = ws_.bad,
                              .magnitude = ws_.v_magnitude,
                              .together = together(keys(a_.k), s_.block_k)});
    launch_complement(kind_, {.seen = {.at = ws_.by_query,
                                       .words = s_.query_words,
                                       .rows = static_cast<int>(s_.group * s_.q_blocks),
                                       .columns = static_cast<int>(s_.k_blocks)},
                              .key_heads = static_cast<int>(key_heads_),
                              .matrix = ws_.of_keys,
                              .sum = {ws_.z, nullptr},
                              .magnitude = ws_.v_magnitude,
                              .bad = ws_.bad,
                              .average = ws_.average,
                              .sum_of_seen = {ws_.z_seen, nullptr}});
  }

  void queries(const LinearForwardArgs& out) const {
    launch_forward(kind_, {.q = queries_of(a_.q),
                           .keys = keys_as_seen(),
                           .o = strided(out.o, 16),
                           .norm = stats(out.norm),
                           .mix = mixing(out.alpha),
                           .sparse = queries_of(out.sparse)});
  }

  void query_gradients(const LinearBackwardArgs& out) const {
    launch_query_gradients(kind_, {.q = queries_of(a_.q),
                                   .dout = queries_of(out.dout),
                                   .keys = keys_as_seen(),
                                   .dnorm = stats(out.dnorm),
                                   .dq = strided(out.dq, 16),
                                   .weight = ws_.weight,
                                   .extra = ws_.extra,
                                   .mix = mixing(out.alpha),
                                   .dq_sparse = queries_of(out.dq_sparse),
                                   .parts_of_sparse = out.alpha_parts,
                                   .parts = alpha_parts_});
  }

  /// X, and what it takes.
  void sum_queries(const LinearBackwardArgs& out) const {
    const int group = static_cast<int>(s_.group);
    launch_block_sums(kind_, {.x = queries_of(a_.q),
                              .b = queries_of(out.dout),
                              .x_mean = nullptr,
                              .b_mean = ws_.dout_mean.mean,
                              .group = group,
                              .weight = ws_.weight,
                              .extra = ws_.extra,
                              .block = s_.block_q,
                              .blocks = static_cast<int>(s_.q_blocks),
                              .matrix = ws_.of_queries,
                              .sum = ws_.w[0],
                              .extra_sum = ws_.w[1],
                              .bad = ws_.bad + key_heads_,
                              .magnitude = ws_.dout_magnitude,
                              .together = together(queries_of(a_.q), s_.block_q)});
    const int rows = static_cast<int>(s_.group * s_.q_blocks),
              columns = static_cast<int>(s_.k_blocks);
    launch_seen_by_keys(kind_, {.by_query = ws_.by_query,
                                .by_key = ws_.by_key,
                                .query_words = s_.query_words,
                                .words = s_.key_words,
                                .key_heads = static_cast<int>(key_heads_),
                                .rows = rows,
                                .columns = columns});
    launch_complement(kind_, {.seen = {ws_.by_key, s_.key_words, columns, rows},
                              .key_heads = static_cast<int>(key_heads_),
                              .matrix = ws_.of_queries,
                              .sum = {ws_.w[0], ws_.w[1]},
                              .magnitude = ws_.dout_magnitude,
                              .bad = ws_.bad + key_heads_,
                              .average = ws_.of_keys,
                              .sum_of_seen = {ws_.w_seen[0], ws_.w_seen[1]}});
  }

  void key_gradients(const LinearBackwardArgs& out) const {
    launch_key_gradients(kind_, {.k = keys(a_.k),
                                 .v = keys(a_.v),
                                 .queries = {.group = 1,
                                             .block = s_.block_k,
                                             .blocks = static_cast<int>(s_.k_blocks),
                                             .average = ws_.of_keys,
                                             .sum = ws_.w_seen[0],
                                             .magnitude = ws_.dout_magnitude,
                                             .mean = ws_.dout_mean.mean},
                                 .extra_sum = ws_.w_seen[1],
                                 .k_mean = k_mean(),
                                 .v_mean = v_mean(),
                                 .dv = strided(out.dv, 16),
                                 .dk = strided(out.dk, 16),
                                 .g = a_.mean_free_keys ? ws_.g : nullptr,
                                 .g_mean = ws_.g_mean,
                                 .dk_sparse = keys(out.dk_sparse),
                                 .dv_sparse = keys(out.dv_sparse)});
    if (!a_.mean_free_keys) return;
    launch_mean_of_parts(kind_, static_cast<int>(key_heads_), ws_.g_mean);
    launch_subtract_mean(kind_, {.dk = keys(out.dk), .g = ws_.g, .mean = ws_.g_mean.mean});
  }

 private:
  /// Blocks that a thread block of launch_block_sums takes: four pieces, if that leaves enough.
  static int together(const Tokens& t, int block) {
    const bool many = ceil_div(t.count, kPiece) * t.heads >= many_pieces;
    return many ? std::max(1, 4 * kPiece / block) : 1;
  }
  Tokens keys(const TensorView& t) const {
    return {strided(t, 16), first_, static_cast<int>(p_.hk), static_cast<int>(p_.nk),
            static_cast<int>(key_heads_)};
  }
  Tokens queries_of(const TensorView& t) const {
    return {strided(t, 16), first_ * s_.group, static_cast<int>(p_.h), static_cast<int>(p_.nq),
            static_cast<int>(key_heads_ * s_.group)};
  }
  Tables keys_as_seen() const {
    return {.group = static_cast<int>(s_.group),
            .block = s_.block_q,
            .blocks = static_cast<int>(s_.q_blocks),
            .average = ws_.average,
            .sum = ws_.z_seen,
            .magnitude = ws_.v_magnitude,
            .mean = v_mean()};
  }
  /// Null: φ gets K as it is.
  const float* k_mean() const {
    if (!a_.mean_free_keys) return nullptr;
    return p_.has_means ? a_.k_mean + first_ * p_.d : ws_.k_mean.mean;
  }
  const float* v_mean() const { return p_.has_means ? a_.v_mean + first_ * p_.d : ws_.v_mean.mean; }

  Mixing mixing(const Alpha& alpha) const {
    // A block may be longer than the sequence.
    return {alpha.data, static_cast<int>(alpha.rows),
            static_cast<int>(std::min(alpha.block, round_up(p_.nq, kPiece))), alpha.batches > 1};
  }

  const Problem& p_;
  const LinearArgs& a_;
  const Sizes& s_;
  const Space ws_;
  float* const alpha_parts_;
  const Kind kind_;
  const int64_t first_, key_heads_;
};

/// Parts of dα of all heads.
float* take_alpha_parts(const Problem& p, Arena& arena) {
  return p.has_dalpha ? arena.take<float>(p.b * p.h * ceil_div(p.nq, kPiece)) : nullptr;
}

/// f(pass) for all heads of a call.
template <typename F>
void for_passes(const Problem& p, const LinearArgs& args, const void* averages, Arena& arena,
                float* alpha_parts, F&& f) {
  const Sizes sizes(p);
  const int64_t all = p.b * p.hk, most = heads_of_pass(p, sizes);
  const Space space(p, sizes, most, arena);
  for (int64_t first = 0; first < all; first += most) {
    // The backward only reads them.
    const Space here = with_averages(space, p, sizes, const_cast<void*>(averages), first);
    f(Pass(p, args, sizes, here, alpha_parts, first, std::min(most, all - first)));
  }
}

void sum_alpha_parts(const Problem& p, const LinearBackwardArgs& args, const float* parts) {
  const spec::AlphaParts size({p.b, p.h, p.nq, p.d}, args.alpha);
  mix::launch_alpha_sums({.parts = parts,
                          .dalpha = args.dalpha,
                          .results = args.alpha.batches * p.h * args.alpha.rows,
                          .heads = static_cast<int>(p.h),
                          .rows = static_cast<int>(args.alpha.rows),
                          .batches = static_cast<int>(size.batches),
                          .of_row = static_cast<int>(std::min(size.of_row, size.of_head)),
                          .of_head = static_cast<int>(size.of_head)},
                         static_cast<cudaStream_t>(args.stream));
}

}  // namespace

std::string decline(const Problem& p) {
  constexpr int64_t kMostTokens = int64_t{1} << 30, kMostBlocks = int64_t{1} << 23;
  if (p.device != Device::cuda) return "runs on CUDA memory only";
  if (p.dtype == Dtype::f32) return "has the linear branch in bf16 and f16, not f32";
  if (std::ranges::find(kHeadDims, p.d) == kHeadDims.end())
    return "has the linear branch for head dims 64 and 128";
  if (p.h == 0) return "takes at least one query head";
  if (const std::string reason = decline_lists(p); !reason.empty()) return reason;
  if (p.nq > kMostTokens || p.nk > kMostTokens) return "takes up to 2^30 tokens of a sequence";
  const Sizes sizes(p);
  if (sizes.group > kMostHeads || sizes.group * sizes.q_blocks > kMostBlocks ||
      sizes.k_blocks > kMostBlocks)
    return "takes up to 65535 query heads, and 2^23 blocks of queries, per key head";
  return decline_device(8);
}

size_t workspace_of(const Problem& p) {
  const Sizes sizes(p);
  Arena arena(nullptr);
  take_alpha_parts(p, arena);
  return arena.used() + static_cast<size_t>(bytes_for(p, sizes, heads_of_pass(p, sizes))) +
         kDeviceAlign;
}

void forward(const Problem& p, const LinearForwardArgs& args, void* workspace) {
  Arena arena(aligned(workspace));
  for_passes(p, args, args.averages, arena, nullptr, [&](const Pass& pass) {
    pass.means(nullptr);
    pass.see();
    pass.sum_keys();
    pass.queries(args);
  });
}

void backward(const Problem& p, const LinearBackwardArgs& args, void* workspace) {
  Arena arena(aligned(workspace));
  float* const alpha_parts = take_alpha_parts(p, arena);
  for_passes(p, args, args.averages, arena, alpha_parts, [&](const Pass& pass) {
    pass.means(&args.dout);
    pass.see();
    if (!p.has_averages) pass.sum_keys();
    pass.query_gradients(args);
    pass.sum_queries(args);
    pass.key_gradients(args);
  });
  if (alpha_parts != nullptr) sum_alpha_parts(p, args, alpha_parts);
}

}  // namespace sagebwd::cuda::sla2::linear
