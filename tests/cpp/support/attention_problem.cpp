// SPDX-License-Identifier: Apache-2.0
#include "support/attention_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "base/dispatch_dtype.h"
#include "base/hash.h"
#include "base/parallel.h"

namespace sagebwd::testing {
namespace {

/// Memory of exactly the asked size and alignment, with guards that must keep their pattern.
class Workspace {
 public:
  Workspace(size_t bytes, int64_t guard, unsigned char fill)
      : bytes_(bytes), guard_(guard > 0 ? 4096 : 0) {
    const size_t total = bytes + 2 * guard_;
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(
        dispatch::kWorkspaceAlign, (total + dispatch::kWorkspaceAlign) / dispatch::kWorkspaceAlign *
                                       dispatch::kWorkspaceAlign)));
    std::memset(memory_.get(), fill, total);
    std::memset(memory_.get(), kPattern, guard_);
    std::memset(memory_.get() + guard_ + bytes, kPattern, guard_);
  }
  void* data() const { return memory_.get() + guard_; }
  void check(const char* call) const {
    for (size_t i = 0; i < guard_; ++i)
      if (memory_[i] != kPattern || memory_[guard_ + bytes_ + i] != kPattern)
        throw std::runtime_error(std::string(call) + ": wrote outside its workspace");
  }

 private:
  static constexpr unsigned char kPattern = 0x5A;
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  size_t bytes_, guard_;
  std::unique_ptr<unsigned char[], Free> memory_;
};

/// All tensors of a call pair.
struct Tensors {
  Tensors(const AttentionProblem& p, const RunOptions& run)
      : q(make("q", p.c.dtype, p.q_shape(), p, run)),
        k(make("k", p.c.dtype, p.k_shape(), p, run)),
        v(make("v", p.c.dtype, p.v_shape(), p, run)),
        o(make("o", p.c.dtype, p.o_shape(), p, run)),
        dout(make("dout", p.c.dtype, p.o_shape(), p, run)),
        dq(make("dq", p.c.dtype, p.q_shape(), p, run)),
        dk(make("dk", p.c.dtype, p.k_shape(), p, run)),
        dv(make("dv", p.c.dtype, p.v_shape(), p, run)),
        lse(make("lse", Dtype::f32, p.row_shape(), p, run)),
        dlse(make("dlse", Dtype::f32, p.row_shape(), p, run)),
        max_logit(Dtype::f32, {1, 1, p.num_sequences(), p.c.h},
                  dense({1, 1, p.num_sequences(), p.c.h}), run.guard, run.fill) {
    q.set(p.in.q), k.set(p.in.k), v.set(p.in.v), dout.set(p.in.dout);
    if (!p.dlse.empty()) dlse.set(p.dlse);
  }

  Tensor q, k, v, o, dout, dq, dk, dv, lse, dlse, max_logit;

  std::vector<unsigned char> input_bytes() const {
    std::vector<unsigned char> all;
    for (const Tensor* t : {&q, &k, &v, &dout, &dlse}) {
      const std::vector<unsigned char> bytes = t->bytes();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  void check_outputs(const char* call) const {
    const std::pair<const char*, const Tensor*> outputs[] = {
        {"o", &o}, {"lse", &lse}, {"max_logit", &max_logit}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv}};
    for (const auto& [name, t] : outputs)
      if (const std::string what = t->stray_write(); !what.empty())
        throw std::runtime_error(std::string(call) + ": " + name + ": " + what);
  }

 private:
  static Tensor make(const char* name, Dtype dtype, const Shape& shape, const AttentionProblem& p,
                     const RunOptions& run) {
    const Placement place = run.place                          ? run.place(name, shape)
                            : p.c.layout == spec::Layout::bshd ? tokens_before_heads(shape)
                                                               : dense(shape);
    return Tensor(dtype, shape, place, run.guard, run.fill);
  }
};

void fill_shared(const AttentionProblem& p, const RunOptions& o, const Tensors& t,
                 AttentionArgs& a) {
  a.q = t.q.view(), a.k = t.k.view(), a.v = t.v.view(), a.o = t.o.view(), a.lse = t.lse.stats();
  a.scale = p.scale, a.softcap = p.c.softcap;
  a.mask = p.c.mask;
  a.documents = p.documents();
  a.blocks = p.lists.view();
  a.recipe = p.c.recipe;
  a.parallel_for = o.parallel_for;
}

spec::Problem with_levels(const AttentionProblem& p, spec::Problem problem) {
  problem.levels_of_p = p.levels_of_p;
  return problem;
}

std::string show(const std::vector<int32_t>& x) {
  std::ostringstream s;
  for (size_t i = 0; i < x.size(); ++i) s << (i ? "," : "") << x[i];
  return s.str();
}

}  // namespace

spec::Problem AttentionProblem::resolved() const {
  ForwardArgs a;
  a.q = contiguous(nullptr, c.dtype, q_shape()), a.k = contiguous(nullptr, c.dtype, k_shape());
  a.v = contiguous(nullptr, c.dtype, v_shape()), a.o = contiguous(nullptr, c.dtype, o_shape());
  a.scale = scale, a.softcap = c.softcap;
  a.mask = c.mask;
  a.documents = documents();
  a.blocks = lists.view();
  a.recipe = c.recipe;
  return with_levels(*this, spec::resolve(a, false));
}

