// SPDX-License-Identifier: Apache-2.0
// The linear branch: copies each head out of its strided view and runs the exact oracle.
#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "ref/head_rows.h"
#include "ref/linear_exact.h"
#include "ref/ref.h"
#include "spec/lists.h"

namespace sagebwd::ref {
namespace {

using spec::LinearProblem;
using spec::Sequence;

std::string decline(const LinearProblem& p) {
  if (p.mixes || p.has_averages) return "has a linear branch that neither mixes nor keeps averages";
  if (p.has_means) return "makes the means of the linear branch itself";
  return p.device == Device::cpu ? "" : "the reference runs on a CPU only";
}

size_t workspace(const LinearProblem&) { return 0; }

/// The inputs of one query head of the linear branch, and the oracle's view of them.
struct LinearInputs {
  LinearInputs(const LinearProblem& p, const LinearArgs& args, int64_t t, int64_t h)
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

void forward(const LinearProblem& p, const LinearForwardArgs& args, void*) {
  parallel_for(args.parallel_for, p.b * p.h, [&](int64_t item) {
    const int64_t t = item / p.h, h = item % p.h;
    const LinearInputs in(p, args, t, h);
    const LinearResult out = linear_exact(in.head);
    queries(args.o, in.sequence, h).write(out.o);
    for (int64_t i = 0; i < p.nq && args.norm.data != nullptr; ++i)
      stat(args.norm, in.sequence, h, i) = static_cast<float>(out.norm[i]);
  });
}

void backward(const LinearProblem& p, const LinearBackwardArgs& args, void*) {
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

const backend::Sla2& linear() {
  static const backend::Sla2 impl{.name = "ref",
                                  .decline = decline,
                                  .workspace = workspace,
                                  .forward = forward,
                                  .backward = backward};
  return impl;
}

}  // namespace sagebwd::ref
