// SPDX-License-Identifier: Apache-2.0
#include "trace_run.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "attention_run.h"
#include "base/check.h"
#include "base/parallel.h"
#include "ref/attention_exact.h"
#include "ref/problem_visibility.h"

namespace sagebwd::cli {
namespace {

using spec::AttnCase;
using trace::ErrorStats;
using trace::HeadErrors;

/// Outputs of the library for one source and variant.
struct Outputs {
  std::vector<float> o, dq, dk, dv;
  Candidate forward, backward;
};

Outputs run_library(const AttnCase& c, const trace::Inputs& in, const trace::Lists& lists) {
  const AttentionRun run(c, in, lists);
  run.forward();
  run.backward();
  return {run.o(), run.dq(), run.dk(), run.dv(), run.forward_choice(), run.backward_choice()};
}

/// One head of a contiguous [b, heads, n, d] tensor.
const float* head_of(const std::vector<float>& x, int64_t index, int64_t n, int64_t d) {
  return x.data() + index * n * d;
}

/// What query head `index` out of b·h sees.
ref::Visibility visible_keys(const AttnCase& c, const trace::Lists& lists, int64_t index) {
  spec::Problem p = c.problem();
  p.blocks = lists.view();
  return ref::visibility_of(p, index / c.h, index % c.h);
}

/// Compares dK and dV of a key head that several query heads share. compare_head sees one query
/// head at a time, so it cannot compare their sum.
void compare_shared_keys(const AttnCase& c, const trace::Inputs& in, const trace::Lists& lists,
                         const Outputs& out, int64_t kv, ErrorStats& dk, ErrorStats& dv) {
  const int64_t group = c.h / c.hk, d = c.d, value_d = c.value_dim();
  const auto widened = [](const float* x, int64_t n) { return std::vector<double>(x, x + n); };
  const auto k = widened(head_of(in.k, kv, c.nk, d), c.nk * d),
             v = widened(head_of(in.v, kv, c.nk, value_d), c.nk * value_d);
  std::vector<double> dk_exact(k.size()), dv_exact(v.size());
  for (int64_t g = 0; g < group; ++g) {
    const auto q = widened(head_of(in.q, kv * group + g, c.nq, d), c.nq * d);
    const auto dout = widened(head_of(in.dout, kv * group + g, c.nq, value_d), c.nq * value_d);
    ref::ExactHead head;
    head.nq = c.nq, head.nk = c.nk, head.d = d, head.dv = value_d;
    head.q = q.data(), head.k = k.data(), head.v = v.data(), head.dout = dout.data();
    head.scale = static_cast<double>(c.logit_scale());
    head.softcap = static_cast<double>(c.softcap);
    head.visible = visible_keys(c, lists, kv * group + g);
    const ref::ExactResult exact = ref::attention_exact(head);
    for (size_t i = 0; i < dk_exact.size(); ++i) dk_exact[i] += exact.dk[i];
    for (size_t i = 0; i < dv_exact.size(); ++i) dv_exact[i] += exact.dv[i];
  }
  for (int64_t j = 0; j < c.nk; ++j) {
    dk.add_row(head_of(out.dk, kv, c.nk, d) + j * d, &dk_exact[j * d], d, j);
    dv.add_row(head_of(out.dv, kv, c.nk, value_d) + j * value_d, &dv_exact[j * value_d], value_d,
               j);
  }
  dk.finish(), dv.finish();
}

/// Errors of query head `index` out of b·h. The first head of a group fills in those of the shared
/// dK and dV.
HeadErrors compare(const AttnCase& c, const trace::Inputs& in, const trace::Lists& lists,
                   const Outputs& out, int64_t index) {
  const int64_t group = c.h / c.hk, kv = index / group, value_d = c.value_dim();
  ref::RecipeHead head;
  head.nq = c.nq, head.nk = c.nk, head.d = c.d, head.dv = value_d;
  head.q = head_of(in.q, index, c.nq, c.d);
  head.k = head_of(in.k, kv, c.nk, c.d), head.v = head_of(in.v, kv, c.nk, value_d);
  head.scale = c.logit_scale(), head.softcap = c.softcap;
  head.visible = visible_keys(c, lists, index);
  head.recipe = c.recipe, head.lead = c.problem().lead();
  head.recipe.tile_q = out.backward.tile_q, head.recipe.tile_k = out.backward.tile_k;
  head.levels_of_p = out.backward.p_levels;
  head.sequence = index / c.h, head.head = index % c.h;
  trace::HeadOutputs given{head_of(out.o, index, c.nq, value_d), head_of(out.dq, index, c.nq, c.d)};
  if (group == 1)
    given.dk = head_of(out.dk, kv, c.nk, c.d), given.dv = head_of(out.dv, kv, c.nk, value_d);

  HeadErrors errors =
      trace::compare_head(head, head_of(in.dout, index, c.nq, value_d), c.dtype, given);
  if (group > 1) {
    errors.dk = {}, errors.dv = {};
    if (index % group == 0) compare_shared_keys(c, in, lists, out, kv, errors.dk, errors.dv);
  }
  return errors;
}

TensorError summarise(const AttnCase& c, const std::vector<HeadErrors>& heads,
                      ErrorStats HeadErrors::*tensor) {
  ErrorStats all;
  TensorError e;
  for (size_t i = 0; i < heads.size(); ++i) {
    const ErrorStats& head = heads[i].*tensor;
    all.append(head);
    e.worst_head_rel_l2 = std::max(e.worst_head_rel_l2, head.rel_l2);
    if (head.worst_row < 0 || (e.worst_row >= 0 && head.worst_row_error <= e.worst_row_error))
      continue;
    e.worst_batch = static_cast<int64_t>(i) / c.h, e.worst_head = static_cast<int64_t>(i) % c.h;
    e.worst_row = head.worst_row, e.worst_row_error = head.worst_row_error;
  }
  all.finish();
  e.cosine = all.cosine, e.rel_l2 = all.rel_l2, e.projection = all.projection,
  e.bad_rows = all.bad_row_fraction;
  return e;
}

}  // namespace

std::vector<TraceResult> run_trace(const TracePlan& plan, const SafeTensors* file, Talk talk) {
  std::vector<TraceResult> results;
  Progress progress(plan.cases(), talk);
  for (const Source& source : plan.sources) {
    const trace::Inputs in = load(source, file);
    const trace::Lists lists = trace::make_lists(source.shape, in);
    // All heads of all variants of a source are one loop, so that few heads still keep all threads
    // busy.
    const int64_t heads = source.shape.b * source.shape.h;
    std::vector<AttnCase> cases;
    std::vector<Outputs> outputs;
    for (const Variant& variant : plan.variants) {
      cases.push_back(source.shape);
      cases.back().recipe = variant.settings;
      outputs.push_back(run_library(cases.back(), in, lists));
    }
    std::vector<std::vector<HeadErrors>> errors(cases.size(), std::vector<HeadErrors>(heads));
    std::vector<std::atomic<int64_t>> missing(cases.size());
    for (auto& m : missing) m = heads;
    parallel_for({}, static_cast<int64_t>(cases.size()) * heads, [&](int64_t item) {
      const int64_t v = item / heads, index = item % heads;
      errors[v][index] = compare(cases[v], in, lists, outputs[v], index);
      if (--missing[v] == 0) {
        const Variant& variant = plan.variants[v];
        progress.done(source.label() + " " + variant.recipe +
                      (variant.lift.empty() ? "" : " lift " + variant.lift));
      }
    });
    for (size_t v = 0; v < cases.size(); ++v) {
      const Outputs& out = outputs[v];
      TraceResult r{
          source, plan.variants[v], out.backward.name, out.backward.tile_q, out.backward.tile_k,
          {}};
      if (out.forward.name != out.backward.name)
        r.implementation = out.forward.name + " / " + out.backward.name;
      // The oracle runs both directions with one tile size.
      SAGE_INTERNAL(out.forward.tile_q == out.backward.tile_q &&
                    out.forward.tile_k == out.backward.tile_k);
      for (const auto& [name, tensor] : HeadErrors::names())
        r.tensors[name] = summarise(cases[v], errors[v], tensor);
      const int64_t group = source.shape.h / source.shape.hk;
      for (const char* name : {"dK", "dV"}) r.tensors[name].worst_head /= group;
      results.push_back(std::move(r));
    }
  }
  return results;
}

}  // namespace sagebwd::cli