std::string AttentionProblem::describe() const {
  std::ostringstream s;
  s << c.to_string();
  if (scale != 0.0f) s << " | scale " << scale;
  if (!cu_q.empty()) s << " | cu_q " << show(cu_q) << " cu_k " << show(cu_k);
  if (!dlse.empty()) s << " | dlse";
  if (partial_kv) s << " | partial_kv";
  if (levels_of_p != 0) s << " | " << levels_of_p << " levels of P";
  return s.str();
}

void AttentionProblem::round_inputs() {
  with_dtype(c.dtype, [&](auto type) {
    for (std::vector<float>* x : {&in.q, &in.k, &in.v, &in.dout})
      for (float& value : *x) value = to_float(from_float<decltype(type)>(value));
  });
}

AttentionProblem make_problem(const std::string& case_text, trace::InputKind kind, double sigma) {
  AttentionProblem p;
  p.c = spec::AttnCase::parse(case_text);
  p.in = trace::make_inputs(p.c, kind, sigma);
  p.make_lists();
  return p;
}

void apply_qk_norm(AttentionProblem& p) {
  for (std::vector<float>* x : {&p.in.q, &p.in.k})
    for (size_t row = 0; row < x->size(); row += static_cast<size_t>(p.c.d)) {
      double square = 0;
      for (int64_t c = 0; c < p.c.d; ++c) square += std::pow((*x)[row + c], 2);
      const double rms = std::sqrt(square / static_cast<double>(p.c.d));
      for (int64_t c = 0; c < p.c.d; ++c) (*x)[row + c] = static_cast<float>((*x)[row + c] / rms);
    }
  p.round_inputs();
}

std::vector<float> random_rows(const AttentionProblem& p, uint64_t key) {
  std::vector<float> x(static_cast<size_t>(p.c.b * p.c.h * p.c.nq));
  for (size_t i = 0; i < x.size(); ++i) {
    // Four uniforms make a good enough bell.
    float sum = -2.0f;
    for (uint64_t n = 0; n < 4; ++n) sum += unit_float(hash64({p.c.seed, key, i, n}));
    x[i] = sum * 1.7320508f;
  }
  return x;
}

Results run(const dispatch::Implementation& impl, const AttentionProblem& p,
            const RunOptions& options) {
  const Tensors t(p, options);
  const std::vector<unsigned char> inputs = t.input_bytes();
  ForwardArgs f;
  fill_shared(p, options, t, f);
  f.max_logit = static_cast<float*>(t.max_logit.view().data);
  {
    const spec::Problem problem = with_levels(p, spec::resolve(f, true));
    const Workspace workspace(impl.workspace(problem), options.guard, options.fill);
    impl.forward(problem, f, workspace.data());
    workspace.check("forward");
  }
  t.check_outputs("forward");

  Results r;
  r.o = t.o.get(), r.lse = t.lse.get(), r.max_logit = t.max_logit.get();
  if (options.backward) {
    Tensors& outputs = const_cast<Tensors&>(t);
    if (options.o != nullptr) outputs.o.set(*options.o);
    if (options.lse != nullptr) outputs.lse.set(*options.lse);
    const std::vector<unsigned char> saved_o = t.o.bytes(), saved_lse = t.lse.bytes();
    BackwardArgs b;
    fill_shared(p, options, t, b);
    b.dout = t.dout.view(), b.dq = t.dq.view(), b.dk = t.dk.view(), b.dv = t.dv.view();
    if (!p.dlse.empty()) b.dlse = t.dlse.stats();
    b.partial_kv = p.partial_kv;
    const spec::Problem problem = with_levels(p, spec::resolve(b, true));
    const Workspace workspace(impl.workspace(problem), options.guard, options.fill);
    impl.backward(problem, b, workspace.data());
    workspace.check("backward");
    t.check_outputs("backward");
    if (saved_o != t.o.bytes() || saved_lse != t.lse.bytes())
      throw std::runtime_error("backward: changed o or lse");
    r.dq = t.dq.get(), r.dk = t.dk.get(), r.dv = t.dv.get();
  }
  if (inputs != t.input_bytes()) throw std::runtime_error("an input was changed");
  return r;
}

std::string first_difference(const Results& a, const Results& b) {
  const std::pair<const char*, std::vector<float> Results::*> tensors[] = {
      {"O", &Results::o},   {"LSE", &Results::lse}, {"max_logit", &Results::max_logit},
      {"dQ", &Results::dq}, {"dK", &Results::dk},   {"dV", &Results::dv}};
  for (const auto& [name, member] : tensors) {
    const std::vector<float>&x = a.*member, &y = b.*member;
    if (x.size() != y.size()) return std::string(name) + " has another size";
    for (size_t i = 0; i < x.size(); ++i)
      if (std::memcmp(&x[i], &y[i], sizeof(float)) != 0) {
        std::ostringstream s;
        s << name << "[" << i << "]: " << x[i] << " against " << y[i];
        return s.str();
      }
  }
  return "";
}

}  // namespace sagebwd::testing
