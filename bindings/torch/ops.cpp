// SPDX-License-Identifier: Apache-2.0
// The operators of attention: fwd, bwd, explain. They know nothing of autograd: autograd.cpp and
// python/sagebwd/_ops add that; the latter adds the fake kernels too.
//
// Tensors are [b, h, n, d], or packed [t, h, d] with cu_seqlens; any strides whose last one is 1.
// Results have the layout of the tensor they belong to (out and dq: q, dk: k, dv: v). v and out may
// have another head dim than q and k.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>

#include "arguments.h"
#include "attention.h"
#include "call.h"
#include "sagebwd/build.h"
#include "sagebwd/version.h"

namespace sagebwd::binding {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> fwd(
    const Tensor& q, const Tensor& k, const Tensor& v,
    SAGEBWD_OPTIONS(SAGEBWD_AS_ARGUMENT) bool /*deterministic: the backward reads it*/,
    bool return_max_logit, bool save_codes) {
  return translated([&] {
    const Options options{SAGEBWD_OPTIONS(SAGEBWD_BY_NAME)};
    const Results r = attention_forward(q, k, v, options, return_max_logit, save_codes);
    // An operator has the same results whatever is asked for.
    return std::make_tuple(r.out, r.lse, r.max_logit ? *r.max_logit : new_float(q, {0}),
                           r.codes ? *r.codes : workspace(q, 0));
  });
}

std::tuple<Tensor, Tensor, Tensor> bwd(const Tensor& dout, const Tensor& q, const Tensor& k,
                                       const Tensor& v, const Tensor& out, const Tensor& lse,
                                       std::optional<Tensor> dlse,
                                       SAGEBWD_OPTIONS(SAGEBWD_AS_ARGUMENT) bool deterministic,
                                       bool partial_kv, std::optional<Tensor> codes) {
  return translated([&] {
    const Options options{SAGEBWD_OPTIONS(SAGEBWD_BY_NAME)};
    return attention_backward(dout, q, k, v, out, lse, dlse, codes, options,
                              {.deterministic = deterministic, .partial_kv = partial_kv});
  });
}

/// One line per implementation: "name<TAB>chosen|able|no<TAB>tiles, or why not". Nothing if a call
/// would have to take its offsets to the host.
template <typename Args>
std::optional<std::string> describe(const Args& args, const Packing& packing) {
  if (packing.on_device() && !refusal(args).empty()) return std::nullopt;
  std::string text;
  for (const Candidate& c : sagebwd::explain(args)) {
    text += c.name + "\t" + (c.chosen ? "chosen" : c.supported ? "able" : "no") + "\t";
    text += c.supported ? c.tiles() : c.reason;
    text += "\n";
  }
  return text;
}

std::string explain(const Tensor& q, const Tensor& k, const Tensor& v,
                    SAGEBWD_OPTIONS(SAGEBWD_AS_ARGUMENT) bool is_backward) {
  return translated([&] {
    const Options options{SAGEBWD_OPTIONS(SAGEBWD_BY_NAME)};
    const OnDeviceOf device(q);
    return with_packing(options, q, k, [&](const Packing& packing) -> std::optional<std::string> {
      ForwardArgs args;
      const Lists lists(options, q, packing);
      fill_shared(args, q, k, v, options, packing, lists);
      const auto& shape = args.q.shape;
      args.o =
          contiguous(args.q.data, args.q.dtype, {shape[0], shape[1], shape[2], args.v.shape[3]});
      if (!is_backward) return describe(args, packing);
      BackwardArgs back;
      static_cast<AttentionArgs&>(back) = args;
      back.dout = args.o;
      back.dq = args.q;
      back.dk = args.k;
      back.dv = args.v;
      return describe(back, packing);
    });
  });
}

std::string library_version() {
  const std::string core = version();
  if (core != SAGEBWD_VERSION_STRING)
    throw std::runtime_error("sagebwd: libsagebwd.so is version " + core +
                             ", but libsagebwd_torch.so was built for " SAGEBWD_VERSION_STRING
                             "; install the package again");
  return core;
}
bool suffice(std::string recipe) {
  try {
    return codes_suffice(parse_recipe(recipe));
  } catch (const Error&) {
    return false;  // the call refuses it
  }
}
std::string library_build() { return describe_build(); }
int64_t largest_tuned(std::string dtype) {
  for (Dtype t : {Dtype::f32, Dtype::bf16, Dtype::f16})
    if (dtype == dtype_name(t)) return tuned_head_dim(t);
  throw std::runtime_error("tuned_head_dim: expected f32, bf16 or f16, got " + dtype);
}

}  // namespace
}  // namespace sagebwd::binding

SAGEBWD_EXPANDED(STABLE_TORCH_LIBRARY, SAGEBWD_OPERATORS, m) {
  m.def("fwd(Tensor q, Tensor k, Tensor v, " SAGEBWD_OPTIONS(SAGEBWD_IN_SCHEMA)
        "bool deterministic, bool return_max_logit, bool save_codes) -> "
        "(Tensor out, Tensor lse, Tensor max_logit, Tensor codes)");
  m.def(
      "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? "
      "dlse, " SAGEBWD_OPTIONS(SAGEBWD_IN_SCHEMA)
      "bool deterministic, bool partial_kv, Tensor? codes) -> "
      "(Tensor dq, Tensor dk, Tensor dv)");
  m.def("explain(Tensor q, Tensor k, Tensor v, " SAGEBWD_OPTIONS(
      SAGEBWD_IN_SCHEMA) "bool is_backward) -> str");
  m.def("version() -> str");
  m.def("build() -> str");
  m.def("tuned_head_dim(str dtype) -> int");
  m.def("codes_suffice(str recipe) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CPU, m) {
  m.impl("fwd", TORCH_BOX(&sagebwd::binding::fwd));
  m.impl("bwd", TORCH_BOX(&sagebwd::binding::bwd));
  m.impl("explain", TORCH_BOX(&sagebwd::binding::explain));
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&sagebwd::binding::fwd));
  m.impl("bwd", TORCH_BOX(&sagebwd::binding::bwd));
  m.impl("explain", TORCH_BOX(&sagebwd::binding::explain));
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CompositeExplicitAutograd, m) {
  m.impl("version", TORCH_BOX(&sagebwd::binding::library_version));
  m.impl("build", TORCH_BOX(&sagebwd::binding::library_build));
  m.impl("tuned_head_dim", TORCH_BOX(&sagebwd::binding::largest_tuned));
  m.impl("codes_suffice", TORCH_BOX(&sagebwd::binding::suffice));
}
