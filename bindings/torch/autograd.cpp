// SPDX-License-Identifier: Apache-2.0
// Eager calls without detours: the operator `attend` is `fwd` with a gradient. Between it and the
// library there is no Python and no dispatcher, in either direction: for a small problem these cost
// more than its kernels.
//
// PyTorch's stable ABI has no autograd. This file therefore makes a library of its own, which
// serves the very PyTorch that it was compiled for, and that has its name in the file's name. Where
// it does not fit, python/sagebwd/_ops/attention.py has the same formula in Python.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <numeric>
#include <string_view>
#include <type_traits>

#include "attention.h"
#include "sagebwd/build.h"
#include "sagebwd/error.h"

namespace sagebwd::binding {
namespace {

using at::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Stable = torch::stable::Tensor;
using Maybe = std::optional<at::Tensor>;
using Stack = torch::jit::Stack;

// --- tensors of either ABI -----------------------------------------------------------------------

Stable stable(const at::Tensor& t) {
  return Stable(torch::aot_inductor::new_tensor_handle(at::Tensor(t)));
}

std::optional<Stable> stable_or_none(const at::Tensor& t) {
  return t.defined() ? std::optional(stable(t)) : std::nullopt;
}

const at::Tensor& plain(const Stable& t) {
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(t.get());
}

// --- errors --------------------------------------------------------------------------------------

/// Runs a call of the library. Its errors get the types that Python knows.
template <typename F>
auto with_python_errors(F&& call) {
  try {
    return call();
  } catch (const Error& e) {
    TORCH_CHECK_VALUE(e.kind() != ErrorKind::invalid_argument, in_words_of_python(e.what()));
    TORCH_CHECK_NOT_IMPLEMENTED(e.kind() != ErrorKind::unsupported, e.what());
    TORCH_CHECK(false, "sagebwd.RuntimeError: ", e.what());
  }
}

/// Throws what an operator threw as the kind of error that the first word of its message names.
[[noreturn]] void rethrow(const std::exception& error) {
  const auto told = [&](std::string_view kind) -> std::optional<std::string> {
    std::string_view text = error.what();
    if (!text.starts_with(kind)) return std::nullopt;
    text.remove_prefix(kind.size());
    return std::string(text.substr(0, text.find("\nException raised from")));
  };
  if (const auto text = told("sagebwd.ValueError: ")) TORCH_CHECK_VALUE(false, *text);
  if (const auto text = told("sagebwd.NotImplementedError: "))
    TORCH_CHECK_NOT_IMPLEMENTED(false, *text);
  throw;
}

// --- what a call asks for ------------------------------------------------------------------------

/// Options that come to attend among its `numbers`, in their order.
#define SAGEBWD_IS_NUMBER(schema, type, name, usual) \
  +(std::is_same_v<type, int64_t> || std::is_same_v<type, bool>)
constexpr size_t kOptionNumbers = 0 SAGEBWD_OPTIONS(SAGEBWD_IS_NUMBER);
constexpr size_t kSwitches = 5;  // what is asked for, behind them

/// The arguments of attend behind the tensors. python/sagebwd/ops.py makes them. As a list numbers
/// cost a third of what arguments of their own do.
struct Request {
  Request(std::optional<double> softmax_scale, std::string_view recipe, at::IntArrayRef numbers,
          double softcap) {
    TORCH_CHECK(numbers.size() == kOptionNumbers + kSwitches, "attend: expected ",
                kOptionNumbers + kSwitches, " numbers, got ", numbers.size());
    const int64_t* next = numbers.data();
    const auto take = [&](auto& to) {
      using T = std::remove_cvref_t<decltype(to)>;
      if constexpr (std::is_same_v<T, int64_t>) to = *next++;
      if constexpr (std::is_same_v<T, bool>) to = *next++ != 0;
    };
#define SAGEBWD_TAKE(schema, type, name, usual) take(options.name);
    SAGEBWD_OPTIONS(SAGEBWD_TAKE)
#undef SAGEBWD_TAKE
    options.softmax_scale = softmax_scale;
    options.recipe = recipe;
    options.softcap = softcap;
    for (bool* flag :
         {&deterministic, &return_max_logit, &save_codes, &return_lse, &options.tokens_first})
      take(*flag);
  }
  Options options;
  bool deterministic, return_max_logit, save_codes, return_lse;
};

// --- which calls take this way -------------------------------------------------------------------

/// Whether the dispatcher would hand a tensor to our kernels of its device, past autograd: no mode
/// looks at operators, and the tensor is no wrapper, has no lazy sign and lies in memory of its
/// own.
bool is_bare(const at::Tensor& t) {
  const auto& mine = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet keys = ((t.key_set() | mine.included_) - mine.excluded_) -
                                   c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                                   c10::autocast_dispatch_keyset -
                                   c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  const c10::DispatchKey key = keys.highestPriorityTypeId();
  return key == c10::DispatchKey::CPU || key == c10::DispatchKey::CUDA;
}

bool all_bare(std::initializer_list<const at::Tensor*> tensors) {
  return std::ranges::all_of(tensors, [](auto* t) { return !t->defined() || is_bare(*t); });
}

/// Whether autocast would change the dtype.
bool is_cast(const at::Tensor& t) {
  const at::DeviceType device = t.device().type();
  return at::autocast::is_autocast_enabled(device) &&
         at::autocast::get_autocast_dtype(device) != t.scalar_type();
}

/// Whether python/sagebwd/padding.py pads a call with values of another head dim.
bool is_padded(const at::Tensor& q, int64_t dv) {
  const int64_t d = q.size(-1);
  if (dv == d || !q.is_cuda()) return false;
  const Dtype dtype = q.scalar_type() == at::kFloat      ? Dtype::f32
                      : q.scalar_type() == at::kBFloat16 ? Dtype::bf16
                                                         : Dtype::f16;
  return std::max(d, dv) <= tuned_head_dim(dtype);
}

/// Whether q, k and v need nothing before the library takes them, and nothing is wrong with them
/// that python/sagebwd/attention.py has a message for.
bool fit(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool packed,
         bool tokens_first) {
  const auto alike = [&](const at::Tensor& t) {
    return t.scalar_type() == q.scalar_type() && t.device() == q.device() && t.dim() == q.dim() &&
           t.stride(-1) == 1;
  };
  const auto takes = [](int64_t d) { return d % 8 == 0 && d >= 8 && d <= 256; };
  const bool known_dtype = q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16 ||
                           q.scalar_type() == at::kHalf;
  if (!known_dtype || q.dim() != (packed ? 3 : 4) || !alike(q) || !alike(k) || !alike(v) ||
      k.sizes().slice(0, k.dim() - 1) != v.sizes().slice(0, v.dim() - 1) || is_cast(q))
    return false;
  const int64_t heads = !packed && tokens_first ? 2 : 1, d = q.size(-1), dv = v.size(-1);
  return takes(d) && k.size(-1) == d && takes(dv) && !is_padded(q, dv) &&
         (packed || q.size(0) == k.size(0)) && k.size(heads) > 0 &&
         q.size(heads) % k.size(heads) == 0;
}

// --- forward and backward ------------------------------------------------------------------------

Results run_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const Request& request, bool save_codes) {
  // Profilers show it as if the dispatcher had called it. Without one this costs nothing.
  RECORD_FUNCTION("sagebwd::fwd",
                  (std::vector<IValue>{q, k, v, request.options.recipe, save_codes}));
  const at::AutoDispatchBelowADInplaceOrView below;
  return with_python_errors([&] {
    return attention_forward(stable(q), stable(k), stable(v), request.options,
                             request.return_max_logit, save_codes);
  });
}

/// For q, k and v beside codes: only their shape is looked at, and the order of strides, which the
/// gradients take over. There is one element per token and head.
at::Tensor stand_in(const at::Tensor& like, at::IntArrayRef shape, at::IntArrayRef strides) {
  std::vector<int64_t> order(shape.size() - 1), compact(shape.size(), 0);
  std::iota(order.rbegin(), order.rend(), 0);
  std::ranges::stable_sort(order, {}, [&](int64_t dim) { return strides[dim]; });
  int64_t size = 1;
  for (const int64_t dim : order) {
    compact[dim] = size;
    size *= shape[dim];
  }
  return at::empty_strided(shape, compact, like.options());
}

/// What the backward of a call has before it.
struct Saved {
  at::Tensor dout, q, k, v, out, lse, dlse, codes;
  at::Tensor cu_seqlens_q, cu_seqlens_k, list_index, list_count;
};

/// The options with the tensors that were kept.
const Options& with_tensors(const Saved& s, Options& o) {
  o.cu_seqlens_q = stable_or_none(s.cu_seqlens_q), o.cu_seqlens_k = stable_or_none(s.cu_seqlens_k);
  o.list_index = stable_or_none(s.list_index), o.list_count = stable_or_none(s.list_count);
  return o;
}

variable_list run_backward(const Saved& s, Request& request) {
  RECORD_FUNCTION("sagebwd::bwd",
                  (std::vector<IValue>{s.dout, s.q, s.k, s.v, request.options.recipe}));
  const at::AutoDispatchBelowADInplaceOrView below;
  const Options& o = with_tensors(s, request.options);
  const auto [dq, dk, dv] = with_python_errors([&] {
    return attention_backward(stable(s.dout), stable(s.q), stable(s.k), stable(s.v), stable(s.out),
                              stable(s.lse), stable_or_none(s.dlse), stable_or_none(s.codes), o,
                              {.deterministic = request.deterministic});
  });
  return {plain(dq), plain(dk), plain(dv)};
}

/// From [b, n, h, d] to [b, h, n, d] or back, if the caller has tokens before heads.
at::Tensor swapped(const at::Tensor& t, bool tokens_first) {
  return tokens_first ? t.transpose(1, 2) : t;
}

/// An option as an operator's argument.
IValue boxed(const auto& value) { return IValue(value); }
IValue boxed(const std::optional<Stable>& t) { return t ? IValue(plain(*t)) : IValue(); }

/// The same by the operator, for whoever watches it: a mode, a class of tensors, or autograd
/// itself, whose formula of bwd refuses a double backward.
variable_list call_backward(const Saved& s, Request& request) {
  static const c10::OperatorHandle bwd =
      c10::Dispatcher::singleton().findSchemaOrThrow("sagebwd::bwd", "");
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (!at::GradMode::is_enabled()) below.emplace();
  const auto maybe = [](const at::Tensor& t) { return t.defined() ? IValue(t) : IValue(); };
  const Options& o = with_tensors(s, request.options);
  Stack stack;
  for (const at::Tensor& t : {s.dout, s.q, s.k, s.v, s.out})
    stack.emplace_back(swapped(t, o.tokens_first));
  torch::jit::push(stack, s.lse, maybe(s.dlse));
#define SAGEBWD_PUSH(schema, type, name, usual) stack.push_back(boxed(o.name));
  SAGEBWD_OPTIONS(SAGEBWD_PUSH)
#undef SAGEBWD_PUSH
  torch::jit::push(stack, request.deterministic, /*partial_kv=*/false, maybe(s.codes));
  try {
    bwd.callBoxed(&stack);
  } catch (const std::exception& error) {
    rethrow(error);
  }
  variable_list gradients;
  for (const IValue& value : stack) gradients.push_back(swapped(value.toTensor(), o.tokens_first));
  return gradients;
}

struct Attention : torch::autograd::Function<Attention> {
  /// The results that autograd follows: out, and lse if the caller wants it. `max_logit` comes
  /// beside them. The request is saved as it came: its four parts.
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const Request* request,
                               const std::array<IValue, 4>* parts,
                               const std::array<Maybe, 4>* others, Maybe* max_logit) {
    const Results r = run_forward(q, k, v, *request, request->save_codes);
    if (r.max_logit) *max_logit = plain(*r.max_logit);
    c10::impl::GenericList kept(c10::AnyType::get());
    kept.reserve(parts->size() + 6);
    for (const IValue& part : *parts) kept.push_back(part);
    // What the caller gets is what is kept, so that PyTorch sees if someone writes to it.
    variable_list results = {plain(r.out)}, saved = {results[0], plain(r.lse)};
    if (request->return_lse) results.push_back(saved[1]);
    for (const Maybe& t : *others) saved.push_back(t.value_or(at::Tensor()));
    if (!request->save_codes) {
      saved.insert(saved.end(), {q, k, v});
    } else {
      saved.push_back(plain(*r.codes));
      // Otherwise out stands in for k, as it does for q: it has the shape and the strides of q,
      // unless values have another head dim.
      const auto keep_shape = [&](const at::Tensor& t) {
        kept.push_back(t.sizes());
        kept.push_back(t.strides());
      };
      if (v.size(-1) != q.size(-1)) {
        for (const at::Tensor& t : {q, k, v}) keep_shape(t);
      } else if (k.sizes() != q.sizes() || k.strides() != q.strides()) {
        keep_shape(k);
      }
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["kept"] = std::move(kept);
    // An unused lse gives no gradient instead of zeros, so that the backward knows that rows of dS
    // sum to zero.
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    variable_list results(7);  // one per argument of forward
    Saved s;
    s.dout = gradients[0];
    if (gradients.size() > 1) s.dlse = gradients[1];
    if (!s.dout.defined() && !s.dlse.defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    const c10::impl::GenericList kept = ctx->saved_data.at("kept").toList();
    Request request(kept.get(0).toOptional<double>(), kept.get(1).toStringView(),
                    kept.get(2).toIntVector(), kept.get(3).toDouble());
    s.out = saved[0], s.lse = saved[1];
    s.cu_seqlens_q = saved[2], s.cu_seqlens_k = saved[3];
    s.list_index = saved[4], s.list_count = saved[5];
    s.q = s.k = s.v = s.out;
    if (saved.size() == 9) {
      s.q = saved[6], s.k = saved[7], s.v = saved[8];
    } else {
      s.codes = saved[6];
      const auto stand_in_at = [&](size_t at) {
        return stand_in(s.out, kept.get(at).toIntVector(), kept.get(at + 1).toIntVector());
      };
      if (kept.size() == 6)
        s.k = s.v = stand_in_at(4);
      else if (kept.size() == 10)
        s.q = stand_in_at(4), s.k = stand_in_at(6), s.v = stand_in_at(8);
    }
    if (!s.dout.defined()) s.dout = at::zeros_like(s.out);
    const bool direct = !at::GradMode::is_enabled() &&
                        all_bare({&s.dout, &s.q, &s.k, &s.v, &s.out, &s.lse, &s.dlse, &s.codes});
    const variable_list found = direct ? run_backward(s, request) : call_backward(s, request);
    std::ranges::copy(found, results.begin());
    return results;
  }
};

std::tuple<Maybe, Maybe, Maybe> attend(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, std::optional<double> softmax_scale,
                                       std::string_view recipe, at::IntArrayRef numbers,
                                       const Maybe& cu_seqlens_q, const Maybe& cu_seqlens_k,
                                       const Maybe& list_index, const Maybe& list_count,
                                       double softcap) {
  Request request(softmax_scale, recipe, numbers, softcap);
  if (!all_bare({&q, &k, &v}) ||
      !fit(q, k, v, cu_seqlens_q.has_value(), request.options.tokens_first))
    return {};
  const std::array<Maybe, 4> others = {cu_seqlens_q, cu_seqlens_k, list_index, list_count};
  Options& o = request.options;
  std::optional<Stable>* const taken[] = {&o.cu_seqlens_q, &o.cu_seqlens_k, &o.list_index,
                                          &o.list_count};
  for (size_t i = 0; i < others.size(); ++i)
    if (others[i]) *taken[i] = stable(*others[i]);
  Maybe max_logit;
  if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    const std::array<IValue, 4> parts = {softmax_scale, std::string(recipe), numbers, softcap};
    variable_list results = Attention::apply(q, k, v, &request, &parts, &others, &max_logit);
    return {results[0], request.return_lse ? Maybe(results[1]) : Maybe(), max_logit};
  }
  const Results r = run_forward(q, k, v, request, false);
  if (r.max_logit) max_logit = plain(*r.max_logit);
  return {plain(r.out), request.return_lse ? Maybe(plain(r.lse)) : Maybe(), max_logit};
}

}  // namespace
}  // namespace sagebwd::binding

TORCH_LIBRARY_FRAGMENT(sagebwd, m) {
  // What is not asked for is None. All is None, and nothing was done, where a call needs more than
  // this operator has: python/sagebwd/_ops/attention.py then takes another way.
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, float? softmax_scale, str recipe, int[] numbers, "
      "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? list_index=None, "
      "Tensor? list_count=None, float softcap=0.0) -> (Tensor? out, Tensor? lse, Tensor? "
      "max_logit)",
      torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                      TORCH_FN(sagebwd::binding::attend)));
}
