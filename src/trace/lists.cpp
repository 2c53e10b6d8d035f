// SPDX-License-Identifier: Apache-2.0
#include "trace/lists.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "base/hash.h"
#include "base/math.h"
#include "base/parallel.h"

namespace sagebwd::trace {
namespace {

constexpr uint64_t kRandomBlock = 0x6c69737473;  // keeps these numbers apart from those of inputs

/// One head of one sequence.
struct Head {
  const spec::AttnCase& c;
  const spec::Problem& p;
  const Inputs& in;
  spec::Sequence s;
  int64_t sequence, head;

  int64_t rows() const { return ceil_div(s.nq, c.block_q); }
  int64_t key_blocks() const { return ceil_div(s.nk, c.block_k); }
  const float* query(int64_t i) const {
    return in.q.data() + ((s.batch * c.h + head) * c.nq + s.q_begin + i) * c.d;
  }
  const float* key(int64_t j) const {
    return in.k.data() + ((s.batch * c.hk + head / p.group()) * c.nk + s.k_begin + j) * c.d;
  }
};

/// The probability that the queries of a row give to each key block, times the number of queries.
std::vector<double> mass_of_row(const Head& h, const std::vector<float>& kt, int64_t row) {
  std::vector<double> mass(static_cast<size_t>(h.key_blocks()), 0.0);
  std::vector<float> s(static_cast<size_t>(h.s.nk));
  for (int64_t i = row * h.c.block_q; i < std::min((row + 1) * h.c.block_q, h.s.nq); ++i) {
    const spec::KeyRange seen = h.p.visible(h.s, i);
    if (seen.begin >= seen.end) continue;
    std::fill(s.begin(), s.end(), 0.0f);
    for (int64_t ch = 0; ch < h.c.d; ++ch) {
      const float q = h.query(i)[ch] * h.p.scale;
      const float* k = &kt[ch * h.s.nk];
      for (int64_t j = seen.begin; j < seen.end; ++j) s[j] += q * k[j];
    }
    if (h.p.capped())
      for (int64_t j = seen.begin; j < seen.end; ++j)
        s[j] = h.p.softcap * std::tanh(s[j] / h.p.softcap);
    const float top = *std::max_element(s.begin() + seen.begin, s.begin() + seen.end);
    double sum = 0;
    for (int64_t j = seen.begin; j < seen.end; ++j) sum += s[j] = std::exp(s[j] - top);
    for (int64_t j = seen.begin; j < seen.end; ++j) mass[j / h.c.block_k] += s[j] / sum;
  }
  return mass;
}

/// How much a row wants each key block; blocks it may not list have nothing.
std::vector<double> wishes(const Head& h, const std::vector<float>& kt, int64_t row) {
  if (h.c.lists == spec::ListKind::mass) return mass_of_row(h, kt, row);
  std::vector<double> wish(static_cast<size_t>(h.key_blocks()));
  const int64_t always = h.c.listed(h.key_blocks()) / 2;
  for (int64_t block = 0; block < h.key_blocks(); ++block) {
    const auto key = [](int64_t x) { return static_cast<uint64_t>(x); };
    wish[block] =
        1e-3 + static_cast<double>(unit_float(hash64(
                   {h.c.seed, kRandomBlock, key(h.sequence), key(h.head), key(row), key(block)})));
    if (h.c.lists == spec::ListKind::skewed && block < always) wish[block] += 1;
    if (h.c.lists == spec::ListKind::diagonal) {
      const int64_t shift = h.p.align == Align::bottom_right ? h.s.nk - h.s.nq : 0;
      const double middle =
          (static_cast<double>(row) + 0.5) * h.c.block_q + static_cast<double>(shift);
      const double distance = std::abs((static_cast<double>(block) + 0.5) * h.c.block_k - middle);
      wish[block] = 1 / (1 + distance);
    }
  }
  return wish;
}

void fill_rows(const Head& h, int64_t width, int32_t* index, int32_t* count) {
  std::vector<float> kt;
  if (h.c.lists == spec::ListKind::mass) {
    kt.resize(static_cast<size_t>(h.s.nk * h.c.d));
    for (int64_t j = 0; j < h.s.nk; ++j)
      for (int64_t ch = 0; ch < h.c.d; ++ch) kt[ch * h.s.nk + j] = h.key(j)[ch];
  }
  const int64_t most = h.key_blocks() == 0 ? 0 : h.c.listed(h.key_blocks());
  for (int64_t row = 0; row < h.rows(); ++row) {
    const std::vector<double> wish = wishes(h, kt, row);
    std::vector<int32_t> order(wish.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return wish[a] > wish[b]; });
    int32_t used = 0;
    while (used < most && wish[order[used]] > 0) ++used;
    std::copy_n(order.begin(), used, index + row * width);
    count[row] = used;
  }
}

}  // namespace

Lists make_lists(const spec::AttnCase& c, const Inputs& in, const Documents& documents) {
  Lists lists;
  if (!c.has_lists()) return lists;
  spec::Problem p = c.problem();
  p.documents = documents;
  lists.shape = p.blocks;
  if (p.packed()) {
    lists.shape.rows = lists.shape.width = 0;
    for (int64_t t = 0; t < p.num_sequences(); ++t) {
      const spec::Sequence s = p.sequence(t);
      lists.shape.rows += ceil_div(s.nq, c.block_q);
      if (s.nk > 0)
        lists.shape.width = std::max(lists.shape.width, c.listed(ceil_div(s.nk, c.block_k)));
    }
    lists.shape.stride_head = lists.shape.rows, lists.shape.stride_batch = c.h * lists.shape.rows;
  }
  const int64_t rows = lists.shape.rows, width = lists.shape.width;
  lists.index.assign(static_cast<size_t>(c.b * c.h * rows * width), -1);
  lists.count.assign(static_cast<size_t>(c.b * c.h * rows), 0);
  std::vector<int64_t> first(1, 0);  // row of each sequence within its batch entry
  for (int64_t t = 0; t < p.num_sequences(); ++t)
    first.push_back(p.packed() ? first.back() + ceil_div(p.sequence(t).nq, c.block_q) : 0);
  parallel_for({}, p.num_sequences() * c.h, [&](int64_t item) {
    const int64_t t = item / c.h, head = item % c.h;
    const Head h{c, p, in, p.sequence(t), t, head};
    const int64_t row = (h.s.batch * c.h + head) * rows + first[static_cast<size_t>(t)];
    fill_rows(h, width, lists.index.data() + row * width, lists.count.data() + row);
  });
  return lists;
}

}  // namespace sagebwd::trace
