// SPDX-License-Identifier: Apache-2.0
#include "spec/overlap.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "spec/averages.h"
#include "spec/codes.h"
#include "spec/lists.h"

namespace sagebwd::spec {
namespace {

/// One dimension of the difference of two addresses: a multiple of `size` from low to high times.
struct Step {
  int64_t size, low, high;
};

/// More places to look at than any layout of nested dimensions has.
constexpr int kMostPlaces = 4096;

/// Whether a sum of one multiple of each step lies in [low, high]. Steps come largest first, so the
/// smaller ones together can rarely make up for another multiple, and few multiples come into
/// question.
bool reaches(const Step* step, const Step* end, int64_t low, int64_t high, int& places) {
  if (step == end) return low <= 0 && 0 <= high;
  int64_t rest_low = 0, rest_high = 0;
  for (const Step* s = step + 1; s != end; ++s)
    rest_low += s->low * s->size, rest_high += s->high * s->size;
  const int64_t first = std::max(step->low, -floor_div(rest_high - low, step->size));
  const int64_t last = std::min(step->high, floor_div(high - rest_low, step->size));
  for (int64_t i = first; i <= last && places > 0; ++i) {
    --places;
    if (reaches(step + 1, end, low - i * step->size, high - i * step->size, places)) return true;
  }
  return false;
}

bool empty(const Region& r) {
  return r.row == 0 || r.count[0] == 0 || r.count[1] == 0 || r.count[2] == 0;
}

/// Bytes from the first to behind the last.
int64_t extent(const Region& r) {
  int64_t bytes = r.row;
  for (size_t i = 0; i < 3; ++i) bytes += (r.count[i] - 1) * r.step[i];
  return bytes;
}

Region line(const char* name, const void* data, int64_t bytes) {
  return {name, reinterpret_cast<uintptr_t>(data), data == nullptr ? 0 : bytes, {1, 1, 1}, {}};
}

/// Strides that nobody takes, of one row or of an empty tensor, may be any number.
void add_rows(Region& r, const int64_t* count, const int64_t* stride, int64_t element) {
  std::copy_n(count, 3, r.count.begin());
  for (size_t i = 0; i < 3 && !empty(r); ++i) r.step[i] = count[i] > 1 ? stride[i] * element : 0;
}

Region line(const char* name, const float* data, int64_t numbers) {
  return line(name, static_cast<const void*>(data), numbers * static_cast<int64_t>(sizeof(float)));
}

Region region(const char* name, const StatsView& s, int64_t b, int64_t h, int64_t n) {
  Region r = line(name, s.data, 1);
  const int64_t count[] = {b, h, n};
  add_rows(r, count, s.stride.data(), sizeof(float));
  return r;
}
Region region(const char* name, const StatsView& s, const Batch& p) {
  return region(name, s, p.b, p.h, p.nq);
}

void refuse(const Region& a, const Region& b) {
  SAGE_CHECK(!overlap(a, b), a.name << ": expected memory of its own, got memory that " << b.name
                                    << " uses as well");
}

Region codes_region(const Problem& p, const AttentionArgs& a) {
  return line("codes", a.codes, a.codes == nullptr ? 0 : codes_layout(p).bytes);
}

Region alpha_region(int64_t heads, const Alpha& alpha) {
  return line("alpha", alpha.data, alpha.batches * heads * alpha.rows);
}
void add_means(const LinearProblem& p, const LinearArgs& a, std::vector<Region>& read) {
  if (!p.has_means) return;
  const int64_t numbers = p.b * p.hk * p.d;
  read.insert(read.end(), {line("k_mean", a.k_mean, numbers), line("v_mean", a.v_mean, numbers)});
}
Region averages_region(const LinearProblem& p, const void* averages) {
  return line("averages", averages, p.has_averages ? AveragesLayout(p).bytes : 0);
}

/// From the first row of the lists to behind the last one.
void add_lists(const Batch& p, std::vector<Region>& read) {
  const BlockLists& l = p.blocks;
  const ListSets sets(p);
  if (sets.count() == 0) return;
  const int64_t rows = sets.first_row(sets.count() - 1) + l.rows;
  const int64_t entries = l.offset != nullptr ? l.offset[rows] : rows * l.width;
  read.push_back(line("blocks.index", l.index, entries * static_cast<int64_t>(sizeof(int32_t))));
  read.push_back(line("blocks.count", l.count, rows * static_cast<int64_t>(sizeof(int32_t))));
  read.push_back(
      line("blocks.offset", l.offset, (rows + 1) * static_cast<int64_t>(sizeof(int64_t))));
}

void check_apart(const void* workspace, size_t bytes, std::initializer_list<Region> written,
                 const std::vector<Region>& read) {
  const Region space = line("workspace", workspace, static_cast<int64_t>(bytes));
  for (const Region* w = written.begin(); w != written.end(); ++w) {
    for (const Region& r : read) refuse(*w, r);
    for (const Region* other = written.begin(); other != w; ++other) refuse(*w, *other);
    refuse(space, *w);
  }
  for (const Region& r : read) refuse(space, r);
}

void check(const Batch& p, const void* workspace, size_t bytes,
           std::initializer_list<Region> written, std::vector<Region> read) {
  const int64_t offsets =
      p.packed() ? (p.documents.count + 1) * static_cast<int64_t>(sizeof(int32_t)) : 0;
  read.push_back(line("documents.cu_q", p.documents.cu_q, offsets));
  read.push_back(line("documents.cu_k", p.documents.cu_k, offsets));
  if (p.has_lists() && !p.blocks.on_device) add_lists(p, read);
  check_apart(workspace, bytes, written, read);
}

std::vector<Region> mix_inputs(const MixProblem& p, const Alpha& alpha, const StatsView& norm) {
  return {alpha_region(p.h, alpha), region("norm", norm, p.b, p.h, p.n)};
}

}  // namespace

Region region(const char* name, const TensorView& t) {
  const int64_t size = dtype_size(t.dtype);
  Region r = line(name, t.data, t.shape[3] * size);
  add_rows(r, t.shape.data(), t.stride.data(), size);
  return r;
}

bool overlap(const Region& a, const Region& b) {
  if (empty(a) || empty(b)) return false;
  // The usual case: one ends before the other begins.
  if (a.begin <= b.begin ? b.begin - a.begin >= static_cast<uintptr_t>(extent(a))
                         : a.begin - b.begin >= static_cast<uintptr_t>(extent(b)))
    return false;
  std::array<Step, 6> steps{};
  size_t used = 0;
  const auto add = [&](int64_t size, int64_t low, int64_t high) {
    if (size == 0 || low == high) return;
    for (size_t i = 0; i < used; ++i)
      if (steps[i].size == size) {
        steps[i].low += low, steps[i].high += high;
        return;
      }
    steps[used++] = {size, low, high};
  };
  for (size_t i = 0; i < 3; ++i) {
    add(a.step[i], 0, a.count[i] - 1);
    add(b.step[i], -(b.count[i] - 1), 0);
  }
  std::sort(steps.begin(), steps.end(),  // unused ones have size 0 and stay behind
            [](const Step& x, const Step& y) { return x.size > y.size; });
  // A row of a at x and one of b at y share a byte when -a.row < x - y < b.row.
  const int64_t apart = static_cast<int64_t>(b.begin - a.begin);
  int places = kMostPlaces;
  return reaches(steps.data(), steps.data() + used, apart - a.row + 1, apart + b.row - 1, places);
}

void check_overlap(const Problem& p, const ForwardArgs& a, const void* workspace, size_t bytes) {
  const int64_t logits = p.num_sequences() * p.h;
  check(p, workspace, bytes,
        {region("o", a.o), region("lse", a.lse, p), line("max_logit", a.max_logit, logits),
         codes_region(p, a)},
        {region("q", a.q), region("k", a.k), region("v", a.v)});
}

void check_overlap(const Problem& p, const BackwardArgs& a, const void* workspace, size_t bytes) {
  std::vector<Region> read{region("o", a.o), region("lse", a.lse, p), region("dout", a.dout),
                           region("dlse", a.dlse, p), codes_region(p, a)};
  if (!p.has_codes) read.insert(read.end(), {region("q", a.q), region("k", a.k), region("v", a.v)});
  check(p, workspace, bytes, {region("dq", a.dq), region("dk", a.dk), region("dv", a.dv)},
        std::move(read));
}

void check_overlap(const LinearProblem& p, const LinearForwardArgs& a, const void* workspace,
                   size_t bytes) {
  std::vector<Region> read{region("q", a.q), region("k", a.k), region("v", a.v)};
  add_means(p, a, read);
  if (p.mixes) read.insert(read.end(), {region("sparse", a.sparse), alpha_region(p.h, a.alpha)});
  check(p, workspace, bytes,
        {region("o", a.o), region("norm", a.norm, p), averages_region(p, a.averages)},
        std::move(read));
}

void check_overlap(const LinearProblem& p, const LinearBackwardArgs& a, const void* workspace,
                   size_t bytes) {
  std::vector<Region> read{region("q", a.q),
                           region("k", a.k),
                           region("v", a.v),
                           region("dout", a.dout),
                           region("dnorm", a.dnorm, p),
                           averages_region(p, a.averages)};
  add_means(p, a, read);
  Region dalpha;
  if (p.mixes) {
    read.insert(read.end(), {region("dq_sparse", a.dq_sparse), region("dk_sparse", a.dk_sparse),
                             region("dv_sparse", a.dv_sparse), alpha_region(p.h, a.alpha)});
    Alpha written = a.alpha;
    written.data = a.dalpha;
    dalpha = alpha_region(p.h, written);
    dalpha.name = "dalpha";
  }
  check(p, workspace, bytes, {region("dq", a.dq), region("dk", a.dk), region("dv", a.dv), dalpha},
        std::move(read));
}

void check_overlap(const MixProblem& p, const MixForwardArgs& a) {
  std::vector<Region> read = mix_inputs(p, a.alpha, a.norm);
  read.insert(read.end(), {region("sparse", a.sparse), region("linear", a.linear)});
  check_apart(nullptr, 0, {region("out", a.out)}, read);
}

void check_overlap(const MixProblem& p, const MixBackwardArgs& a, const void* workspace,
                   size_t bytes) {
  std::vector<Region> read = mix_inputs(p, a.alpha, a.norm);
  read.insert(read.end(),
              {region("sparse", a.sparse), region("linear", a.linear), region("dout", a.dout)});
  check_apart(workspace, bytes,
              {region("dsparse", a.dsparse), region("dlinear", a.dlinear),
               line("dalpha", a.dalpha, a.alpha.batches * p.h * a.alpha.rows)},
              read);
}

void check_overlap(const MixProblem& p, const MixSparseArgs& a) {
  std::vector<Region> read = mix_inputs(p, a.alpha, a.norm);
  read.insert(read.end(), {region("sparse", a.sparse), region("dout", a.dout)});
  check_apart(nullptr, 0,
              {region("dsparse", a.dsparse), line("parts", a.parts, p.b * p.h * p.pieces())}, read);
}

void check_overlap(const MeansProblem& p, const BlockMeansArgs& a, const void* workspace,
                   size_t bytes) {
  check_apart(workspace, bytes,
              {line("q_means", a.q_means, p.b * p.h * p.q_blocks * p.d),
               line("k_means", a.k_means, p.k_numbers())},
              {region("q", a.q), region("k", a.k)});
}

void check_overlap(const TopKArgs& a) {
  constexpr int64_t kSize = sizeof(int32_t);
  check_apart(
      nullptr, 0,
      {line("index", a.index, a.rows * a.k * kSize), line("count", a.count, a.rows * kSize)},
      {line("scores", a.scores, a.rows * a.columns)});
}

}  // namespace sagebwd::spec
