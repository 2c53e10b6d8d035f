// SPDX-License-Identifier: Apache-2.0
// A matrix [channels of φ][columns] belongs to each block: V's channels, then a column for the
// norm. With V' = [V, 1] and φ(K)ᵀ·V' = [h, z], one product makes numerator and norm:
//
//   keys      h_j = φ(K_j)ᵀ·V'              queries   H_i = Σ h_j over the blocks not excluded
//                                                     [O·n, n] = φ(Q)·H_i
//   queries   dO' = [dO/n, dn − D/n]        keys      dh_j = Σ dH_i over the blocks not excluding j
//             dφ(Q) = dO'·H_iᵀ                        dφ(K) = V'·dh_jᵀ
//             dH_i = φ(Q)ᵀ·dO'                        dV = φ(K)·dh_j
//
// Heads are taken a few at a time, so that their matrices stay within a fixed memory.
#include "cpu/sla2/linear.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "cpu/lists.h"
#include "cpu/plan.h"

namespace sagebwd::cpu::sla2 {
namespace {

constexpr int kPiece = 64;  // tokens of a product; blocks are multiples of it
constexpr int kMostChannels = 256;
/// Numbers in the matrices of the heads that are worked on at once, unless one head has more.
constexpr int64_t kMostSums = int64_t{1} << 24;

/// The matrices of the blocks of each head, and the sums of them all and of their magnitudes.
struct BlockSums {
  float* parts = nullptr;       // [heads][blocks][size]
  double* total = nullptr;      // [heads][size]
  double* magnitude = nullptr;  // [heads][size]
  int64_t blocks = 0, size = 0;

  void place(Arena& arena, int64_t heads, int64_t block_count, int64_t matrix) {
    blocks = block_count, size = matrix;
    parts = arena.take<float>(heads * blocks * size);
    total = arena.take<double>(heads * size);
    magnitude = arena.take<double>(heads * size);
  }
  float* part(int64_t head, int64_t block) const { return parts + (head * blocks + block) * size; }
  double* total_of(int64_t head) const { return total + head * size; }
  double* magnitude_of(int64_t head) const { return magnitude + head * size; }
};

/// The memory that one worker needs.
struct Scratch {
  double* sum;             // a matrix
  float *matrix, *turned;  // the sum in FP32, and its transpose
  float *phi, *phi_t;      // [kPiece][dl], [dl][kPiece]
  float *x, *y;            // [kPiece][columns]
  float* z;                // [kPiece][dl]
  int32_t* excluded;       // blocks
  uint8_t* mark;           // blocks
};

struct Layout {
  Layout(const spec::LinearProblem& problem, void* workspace) : p(problem) {
    d = static_cast<int>(p.d);
    dl = static_cast<int>(round_up(p.d, isa::kPanel));
    columns = dl + isa::kPanel;
    q_blocks = ceil_div(p.nq, p.blocks.block_q), k_blocks = ceil_div(p.nk, p.blocks.block_k);
    matrix = static_cast<int64_t>(dl) * columns;
    slots = worker_slots();
    const bool backward = p.direction == spec::Direction::backward;
    const int64_t query_blocks = p.group() * q_blocks;
    const int64_t of_head = (k_blocks + (backward ? query_blocks : 0)) * matrix;
    heads = std::clamp<int64_t>(kMostSums / std::max<int64_t>(of_head, 1), 1, p.b * p.hk);

    Arena arena(workspace);
    lists.place(arena, p);
    h.place(arena, heads, k_blocks, matrix);
    token_sums = arena.take<double>(heads * k_blocks * (dl + 1));
    mean = arena.take<float>(heads * dl);
    if (backward) {
      dh.place(arena, heads, query_blocks, matrix);
      finite_keys = arena.take<double>(heads);
      dx = arena.take<float>(heads * p.nk * dl);
    }
    Arena counting(nullptr);
    take_scratch(counting);
    scratch_bytes = static_cast<int64_t>(counting.used());
    scratch = arena.take<char>(slots * scratch_bytes);
    bytes = arena.used();
  }
  Layout(const Layout&) = delete;

