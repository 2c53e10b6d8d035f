// SPDX-License-Identifier: Apache-2.0
// Copies each head out of its strided view into FP32 rows, runs the recipe oracle, and writes the
// results back rounded to the tensors' type. It allocates what it needs, so it asks for no
// workspace.
#include "ref/ref.h"

#include <vector>

#include "base/parallel.h"
#include "numerics/quantize.h"
#include "ref/attention_recipe.h"
#include "ref/head_rows.h"
#include "ref/problem_visibility.h"
#include "ref/saved_codes.h"

namespace sagebwd::ref {
namespace {

using spec::Problem;
using spec::Sequence;

std::string decline(const Problem& p) {
  return p.device == Device::cpu ? "" : "the reference runs on a CPU only";
}

backend::Tiles tiles(const Problem& p) { return backend::any_tiles(p, 255); }

size_t workspace(const Problem&) { return 0; }

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
    head.lead = p.lead(), head.levels_of_p = size.p_levels;
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

}  // namespace

const backend::Implementation& implementation() {
  static const backend::Implementation impl{"ref", decline, tiles, workspace, forward, backward};
  return impl;
}

}  // namespace sagebwd::ref
