// SPDX-License-Identifier: Apache-2.0
// Copies each head out of its strided view into FP32 rows, runs the recipe oracle, and writes the
// results back rounded to the tensors' type. It allocates what it needs, so it asks for no
// workspace.
#include "ref/ref.h"

#include <algorithm>
#include <vector>

#include "base/dispatch_dtype.h"
#include "base/parallel.h"
#include "numerics/quantize.h"
#include "ref/attention_recipe.h"
#include "ref/linear_exact.h"
#include "ref/problem_visibility.h"
#include "ref/saved_codes.h"
#include "spec/lists.h"

namespace sagebwd::ref {
namespace {

using spec::Problem;
using spec::Sequence;

std::string decline(const Problem& p) {
  if (p.mixes || p.has_averages) return "has a linear branch that neither mixes nor keeps averages";
  if (p.has_means) return "makes the means of the linear branch itself";
  return p.device == Device::cpu ? "" : "the reference runs on a CPU only";
}

backend::Tiles tiles(const Problem& p) { return backend::any_tiles(p, 255); }

size_t workspace(const Problem&) { return 0; }

/// One head of one sequence in a strided tensor.
struct HeadRows {
  const TensorView& view;
  int64_t batch, head, begin, count;

  int64_t offset(int64_t i) const {
    return batch * view.stride[0] + head * view.stride[1] + (begin + i) * view.stride[2];
  }

  std::vector<float> read() const {
    const int64_t d = view.shape[3];
    std::vector<float> out(static_cast<size_t>(count * d));
    with_dtype(view.dtype, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(view.data);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < d; ++c) out[i * d + c] = to_float(from[offset(i) + c]);
    });
    return out;
  }

  std::vector<double> read_wide() const {
    const std::vector<float> rows = read();
    return {rows.begin(), rows.end()};
  }

  template <typename T>
  void write(const std::vector<T>& rows) const {
    const int64_t d = view.shape[3];
    with_dtype(view.dtype, [&](auto type) {
      auto* to = static_cast<decltype(type)*>(view.data);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < d; ++c)
          to[offset(i) + c] = from_float<decltype(type)>(static_cast<float>(rows[i * d + c]));
    });
  }
};

HeadRows queries(const TensorView& view, const Sequence& s, int64_t head) {
  return {view, s.batch, head, s.q_begin, s.nq};
}
HeadRows keys(const TensorView& view, const Sequence& s, int64_t head) {
  return {view, s.batch, head, s.k_begin, s.nk};
}

float& stat(const StatsView& view, const Sequence& s, int64_t head, int64_t i) {
  return view
      .data[s.batch * view.stride[0] + head * view.stride[1] + (s.q_begin + i) * view.stride[2]];
}

std::vector<float> read_stats(const StatsView& view, const Sequence& s, int64_t head) {
  std::vector<float> out;
  for (int64_t i = 0; i < s.nq; ++i) out.push_back(stat(view, s, head, i));
  return out;
}

/// The FP32 inputs of one query head, and the oracle's view of them.
struct Inputs {
  Inputs(const Problem& p, const AttentionArgs& args, int64_t t, int64_t h)
      : sequence(p.sequence(t)) {
    if (p.direction == spec::Direction::backward && p.has_codes) {
      codes = read_codes(p, args.codes, t, h);
      head.codes = &codes;
    } else {
      q = queries(args.q, sequence, h).read();
      k = keys(args.k, sequence, h / p.group()).read();
      v = keys(args.v, sequence, h / p.group()).read();
    }
    head.nq = sequence.nq, head.nk = sequence.nk, head.d = p.d, head.dv = p.dv;
    head.q = q.data(), head.k = k.data(), head.v = v.data();
    head.scale = p.scale, head.softcap = p.softcap;
    head.visible = visibility_of(p, t, h);
    head.recipe = p.recipe;
    const backend::Tiles size = tiles(p);
    head.recipe.tile_q = size.q, head.recipe.tile_k = size.k;
    head.recipe.p_levels = size.p_levels;
    head.sequence = t, head.head = h;
  }
  Inputs(const Inputs&) = delete;

  Sequence sequence;
  std::vector<float> q, k, v;
  RecipeInputs codes;
  RecipeHead head;
};

void forward(const Problem& p, const ForwardArgs& args, void*) {
  parallel_for(args.parallel_for, p.num_sequences() * p.h, [&](int64_t item) {
    const int64_t t = item / p.h, h = item % p.h;
    const Inputs in(p, args, t, h);
    RecipeForward out = recipe_forward(in.head);
    for (float& x : out.o)
      if (p.dtype == Dtype::f16) x = numerics::within_f16(x);
    queries(args.o, in.sequence, h).write(out.o);
    for (int64_t i = 0; i < in.sequence.nq; ++i) stat(args.lse, in.sequence, h, i) = out.lse[i];
    if (args.max_logit != nullptr) args.max_logit[item] = out.max_logit;
    if (p.has_codes) write_codes(p, args.codes, t, h, out.inputs);
  });
}