  Scratch at(int64_t slot) const {
    Arena arena(scratch + slot * scratch_bytes);
    return take_scratch(arena);
  }
  int norm_column() const { return dl; }
  double* token_sum(int64_t head, int64_t block) const {
    return token_sums + (head * k_blocks + block) * (dl + 1);
  }

  const spec::LinearProblem& p;
  int d, dl, columns;  // channels, channels padded to whole vectors, columns of a matrix
  int64_t q_blocks, k_blocks, matrix, heads;
  int slots;
  ListTables lists;
  BlockSums h, dh;
  double* token_sums = nullptr;   // [heads][k_blocks][dl + 1] of finite tokens, and their number
  float* mean = nullptr;          // [heads][dl] of the keys
  double* finite_keys = nullptr;  // [heads]
  float* dx = nullptr;            // [heads][nk][dl] gradient of the keys without their mean
  size_t bytes = 0;

 private:
  Scratch take_scratch(Arena& arena) const {
    Scratch s;
    const int64_t blocks = std::max(k_blocks, p.group() * q_blocks);
    s.sum = arena.take<double>(matrix);
    s.matrix = arena.take<float>(matrix);
    s.turned = arena.take<float>(matrix);
    s.phi = arena.take<float>(int64_t{kPiece} * dl);
    s.phi_t = arena.take<float>(int64_t{kPiece} * dl);
    s.x = arena.take<float>(int64_t{kPiece} * columns);
    s.y = arena.take<float>(int64_t{kPiece} * columns);
    s.z = arena.take<float>(int64_t{kPiece} * dl);
    s.excluded = arena.take<int32_t>(blocks);
    s.mark = arena.take<uint8_t>(blocks);
    return s;
  }
  char* scratch = nullptr;
  int64_t scratch_bytes = 0;
};

/// Some tokens of one head.
struct Piece {
  int64_t batch, head, first;
  int rows;
};

/// f(piece, whether it is the first) for the pieces of a block.
template <typename F>
void for_pieces(int64_t batch, int64_t head, int64_t block, int64_t block_size, int64_t tokens,
                F&& f) {
  const int64_t begin = block * block_size, end = std::min(begin + block_size, tokens);
  for (int64_t t = begin; t < end; t += kPiece)
    f(Piece{batch, head, t, static_cast<int>(std::min<int64_t>(kPiece, end - t))}, t == begin);
}

class Linear {
 public:
  Linear(const isa::Kernels& kernels, const Layout& layout, const LinearArgs& args)
      : k_(kernels), l_(layout), p_(layout.p), a_(args) {}

  /// Key heads first … first + count − 1 of all batch entries, in order.
  void take_heads(int64_t first, int64_t count) { first_ = first, count_ = count; }

  /// The matrices of the keys, and the sum of them all.
  void sum_keys() {
    if (a_.mean_free_keys) {
      for_key_blocks([&](const Scratch& s, int64_t e, int64_t j) {
        double* sum = l_.token_sum(e, j);
        std::fill(sum, sum + l_.dl + 1, 0.0);
        for_pieces(batch(e), key_head(e), j, p_.blocks.block_k, p_.nk, [&](const Piece& t, bool) {
          load(a_.k, t, s.phi, l_.dl);
          sum[l_.dl] += k_.sum_rows(s.phi, l_.dl, t.rows, l_.d, sum);
        });
      });
      run_items(a_.parallel_for, l_.slots, count_, [&](int64_t, int64_t e) {
        double sum[kMostChannels + 1];
        add_token_sums(e, sum);
        for (int c = 0; c < l_.dl; ++c)
          l_.mean[e * l_.dl + c] =
              static_cast<float>(c < l_.d && sum[l_.dl] > 0 ? sum[c] / sum[l_.dl] : 0.0);
        if (l_.finite_keys != nullptr) l_.finite_keys[e] = sum[l_.dl];
      });
    }
    for_key_blocks([&](const Scratch& s, int64_t e, int64_t j) {
      float* h = l_.h.part(e, j);
      for_pieces(batch(e), key_head(e), j, p_.blocks.block_k, p_.nk,
                 [&](const Piece& t, bool first) {
                   load_keys(t, e, s);
                   add_product(s, s.x, t.rows, first, h);
                 });
    });
    add_up(l_.h);
  }

