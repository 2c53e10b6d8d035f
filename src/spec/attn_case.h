// SPDX-License-Identifier: Apache-2.0
// One attention problem as a line of text. Tests, the benchmark, traces, records and bug reports
// all speak it:
//
//   b1 h8 hk2 nq4096 nk4096 d64 causal bf16 vectorwise bhsd seed1
//
// Tokens may come in any order, each at most once; what is left out keeps its default. to_string()
// prints the line above and adds what differs from the recipe's preset, so that parse(to_string())
// gives the same case back.
//
//   b<N> h<N> hk<N> nq<N> nk<N> d<N>   sizes; n<N> sets nq and nk; hk defaults to h
//   dv=<N>                             head dim of v and o; d is the default
//   causal | full                      mask; full is the default
//   align=top_left | align=bottom_right
//   window=<left>,<right>              keys seen to either side, -1: open
//   scale=<X>                          of the logits; 1/sqrt(d) is the default
//   softcap=<X>                        a logit x becomes X·tanh(x/X); 0, the default: it stays x
//   f32 | bf16 | f16                   element type
//   paper | vectorwise                 recipe preset
//   bhsd | bshd                        memory layout
//   seed<N>                            of the inputs, the lists and the dither
//   keep=<X>                           block lists with this share of the key blocks, 0 < X <= 1
//   blocks=<q>x<k> lead=<N>|all        their queries, keys and leading entries; 128x64 and 1 are
//                                      the defaults
//   lists=random|mass|diagonal|skewed  what they list (trace/lists.h); random is the default
//   tile=<q>x<k> smooth_k|smooth_q|rotate=on|off
//   rounding=nearest|dither|dither:<matmul>[,…] lift=<matmul>[,…]
//                                      switches of the recipe (spec/recipe_fields.h)
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "sagebwd/attention.h"
#include "spec/problem.h"

namespace sagebwd::spec {

enum class Layout { bhsd, bshd };

/// Which key blocks the lists of a case have.
enum class ListKind {
  random,    // any, in any order
  mass,      // those with the most probability, largest first
  diagonal,  // those nearest to the block of queries, nearest first
  skewed,    // half of them the same for all, the others random
};
/// The name of the enumerator.
const char* list_name(ListKind kind);

struct AttnCase {
  int64_t b = 1, h = 1, hk = 1;
  int64_t nq = 512, nk = 512, d = 64;
  int64_t dv = 0;  // head dim of v and o; 0: d
  Mask mask;
  float scale = 0.0f;  // of the logits; 0: 1/sqrt(d)
  float softcap = 0.0f;
  Dtype dtype = Dtype::bf16;
  Recipe recipe;  // recipe.seed follows `seed`
  Layout layout = Layout::bhsd;
  uint64_t seed = 1;
  double keep = 0;  // share of the key blocks that each list has; 0: no lists
  int block_q = 128, block_k = 64, lead = 1;
  ListKind lists = ListKind::random;

  /// Throws Error(invalid_argument) that names the token and what was expected.
  static AttnCase parse(std::string_view text);
  std::string to_string() const;

  int64_t value_dim() const { return dv == 0 ? d : dv; }
  /// Views of caller memory in the case's layout: [b, h, nq, d] and [b, hk, nk, d], and with the
  /// head dim of v [b, h, nq, dv] and [b, hk, nk, dv].
  TensorView q_view(void* data) const { return view(data, h, nq, d); }
  TensorView k_view(void* data) const { return view(data, hk, nk, d); }
  TensorView o_view(void* data) const { return view(data, h, nq, value_dim()); }
  TensorView v_view(void* data) const { return view(data, hk, nk, value_dim()); }
  int64_t q_elements() const { return b * h * nq * d; }
  int64_t k_elements() const { return b * hk * nk * d; }
  int64_t o_elements() const { return b * h * nq * value_dim(); }
  int64_t v_elements() const { return b * hk * nk * value_dim(); }

  float logit_scale() const;
  bool has_lists() const { return keep > 0; }
  /// Block lists of this case without their memory: every head has its own.
  BlockLists list_shape() const;
  /// Entries of a list where there are so many key blocks.
  int64_t listed(int64_t key_blocks) const;
  /// Sizes, mask and shape of the lists, for visible() and sequence().
  Problem problem() const;
  /// Keys query i sees.
  KeyRange visible(int64_t i) const;
  /// (query, key) pairs the mask leaves visible in one head.
  int64_t visible_pairs() const;

 private:
  TensorView view(void* data, int64_t heads, int64_t n, int64_t channels) const;
};

/// Multiply-adds of one matmul over all batches and heads, by the arithmetic the recipe gives them.
struct MatmulMacs {
  uint32_t matmul = 0;  // Matmul bit
  int64_t int8 = 0;
  int64_t floating = 0;
};

/// Multiply-adds of one call. Only visible (query, key) pairs count: work an implementation spends
/// on masked corners of a tile is overhead, not output.
struct MacCounts {
  std::array<MatmulMacs, 5> matmuls;  // S O in the forward, S' dV dP dQ dK in the backward
  int count = 0;

  int64_t int8() const;
  int64_t floating() const;
  int64_t total() const { return int8() + floating(); }
  /// The entry of one Matmul bit; zeros when the direction has no such matmul.
  MatmulMacs of(uint32_t matmul) const;
};

/// (query, key) pairs of all heads and batch entries: those that are computed, and those among them
/// that belong to leading entries of block lists, whose P is not quantised.
struct Pairs {
  int64_t all = 0, leading = 0;
};
/// Of a case without block lists.
Pairs count_pairs(const AttnCase& c);
/// Of a problem with block lists, whose memory is looked at.
Pairs count_listed_pairs(const Problem& p);
MacCounts count_macs(const AttnCase& c, Direction direction, const Pairs& pairs);
/// Of a case without block lists.
MacCounts count_macs(const AttnCase& c, Direction direction);

}  // namespace sagebwd::spec
