// SPDX-License-Identifier: Apache-2.0
// Autograd of eager calls without Python: the operator `attend` is `fwd` with a gradient.
//
// PyTorch's stable ABI has no autograd. This file therefore makes a library of its own, which
// serves the very PyTorch that it was compiled for, and that has its name in the file's name. Where
// it does not fit, python/sagebwd/ops.py has the same formula in Python.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>

namespace sagebwd::binding {
namespace {

using at::IValue;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Stack = torch::jit::Stack;

// Places among the options, which fwd and bwd share (SAGEBWD_OPTIONS in ops.cpp).
constexpr size_t kOptions = 16;
constexpr std::array<size_t, 4> kTensorOptions = {0, 1, 11, 12};  // cu_seqlens_*, list_*

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

void call(const c10::OperatorHandle& op, Stack& stack) {
  try {
    op.callBoxed(&stack);
  } catch (const std::exception& error) {
    rethrow(error);
  }
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

/// For k and v beside codes: only their shape is looked at, and the order of strides, which the
/// gradients take over. There is one element per token and head.
Tensor stand_in(const Tensor& like, at::IntArrayRef shape, at::IntArrayRef strides) {
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

/// From [b, n, h, d] to [b, h, n, d] or back, if the caller has tokens before heads.
Tensor swapped(const Tensor& t, bool tokens_first) {
  return tokens_first && t.defined() ? t.transpose(1, 2) : t;
}

/// The switches of attend that fwd does not have.
struct Switches {
  bool return_lse, tokens_first;
};

/// Calls fwd. `stack` has its arguments, and then its results.
void call_forward(Stack& stack, bool tokens_first) {
  static const c10::OperatorHandle fwd = find("sagebwd::fwd");
  const at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; tokens_first && i < 3; ++i)
    stack[i] = swapped(stack[i].toTensor(), tokens_first);
  call(fwd, stack);
  stack[0] = swapped(stack[0].toTensor(), tokens_first);
}

struct Attention : torch::autograd::Function<Attention> {
  /// The results that autograd follows: out, and lse if the caller wants it. `stack` has the
  /// arguments of fwd, and then its results.
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v, Stack* stack, Switches switches) {
    const bool save_codes = stack->back().toBool(), tokens_first = switches.tokens_first;
    c10::impl::GenericList kept(c10::AnyType::get());
    kept.reserve(kOptions + 4);
    for (size_t i = 0; i <= kOptions; ++i) kept.push_back((*stack)[3 + i]);  // and deterministic
    kept.push_back(tokens_first);
    variable_list saved(6);
    for (size_t i = 0; i < kTensorOptions.size(); ++i) {
      const IValue& option = (*stack)[3 + kTensorOptions[i]];
      if (option.isTensor()) saved[2 + i] = option.toTensor();
      kept.set(kTensorOptions[i], IValue());
    }
    call_forward(*stack, tokens_first);
    // What the caller gets is what is kept, so that PyTorch sees if someone writes to it.
    variable_list results = {(*stack)[0].toTensor()};
    saved[0] = results[0];
    saved[1] = (*stack)[1].toTensor();
    if (switches.return_lse) results.push_back(saved[1]);
    if (!save_codes) {
      saved.insert(saved.end(), {q, k, v});
    } else {
      saved.push_back((*stack)[3].toTensor());
      // Otherwise out stands in for k, as it does for q: it has the shape and the strides of q.
      if (k.sizes() != q.sizes() || k.strides() != q.strides()) {
        kept.push_back(k.sizes());
        kept.push_back(k.strides());
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
    static const c10::OperatorHandle bwd = find("sagebwd::bwd");
    variable_list results(5);  // one per argument of forward
    Tensor dout = gradients[0], dlse = gradients.size() > 1 ? gradients[1] : Tensor();
    if (!dout.defined() && !dlse.defined()) return results;
    const variable_list saved = ctx->get_saved_variables();
    const c10::impl::GenericList kept = ctx->saved_data.at("kept").toList();
    const bool tokens_first = kept.get(kOptions + 1).toBool();
    const Tensor &out = saved[0], &lse = saved[1];
    Tensor q = out, k = out, v = out, codes;
    if (saved.size() == 9) {
      q = saved[6], k = saved[7], v = saved[8];
    } else {
      codes = saved[6];
      if (kept.size() > kOptions + 2)
        k = v = stand_in(out, kept.get(kOptions + 2).toIntVector(),
                         kept.get(kOptions + 3).toIntVector());
    }
    if (!dout.defined()) dout = at::zeros_like(out);
    // Where gradients are recorded, a double backward may follow, and the formula of bwd refuses
    // it.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!at::GradMode::is_enabled()) below.emplace();
    const auto optional = [](const Tensor& t) { return t.defined() ? IValue(t) : IValue(); };
    Stack stack;
    stack.reserve(7 + kOptions + 3);
    for (const Tensor& t : {dout, q, k, v, out}) stack.emplace_back(swapped(t, tokens_first));
    stack.emplace_back(lse);
    stack.push_back(optional(dlse));
    for (size_t i = 0; i <= kOptions; ++i) stack.push_back(kept.get(i));
    for (size_t i = 0; i < kTensorOptions.size(); ++i)
      stack[7 + kTensorOptions[i]] = optional(saved[2 + i]);
    stack.emplace_back(false);  // partial_kv
    stack.push_back(optional(codes));
    call(bwd, stack);
    for (size_t i = 0; i < 3; ++i) results[i] = swapped(stack[i].toTensor(), tokens_first);
    return results;
  }
};

void attend(const c10::OperatorHandle&, Stack* stack) {
  const Switches switches{(*stack)[stack->size() - 2].toBool(), stack->back().toBool()};
  torch::jit::drop(*stack, 2);
  const bool return_max_logit = (*stack)[stack->size() - 2].toBool();
  const Tensor q = (*stack)[0].toTensor(), k = (*stack)[1].toTensor(), v = (*stack)[2].toTensor();
  if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    variable_list results = Attention::apply(q, k, v, stack, switches);
    (*stack)[0] = std::move(results[0]);
    if (switches.return_lse) (*stack)[1] = std::move(results[1]);
  } else {
    call_forward(*stack, switches.tokens_first);
  }
  stack->pop_back();  // the codes
  if (!switches.return_lse) (*stack)[1] = IValue();
  if (!return_max_logit) (*stack)[2] = IValue();
}

}  // namespace
}  // namespace sagebwd::binding

TORCH_LIBRARY_FRAGMENT(sagebwd, m) {
  // The arguments of fwd and two more: `tokens_first` is for tensors [b, n, h, d]. What is not
  // asked for is None.
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float? softmax_scale, bool causal, bool top_left, "
      "SymInt window_left, SymInt window_right, str recipe, SymInt seed, Tensor? list_index, "
      "Tensor? list_count, SymInt block_q, SymInt block_k, SymInt lead, bool deterministic, "
      "bool return_max_logit, bool save_codes, bool return_lse, bool tokens_first) -> "
      "(Tensor out, Tensor? lse, Tensor? max_logit)");
}

TORCH_LIBRARY_IMPL(sagebwd, CompositeImplicitAutograd, m) {
  m.impl("attend", torch::CppFunction::makeFromBoxedFunction<&sagebwd::binding::attend>());
}