  void queries(const LinearForwardArgs& out) {
    for_query_blocks([&](const Scratch& s, int64_t e, int64_t head, int64_t i) {
      seen_by_queries(s, e, head, i);
      for_pieces(batch(e), head, i, p_.blocks.block_q, p_.nq, [&](const Piece& t, bool) {
        float norm[kPiece];
        attend(t, s, norm);
        k_.store_rows(p_.dtype, row_at(out.o, t.batch, head, t.first), out.o.stride[2], t.rows,
                      l_.d, s.y, l_.columns, 1.0f);
        for (int r = 0; r < t.rows && out.norm.data != nullptr; ++r)
          *stat_at(out.norm, t.batch, head, t.first + r) = norm[r];
      });
    });
  }

  /// dQ, the matrices dH of the queries, and the sum of them all.
  void query_gradients(const LinearBackwardArgs& out) {
    for_query_blocks([&](const Scratch& s, int64_t e, int64_t head, int64_t i) {
      seen_by_queries(s, e, head, i);
      turn(s);
      float* dh = l_.dh.part(e, head % p_.group() * l_.q_blocks + i);
      for_pieces(batch(e), head, i, p_.blocks.block_q, p_.nq, [&](const Piece& t, bool first) {
        float norm[kPiece];
        attend(t, s, norm);
        load_gradients(out, t, s, norm);
        multiply(s.x, l_.columns, s.turned, l_.dl, t.rows, l_.dl, l_.columns, s.z, l_.dl);
        k_.softmax_rows_back(s.phi, s.z, l_.dl, t.rows);
        k_.store_rows(p_.dtype, row_at(out.dq, t.batch, head, t.first), out.dq.stride[2], t.rows,
                      l_.d, s.z, l_.dl, 1.0f);
        add_product(s, s.x, t.rows, first, dh);
      });
    });
    add_up(l_.dh);
  }

  void key_gradients(const LinearBackwardArgs& out) {
    for_key_blocks([&](const Scratch& s, int64_t e, int64_t j) {
      seen_by_keys(s, e, j);
      turn(s);
      double* sum = l_.token_sum(e, j);
      std::fill(sum, sum + l_.dl + 1, 0.0);
      for_pieces(batch(e), key_head(e), j, p_.blocks.block_k, p_.nk, [&](const Piece& t, bool) {
        load_keys(t, e, s);
        multiply(s.phi, l_.dl, s.matrix, l_.columns, t.rows, l_.dl, l_.dl, s.z, l_.dl);
        k_.store_rows(p_.dtype, row_at(out.dv, t.batch, t.head, t.first), out.dv.stride[2], t.rows,
                      l_.d, s.z, l_.dl, 1.0f);
        multiply(s.x, l_.columns, s.turned, l_.dl, t.rows, l_.dl, l_.columns, s.z, l_.dl);
        k_.softmax_rows_back(s.phi, s.z, l_.dl, t.rows);
        k_.sum_rows(s.z, l_.dl, t.rows, l_.d, sum);
        std::copy_n(s.z, static_cast<int64_t>(t.rows) * l_.dl, gradient_of_key(e, t.first));
      });
    });
    run_items(a_.parallel_for, l_.slots, count_, [&](int64_t, int64_t e) {
      double sum[kMostChannels + 1] = {};
      if (a_.mean_free_keys) add_token_sums(e, sum);
      for (int c = 0; c < l_.dl; ++c)
        l_.mean[e * l_.dl + c] = static_cast<float>(
            a_.mean_free_keys && c < l_.d && l_.finite_keys[e] > 0 ? sum[c] / l_.finite_keys[e]
                                                                   : 0.0);
    });
    for_key_blocks([&](const Scratch&, int64_t e, int64_t j) {
      for_pieces(batch(e), key_head(e), j, p_.blocks.block_k, p_.nk, [&](const Piece& t, bool) {
        float* g = gradient_of_key(e, t.first);
        k_.subtract_row(g, l_.dl, t.rows, l_.mean + e * l_.dl);
        k_.store_rows(p_.dtype, row_at(out.dk, t.batch, t.head, t.first), out.dk.stride[2], t.rows,
                      l_.d, g, l_.dl, 1.0f);
      });
    });
  }

