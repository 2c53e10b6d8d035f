// SPDX-License-Identifier: Apache-2.0
#include "ref/saved_codes.h"

#include <algorithm>

#include "numerics/octaves.h"
#include "spec/codes.h"

namespace sagebwd::ref {
namespace {

/// Where the tokens of one head of one sequence lie in the saved codes.
struct Place {
  Place(const spec::Problem& problem, void* codes, int64_t t, int64_t h)
      : p(problem), view(problem, codes), s(problem.sequence(t)) {
    const int64_t hk = h / p.group();
    query = h * p.b * p.nq + s.batch * p.nq + s.q_begin;
    key = hk * p.b * p.nk + s.batch * p.nk + s.k_begin;
    block = hk * view.layout.key_blocks + spec::first_key_block(p, t);
    writes_keys = h % p.group() == 0;
  }
  /// The row of an octave's centre.
  int64_t centre(int octave) const { return block + numerics::first_block_of(octave); }
  const spec::Problem& p;
  spec::CodesView view;
  spec::Sequence s;
  int64_t query, key, block;  // the first of each
  bool writes_keys;
};

}  // namespace

void write_codes(const spec::Problem& p, void* codes, int64_t t, int64_t h,
                 const RecipeInputs& in) {
  const Place at(p, codes, t, h);
  std::copy(in.q8.begin(), in.q8.end(), at.view.q8() + at.query * p.d);
  std::copy(in.q_scale.begin(), in.q_scale.end(), at.view.q_scale() + at.query);
  if (!at.writes_keys) return;
  std::copy(in.k8.begin(), in.k8.end(), at.view.k8() + at.key * p.d);
  std::copy(in.v8.begin(), in.v8.end(), at.view.v8() + at.key * p.dv);
  std::copy(in.v_scale.begin(), in.v_scale.end(), at.view.v_scale() + at.key);
  std::copy(in.k_scale.begin(), in.k_scale.end(), at.view.k_scale() + at.key);
  for (int octave = 0; octave < numerics::octaves_of(at.s.nk); ++octave) {
    std::copy_n(&in.centre8[static_cast<size_t>(octave * p.d)], p.d,
                at.view.centre8() + at.centre(octave) * p.d);
    at.view.centre_scale()[at.centre(octave)] = in.centre_scale[static_cast<size_t>(octave)];
    std::copy_n(&in.v_centre8[static_cast<size_t>(octave * p.dv)], p.dv,
                at.view.v_centre8() + at.centre(octave) * p.dv);
    at.view.v_centre_scale()[at.centre(octave)] = in.v_centre_scale[static_cast<size_t>(octave)];
  }
}

RecipeInputs read_codes(const spec::Problem& p, void* codes, int64_t t, int64_t h) {
  const Place at(p, codes, t, h);
  RecipeInputs in;
  const auto copy = [](auto& to, const auto* from, int64_t count) {
    to.assign(from, from + count);
  };
  copy(in.q8, at.view.q8() + at.query * p.d, at.s.nq * p.d);
  copy(in.q_scale, at.view.q_scale() + at.query, at.s.nq);
  copy(in.k8, at.view.k8() + at.key * p.d, at.s.nk * p.d);
  copy(in.v8, at.view.v8() + at.key * p.dv, at.s.nk * p.dv);
  copy(in.v_scale, at.view.v_scale() + at.key, at.s.nk);
  copy(in.k_scale, at.view.k_scale() + at.key, at.s.nk);
  for (int octave = 0; octave < numerics::octaves_of(at.s.nk); ++octave) {
    const int8_t* centre = at.view.centre8() + at.centre(octave) * p.d;
    in.centre8.insert(in.centre8.end(), centre, centre + p.d);
    in.centre_scale.push_back(at.view.centre_scale()[at.centre(octave)]);
    const int8_t* v_centre = at.view.v_centre8() + at.centre(octave) * p.dv;
    in.v_centre8.insert(in.v_centre8.end(), v_centre, v_centre + p.dv);
    in.v_centre_scale.push_back(at.view.v_centre_scale()[at.centre(octave)]);
  }
  in.mean_logit.assign(static_cast<size_t>(at.s.nq), 0.0f);
  in.mu_k.assign(static_cast<size_t>(p.d), 0.0f);
  return in;
}

}  // namespace sagebwd::ref
