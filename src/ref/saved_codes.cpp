// SPDX-License-Identifier: Apache-2.0
#include "ref/saved_codes.h"

#include <algorithm>
#include <cmath>
#include <limits>

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
    mean = t * p.hk + hk;
    writes_keys = h % p.group() == 0;
  }
  /// The scale of key j is at k_scale[scale_of_key(j)].
  int64_t scale_of_key(int64_t j) const {
    return tokenwise() ? key + j : block + j / kKeysPerScale;
  }
  bool tokenwise() const { return p.recipe.scheme == Scheme::tokenwise; }
  /// The row of an octave's centre.
  int64_t centre(int octave) const { return block + numerics::first_block_of(octave); }
  const spec::Problem& p;
  spec::CodesView view;
  spec::Sequence s;
  int64_t query, key, block, mean;  // the first of each
  bool writes_keys;
};

}  // namespace

void write_codes(const spec::Problem& p, void* codes, int64_t t, int64_t h,
                 const RecipeInputs& in) {
  const Place at(p, codes, t, h);
  std::copy(in.q8.begin(), in.q8.end(), at.view.q8() + at.query * p.d);
  std::copy(in.q_scale.begin(), in.q_scale.end(), at.view.q_scale() + at.query);
  if (!at.tokenwise())
    std::copy(in.mean_logit.begin(), in.mean_logit.end(), at.view.mean_logit() + at.query);
  if (!at.writes_keys) return;
  std::copy(in.k8.begin(), in.k8.end(), at.view.k8() + at.key * p.d);
  std::copy(in.v8.begin(), in.v8.end(), at.view.v8() + at.key * p.dv);
  std::copy(in.v_scale.begin(), in.v_scale.end(), at.view.v_scale() + at.key);
  if (at.tokenwise()) {
    std::copy(in.k_scale.begin(), in.k_scale.end(), at.view.k_scale() + at.key);
    for (int octave = 0; octave < numerics::octaves_of(at.s.nk); ++octave) {
      std::copy_n(&in.centre8[static_cast<size_t>(octave * p.d)], p.d,
                  at.view.centre8() + at.centre(octave) * p.d);
      at.view.centre_scale()[at.centre(octave)] = in.centre_scale[static_cast<size_t>(octave)];
    }
    return;
  }
  std::copy(in.mu_k.begin(), in.mu_k.end(), at.view.k_mean() + at.mean * p.d);
  std::copy(in.mu_v.begin(), in.mu_v.end(), at.view.v_mean() + at.mean * p.dv);
  for (int64_t j = 0; j < at.s.nk; ++j) {
    float& scale = at.view.k_scale()[at.scale_of_key(j)];
    const bool poisoned = std::isnan(in.k_scale[j]);
    if (poisoned) at.view.k8()[(at.key + j) * p.d] = kPoisonedCode;
    // Of a block that has nothing but poisoned keys.
    if (j % kKeysPerScale == 0) scale = 0.0f;
    if (!poisoned) scale = in.k_scale[j];
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
  if (at.tokenwise()) {
    copy(in.k_scale, at.view.k_scale() + at.key, at.s.nk);
    for (int octave = 0; octave < numerics::octaves_of(at.s.nk); ++octave) {
      const int8_t* centre = at.view.centre8() + at.centre(octave) * p.d;
      in.centre8.insert(in.centre8.end(), centre, centre + p.d);
      in.centre_scale.push_back(at.view.centre_scale()[at.centre(octave)]);
    }
    in.mean_logit.assign(static_cast<size_t>(at.s.nq), 0.0f);
    in.mu_k.assign(static_cast<size_t>(p.d), 0.0f);
    in.mu_v.assign(static_cast<size_t>(p.dv), 0.0f);
    return in;
  }
  copy(in.mean_logit, at.view.mean_logit() + at.query, at.s.nq);
  copy(in.mu_k, at.view.k_mean() + at.mean * p.d, p.d);
  copy(in.mu_v, at.view.v_mean() + at.mean * p.dv, p.dv);
  for (int64_t j = 0; j < at.s.nk; ++j) {
    int8_t& first = in.k8[static_cast<size_t>(j * p.d)];
    const bool poisoned = first == kPoisonedCode;
    if (poisoned) first = 0;
    in.k_scale.push_back(poisoned ? std::numeric_limits<float>::quiet_NaN()
                                  : at.view.k_scale()[at.scale_of_key(j)]);
  }
  return in;
}

}  // namespace sagebwd::ref