 private:
  int64_t batch(int64_t e) const { return (first_ + e) / p_.hk; }
  int64_t key_head(int64_t e) const { return (first_ + e) % p_.hk; }
  float* gradient_of_key(int64_t e, int64_t key) const { return l_.dx + (e * p_.nk + key) * l_.dl; }

  /// f(scratch, head of this pass, key block)
  template <typename F>
  void for_key_blocks(F&& f) {
    run_items(a_.parallel_for, l_.slots, count_ * l_.k_blocks, [&](int64_t slot, int64_t item) {
      f(l_.at(slot), item / l_.k_blocks, item % l_.k_blocks);
    });
  }
  /// f(scratch, head of this pass, query head, query block)
  template <typename F>
  void for_query_blocks(F&& f) {
    const int64_t of_head = p_.group() * l_.q_blocks;
    run_items(a_.parallel_for, l_.slots, count_ * of_head, [&](int64_t slot, int64_t item) {
      const int64_t e = item / of_head, rest = item % of_head;
      f(l_.at(slot), e, key_head(e) * p_.group() + rest / l_.q_blocks, rest % l_.q_blocks);
    });
  }

  /// Rows of a tensor as FP32, zeros behind the last one.
  void load(const TensorView& x, const Piece& t, float* rows, int ld) const {
    k_.load_rows(x.dtype, row_at(x, t.batch, t.head, t.first), x.stride[2], t.rows, l_.d, rows, ld);
    std::fill(rows + static_cast<int64_t>(t.rows) * ld, rows + int64_t{kPiece} * ld, 0.0f);
  }

  /// φ(K) and V'.
  void load_keys(const Piece& t, int64_t e, const Scratch& s) const {
    load(a_.k, t, s.phi, l_.dl);
    if (a_.mean_free_keys) k_.subtract_row(s.phi, l_.dl, t.rows, l_.mean + e * l_.dl);
    k_.softmax_rows(s.phi, l_.dl, t.rows, l_.d);
    load(a_.v, t, s.x, l_.columns);
    for (int r = 0; r < t.rows; ++r) s.x[r * l_.columns + l_.norm_column()] = 1.0f;
  }

  /// The sums of all tokens of a head, in the order of the blocks.
  void add_token_sums(int64_t e, double* sum) const {
    std::fill(sum, sum + l_.dl + 1, 0.0);
    for (int64_t j = 0; j < l_.k_blocks; ++j)
      for (int c = 0; c <= l_.dl; ++c) sum[c] += l_.token_sum(e, j)[c];
  }

  /// to[rows][n] = left[rows][depth] · right[depth][n]
  void multiply(const float* left, int left_stride, const float* right, int right_stride, int rows,
                int n, int depth, float* to, int ld) const {
    k_.store_f32(
        {static_cast<int>(round_up(rows, 4)), n, depth, left, left_stride, right, right_stride}, to,
        ld);
  }

