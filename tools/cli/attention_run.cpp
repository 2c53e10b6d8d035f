// SPDX-License-Identifier: Apache-2.0
#include "attention_run.h"

#include <algorithm>
#include <cstdlib>

#include "base/check.h"
#include "base/dispatch_dtype.h"
#include "base/suggest.h"

namespace sagebwd::cli {
namespace {

using spec::AttnCase;

/// Visits every row of a view with its place in the contiguous [b, h, n, d] order.
template <typename F>
void for_each_row(const TensorView& view, F&& f) {
  const auto& s = view.shape;
  int64_t row = 0;
  for (int64_t b = 0; b < s[0]; ++b)
    for (int64_t h = 0; h < s[1]; ++h)
      for (int64_t n = 0; n < s[2]; ++n, ++row)
        f(b * view.stride[0] + h * view.stride[1] + n * view.stride[2], row * s[3]);
}

std::vector<std::byte> storage(const AttnCase& c, int64_t elements) {
  return std::vector<std::byte>(static_cast<size_t>(elements * dtype_size(c.dtype)));
}

void store(const TensorView& view, const std::vector<float>& values) {
  with_dtype(view.dtype, [&](auto tag) {
    using T = decltype(tag);
    T* out = static_cast<T*>(view.data);
    for_each_row(view, [&](int64_t to, int64_t from) {
      for (int64_t ch = 0; ch < view.shape[3]; ++ch)
        out[to + ch] = from_float<T>(values[from + ch]);
    });
  });
}

template <typename Args>
void fill_shared(Args& a, const AttnCase& c) {
  a.q = c.q_view(nullptr), a.o = c.o_view(nullptr);
  a.k = c.k_view(nullptr), a.v = c.v_view(nullptr);
  a.lse = contiguous_stats(nullptr, c.h, c.nq);
  a.mask = c.mask;
  a.scale = c.scale, a.softcap = c.softcap;
  a.recipe = c.recipe;
  a.blocks = c.list_shape();
}

}  // namespace

ForwardArgs forward_shape(const AttnCase& c) {
  ForwardArgs a;
  fill_shared(a, c);
  return a;
}

BackwardArgs backward_shape(const AttnCase& c) {
  BackwardArgs a;
  fill_shared(a, c);
  a.dout = c.o_view(nullptr), a.dq = c.q_view(nullptr);
  a.dk = c.k_view(nullptr), a.dv = c.v_view(nullptr);
  return a;
}

AttentionRun::AttentionRun(const AttnCase& c, const trace::Inputs& in, const trace::Lists& lists)
    : q_(storage(c, c.q_elements())),
      k_(storage(c, c.k_elements())),
      v_(storage(c, c.v_elements())),
      o_(storage(c, c.o_elements())),
      dout_(storage(c, c.o_elements())),
      dq_(storage(c, c.q_elements())),
      dk_(storage(c, c.k_elements())),
      dv_(storage(c, c.v_elements())),
      lse_(static_cast<size_t>(c.b * c.h * c.nq)),
      forward_(forward_shape(c)),
      backward_(backward_shape(c)) {
  workspace_.resize(std::max(workspace_size(forward_), workspace_size(backward_)));
  for (AttentionArgs* a :
       {static_cast<AttentionArgs*>(&forward_), static_cast<AttentionArgs*>(&backward_)}) {
    a->q.data = q_.data(), a->k.data = k_.data(), a->v.data = v_.data(), a->o.data = o_.data();
    a->lse.data = lse_.data();
    if (c.has_lists()) a->blocks = lists.view();
    a->workspace = workspace_.data(), a->workspace_bytes = workspace_.size();
  }
  backward_.dout.data = dout_.data(), backward_.dq.data = dq_.data();
  backward_.dk.data = dk_.data(), backward_.dv.data = dv_.data();
  store(forward_.q, in.q), store(forward_.k, in.k), store(forward_.v, in.v);
  store(backward_.dout, in.dout);
}

std::vector<float> AttentionRun::floats(const TensorView& view) {
  const auto& s = view.shape;
  std::vector<float> values(static_cast<size_t>(s[0] * s[1] * s[2] * s[3]));
  with_dtype(view.dtype, [&](auto tag) {
    const auto* in = static_cast<const decltype(tag)*>(view.data);
    for_each_row(view, [&](int64_t from, int64_t to) {
      for (int64_t ch = 0; ch < s[3]; ++ch) values[to + ch] = to_float(in[from + ch]);
    });
  });
  return values;
}

Candidate AttentionRun::forward_choice() const { return chosen(explain(forward_)); }
Candidate AttentionRun::backward_choice() const { return chosen(explain(backward_)); }

Candidate chosen(const std::vector<Candidate>& candidates) {
  std::string refusals;
  for (const Candidate& c : candidates) {
    if (c.chosen) return c;
    refusals += "\n  " + c.name + ": " + c.reason;
  }
  SAGE_THROW(ErrorKind::unsupported, "no implementation can serve this case:" << refusals);
}

void pin_implementation(const std::string& name) {
  std::string known;
  std::vector<std::string> names;
  for (const Candidate& c : explain(forward_shape(AttnCase{}))) {
    if (c.name == name) {
      setenv("SAGEBWD_IMPL", name.c_str(), 1);
      return;
    }
    known += (known.empty() ? "" : ", ") + c.name;
    names.push_back(c.name);
  }
  SAGE_THROW(ErrorKind::invalid_argument, "--impl: expected one of " << known << ", got \"" << name
                                                                     << "\""
                                                                     << did_you_mean(name, names));
}

void set_threads(int threads) { setenv("SAGEBWD_THREADS", std::to_string(threads).c_str(), 1); }

}  // namespace sagebwd::cli