void backward(const Problem& p, const BackwardArgs& args, void*) {
  // One item per key head: its query heads add up in order, so that the sum does not depend on
  // threads.
  parallel_for(args.parallel_for, p.num_sequences() * p.hk, [&](int64_t item) {
    const int64_t t = item / p.hk, hk = item % p.hk;
    const Sequence s = p.sequence(t);
    std::vector<float> dk(static_cast<size_t>(s.nk * p.d), 0.0f);
    std::vector<float> dv(static_cast<size_t>(s.nk * p.dv), 0.0f);
    for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h) {
      const Inputs in(p, args, t, h);
      const std::vector<float> o = queries(args.o, s, h).read(),
                               dout = queries(args.dout, s, h).read();
      const std::vector<float> lse = read_stats(args.lse, s, h);
      const std::vector<float> dlse =
          p.has_dlse ? read_stats(args.dlse, s, h) : std::vector<float>();
      const RecipeBackward out = recipe_backward(
          in.head,
          {o.data(), lse.data(), dout.data(), p.has_dlse ? dlse.data() : nullptr, p.partial_kv});
      queries(args.dq, s, h).write(out.dq);
      for (size_t n = 0; n < dk.size(); ++n) dk[n] += out.dk[n];
      for (size_t n = 0; n < dv.size(); ++n) dv[n] += out.dv[n];
    }
    keys(args.dk, s, hk).write(dk);
    keys(args.dv, s, hk).write(dv);
  });
}

/// The inputs of one query head of the linear branch, and the oracle's view of them.
struct LinearInputs {
  LinearInputs(const Problem& p, const LinearArgs& args, int64_t t, int64_t h)
      : sequence(p.sequence(t)),
        q(queries(args.q, sequence, h).read_wide()),
        k(keys(args.k, sequence, h / p.group()).read_wide()),
        v(keys(args.v, sequence, h / p.group()).read_wide()) {
    head.nq = p.nq, head.nk = p.nk, head.d = p.d;
    head.q = q.data(), head.k = k.data(), head.v = v.data();
    head.block_q = p.blocks.block_q, head.block_k = p.blocks.block_k;
    head.mean_free_keys = args.mean_free_keys;
    if (!p.has_lists()) return;
    head.excluded = [&p, t, h](int64_t query_block, int64_t key_block) {
      const spec::ListSets sets(p);
      const spec::BlockList list = sets.row(sets.of(t, h), query_block);
      return std::find(list.index, list.index + list.count, key_block) != list.index + list.count;
    };
  }
  LinearInputs(const LinearInputs&) = delete;

  Sequence sequence;
  std::vector<double> q, k, v;
  LinearHead head;
};

void linear_forward(const Problem& p, const LinearForwardArgs& args, void*) {
  parallel_for(args.parallel_for, p.b * p.h, [&](int64_t item) {
    const int64_t t = item / p.h, h = item % p.h;
    const LinearInputs in(p, args, t, h);
    const LinearResult out = linear_exact(in.head);
    queries(args.o, in.sequence, h).write(out.o);
    for (int64_t i = 0; i < p.nq && args.norm.data != nullptr; ++i)
      stat(args.norm, in.sequence, h, i) = static_cast<float>(out.norm[i]);
  });
}

void linear_backward(const Problem& p, const LinearBackwardArgs& args, void*) {
  parallel_for(args.parallel_for, p.b * p.hk, [&](int64_t item) {
    const int64_t t = item / p.hk, hk = item % p.hk;
    const Sequence s = p.sequence(t);
    std::vector<double> dk(static_cast<size_t>(s.nk * p.d), 0.0), dv(dk);
    for (int64_t h = hk * p.group(); h < (hk + 1) * p.group(); ++h) {
      LinearInputs in(p, args, t, h);
      const std::vector<double> dout = queries(args.dout, s, h).read_wide();
      std::vector<double> dnorm;
      for (int64_t i = 0; i < p.nq && args.dnorm.data != nullptr; ++i)
        dnorm.push_back(static_cast<double>(stat(args.dnorm, s, h, i)));
      in.head.dout = dout.data(), in.head.dnorm = dnorm.empty() ? nullptr : dnorm.data();
      const LinearResult out = linear_exact(in.head);
      if (p.nq == 0) continue;
      queries(args.dq, s, h).write(out.dq);
      for (size_t n = 0; n < dk.size(); ++n) dk[n] += out.dk[n], dv[n] += out.dv[n];
    }
    keys(args.dk, s, hk).write(dk);
    keys(args.dv, s, hk).write(dv);
  });
}

}  // namespace

const backend::Implementation& implementation() {
  static const backend::Implementation impl{"ref",          decline,        tiles,   workspace,
                                            forward,        backward,       decline, workspace,
                                            linear_forward, linear_backward};
  return impl;
}

}  // namespace sagebwd::ref