  /// A matrix, or its next summand: φᵀ·right.
  void add_product(const Scratch& s, const float* right, int rows, bool first, float* to) const {
    k_.transpose_f32(s.phi, l_.dl, kPiece, l_.dl, s.phi_t, kPiece);
    const isa::FloatProduct product{l_.dl, l_.columns, rows, s.phi_t, kPiece, right, l_.columns};
    (first ? k_.store_f32 : k_.add_f32)(product, to, l_.columns);
  }

  void add_up(const BlockSums& sums) {
    run_items(a_.parallel_for, l_.slots, count_ * l_.dl, [&](int64_t, int64_t item) {
      const int64_t e = item / l_.dl, at = item % l_.dl * l_.columns;
      double *total = sums.total_of(e) + at, *magnitude = sums.magnitude_of(e) + at;
      std::fill_n(total, l_.columns, 0.0);
      std::fill_n(magnitude, l_.columns, 0.0);
      for (int64_t i = 0; i < sums.blocks; ++i) {
        k_.add_in_f64(sums.part(e, i) + at, l_.columns, total);
        k_.add_magnitudes_in_f64(sums.part(e, i) + at, l_.columns, magnitude);
      }
    });
  }

  /// Whether each number that a subtraction left is good to FP32. FP64 has 2^53 steps, so the
  /// rounding of what went in and out is 2^-27 of what is left for each term. NaN is not enough:
  /// what is excluded may have it.
  bool enough_left(const double* left, const double* magnitude) const {
    bool enough = true;
    for (int64_t i = 0; i < l_.matrix; ++i) enough &= std::fabs(left[i]) >= magnitude[i] * 0x1p-26;
    return enough;
  }

  /// f(first number, numbers) for parts of a matrix whose sums stay in the first cache.
  template <typename F>
  void for_chunks(F&& f) const {
    constexpr int64_t kChunk = 2048;
    for (int64_t at = 0; at < l_.matrix; at += kChunk) f(at, std::min(kChunk, l_.matrix - at));
  }

  /// s.matrix = the sum of the blocks that are not excluded: by those, or by the total minus the
  /// excluded ones, whichever are fewer. The total is the sum of just what is subtracted.
  void sum_others(const BlockSums& sums, int64_t e, const int32_t* excluded, int64_t count,
                  const Scratch& s) const {
    const double* total = sums.total_of(e);
    bool done = false;
    if (2 * count <= sums.blocks) {
      std::copy_n(total, l_.matrix, s.sum);
      for_chunks([&](int64_t at, int64_t size) {
        for (int64_t i = 0; i < count; ++i)
          k_.subtract_in_f64(sums.part(e, excluded[i]) + at, size, s.sum + at);
      });
      done = count == 0 || enough_left(s.sum, sums.magnitude_of(e));
    }
    if (!done) {
      std::fill_n(s.sum, l_.matrix, 0.0);
      std::memset(s.mark, 0, static_cast<size_t>(sums.blocks));
      for (int64_t i = 0; i < count; ++i) s.mark[excluded[i]] = 1;
      for_chunks([&](int64_t at, int64_t size) {
        for (int64_t i = 0; i < sums.blocks; ++i)
          if (s.mark[i] == 0) k_.add_in_f64(sums.part(e, i) + at, size, s.sum + at);
      });
    }
    for (int64_t i = 0; i < l_.matrix; ++i) s.matrix[i] = static_cast<float>(s.sum[i]);
  }

  void seen_by_queries(const Scratch& s, int64_t e, int64_t head, int64_t i) const {
    spec::BlockList list;
    if (p_.has_lists()) list = l_.lists.keys_of(p_, batch(e), head, i);
    sum_others(l_.h, e, list.index, list.count, s);
  }

  /// The blocks of queries of all heads of the group, one head after the other.
  void seen_by_keys(const Scratch& s, int64_t e, int64_t j) const {
    int64_t count = 0;
    for (int64_t g = 0; g < p_.group() && p_.has_lists(); ++g) {
      const spec::BlockList list =
          l_.lists.queries_of(p_, batch(e), key_head(e) * p_.group() + g, j);
      for (int64_t i = 0; i < list.count; ++i)
        s.excluded[count++] = static_cast<int32_t>(g * l_.q_blocks + list.index[i]);
    }
    sum_others(l_.dh, e, s.excluded, count, s);
  }

  void turn(const Scratch& s) const {
    k_.transpose_f32(s.matrix, l_.columns, l_.dl, l_.columns, s.turned, l_.dl);
  }

  /// φ(Q) in s.phi, O in s.y, and the norms. Where no key is left, or features that FP32 cannot
  /// hold, both are 0.
  void attend(const Piece& t, const Scratch& s, float* norm) const {
    load(a_.q, t, s.phi, l_.dl);
    k_.softmax_rows(s.phi, l_.dl, t.rows, l_.d);
    multiply(s.phi, l_.dl, s.matrix, l_.columns, t.rows, l_.columns, l_.dl, s.y, l_.columns);
    for (int r = 0; r < t.rows; ++r) {
      float* row = s.y + r * l_.columns;
      norm[r] = row[l_.norm_column()];
      if (norm[r] < FLT_MIN) norm[r] = 0.0f;
      const float inverse = inverse_of(norm[r]);
      for (int c = 0; c < l_.dl; ++c) row[c] *= inverse;
    }
  }

  static float inverse_of(float norm) { return norm == 0.0f ? 0.0f : 1.0f / norm; }

  /// dO' in s.x.
  void load_gradients(const LinearBackwardArgs& in, const Piece& t, const Scratch& s,
                      const float* norm) const {
    load(in.dout, t, s.x, l_.columns);
    for (int r = 0; r < t.rows; ++r) {
      float* row = s.x + r * l_.columns;
      const float* o = s.y + r * l_.columns;
      const float inverse = inverse_of(norm[r]);
      double dot = 0;
      for (int c = 0; c < l_.d; ++c) dot += static_cast<double>(row[c]) * static_cast<double>(o[c]);
      for (int c = 0; c < l_.d; ++c) row[c] *= inverse;
      float last = -static_cast<float>(dot) * inverse;
      if (in.dnorm.data != nullptr && norm[r] != 0.0f)
        last += *stat_at(in.dnorm, t.batch, t.head, t.first + r);
      row[l_.norm_column()] = last;
    }
  }

  const isa::Kernels& k_;
  const Layout& l_;
  const spec::LinearProblem& p_;
  const LinearArgs& a_;
  int64_t first_ = 0, count_ = 0;
};

template <typename F>
void for_passes(const Layout& l, Linear& linear, F&& pass) {
  const int64_t all = l.p.b * l.p.hk;
  for (int64_t first = 0; first < all; first += l.heads) {
    linear.take_heads(first, std::min(l.heads, all - first));
    pass();
  }
}

}  // namespace

size_t linear_workspace(const spec::LinearProblem& p) { return Layout(p, nullptr).bytes; }

void linear_forward(const isa::Kernels& kernels, const spec::LinearProblem& p,
                    const LinearForwardArgs& a, void* workspace) {
  Layout layout(p, workspace);
  layout.lists.fill(p);
  Linear linear(kernels, layout, a);
  for_passes(layout, linear, [&] {
    linear.sum_keys();
    linear.queries(a);
  });
}

void linear_backward(const isa::Kernels& kernels, const spec::LinearProblem& p,
                     const LinearBackwardArgs& a, void* workspace) {
  Layout layout(p, workspace);
  layout.lists.fill(p);
  Linear linear(kernels, layout, a);
  for_passes(layout, linear, [&] {
    linear.sum_keys();
    linear.query_gradients(a);
    linear.key_gradients(a);
  });
}

}  // namespace sagebwd::cpu::sla2
