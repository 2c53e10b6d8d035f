// SPDX-License-Identifier: Apache-2.0
// The operators: attention (fwd, bwd) and the linear branch (linear_fwd, linear_bwd). They know
// nothing of autograd: autograd.cpp and python/sagebwd/ops.py add that; the latter adds the fake
// kernels too.
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
    const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> cu_seqlens_q,
    std::optional<Tensor> cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> softmax_scale, bool causal, bool top_left, int64_t window_left,
    int64_t window_right, std::string recipe, int64_t seed, std::optional<Tensor> list_index,
    std::optional<Tensor> list_count, int64_t block_q, int64_t block_k, int64_t lead,
    double softcap, bool /*deterministic: the backward reads it*/, bool return_max_logit,
    bool save_codes) {
  return translated([&] {
    const Options options{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                          causal,       top_left,     window_left,  window_right, recipe,
                          seed,         list_index,   list_count,   block_q,      block_k,
                          lead,         softcap};
    const Results r = attention_forward(q, k, v, options, return_max_logit, save_codes);
    // An operator has the same results whatever is asked for.
    return std::make_tuple(r.out, r.lse, r.max_logit ? *r.max_logit : new_float(q, {0}),
                           r.codes ? *r.codes : workspace(q, 0));
  });
}

std::tuple<Tensor, Tensor, Tensor> bwd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, std::optional<Tensor> dlse, std::optional<Tensor> cu_seqlens_q,
    std::optional<Tensor> cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> softmax_scale, bool causal, bool top_left, int64_t window_left,
    int64_t window_right, std::string recipe, int64_t seed, std::optional<Tensor> list_index,
    std::optional<Tensor> list_count, int64_t block_q, int64_t block_k, int64_t lead,
    double softcap, bool deterministic, bool partial_kv, std::optional<Tensor> codes) {
  return translated([&] {
    const Options options{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                          causal,       top_left,     window_left,  window_right, recipe,
                          seed,         list_index,   list_count,   block_q,      block_k,
                          lead,         softcap};
    return attention_backward(dout, q, k, v, out, lse, dlse, codes, options,
                              {.deterministic = deterministic, .partial_kv = partial_kv});
  });
}

/// One line per implementation: "name<TAB>chosen|able|no<TAB>tiles, or why not".
template <typename Args>
std::string describe(const Args& args, const Packing& packing) {
  if (packing.on_device()) workspace_size(args);  // throws where a call would
  std::string text;
  for (const Candidate& c : sagebwd::explain(args)) {
    text += c.name + "\t" + (c.chosen ? "chosen" : c.supported ? "able" : "no") + "\t";
    text += c.supported ? c.tiles() : c.reason;
    text += "\n";
  }
  return text;
}

std::string explain(const Tensor& q, const Tensor& k, const Tensor& v,
                    std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
                    int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> softmax_scale,
                    bool causal, bool top_left, int64_t window_left, int64_t window_right,
                    std::string recipe, int64_t seed, std::optional<Tensor> list_index,
                    std::optional<Tensor> list_count, int64_t block_q, int64_t block_k,
                    int64_t lead, double softcap, bool is_backward) {
  return translated([&] {
    const Options options{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                          causal,       top_left,     window_left,  window_right, recipe,
                          seed,         list_index,   list_count,   block_q,      block_k,
                          lead,         softcap};
    const OnDeviceOf device(q);
    return with_packing(options, q, k, [&](const Packing& packing) {
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

std::tuple<Tensor, Tensor> linear_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                      std::optional<Tensor> list_index,
                                      std::optional<Tensor> list_count, int64_t block_q,
                                      int64_t block_k, bool mean_free_keys) {
  return translated([&] {
    const OnDeviceOf device(q);
    const Options options = linear_options(list_index, list_count, block_q, block_k);
    const Packing packing(options, q, k, Offsets::on_host);
    const Lists lists(options, q, packing);
    LinearForwardArgs args;
    fill_linear(args, q, k, v, packing, lists, mean_free_keys);
    const Tensor out = new_like(q);
    const Tensor norm = new_float(q, {q.size(0), q.size(1), q.size(2)});
    args.o = view_of("out", out, packing, packing.tokens_q());
    args.norm = stats_of("norm", norm, q, packing);
    run(args, q, [](const LinearForwardArgs& a) { linear_forward(a); });
    return std::make_tuple(out, norm);
  });
}

std::tuple<Tensor, Tensor, Tensor> linear_bwd(const Tensor& dout, std::optional<Tensor> dnorm,
                                              const Tensor& q, const Tensor& k, const Tensor& v,
                                              std::optional<Tensor> list_index,
                                              std::optional<Tensor> list_count, int64_t block_q,
                                              int64_t block_k, bool mean_free_keys) {
  return translated([&] {
    const OnDeviceOf device(q);
    const Options options = linear_options(list_index, list_count, block_q, block_k);
    const Packing packing(options, q, k, Offsets::on_host);
    const Lists lists(options, q, packing);
    LinearBackwardArgs args;
    fill_linear(args, q, k, v, packing, lists, mean_free_keys);
    const Tensor dout_rows = with_unit_channel_stride(dout);
    const Tensor dq = new_like(q);
    const Tensor dk = new_like(k);
    const Tensor dv = new_like(v);
    args.dout = view_of("dout", dout_rows, packing, packing.tokens_q());
    if (dnorm.has_value()) args.dnorm = stats_of("dnorm", *dnorm, q, packing);
    args.dq = view_of("dq", dq, packing, packing.tokens_q());
    args.dk = view_of("dk", dk, packing, packing.tokens_k());
    args.dv = view_of("dv", dv, packing, packing.tokens_k());
    run(args, q, [](const LinearBackwardArgs& a) { linear_backward(a); });
    return std::make_tuple(dq, dk, dv);
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
std::string library_build() { return describe_build(); }
int64_t largest_tuned(std::string dtype) {
  for (Dtype t : {Dtype::f32, Dtype::bf16, Dtype::f16})
    if (dtype == dtype_name(t)) return tuned_head_dim(t);
  throw std::runtime_error("tuned_head_dim: expected f32, bf16 or f16, got " + dtype);
}

}  // namespace
}  // namespace sagebwd::binding

// The arguments of every operator after its tensors.
#define SAGEBWD_OPTIONS                                                                         \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "      \
  "float? softmax_scale, bool causal, bool top_left, SymInt window_left, SymInt window_right, " \
  "str recipe, SymInt seed, Tensor? list_index, Tensor? list_count, SymInt block_q, "           \
  "SymInt block_k, SymInt lead, float softcap, "

#define SAGEBWD_LINEAR_OPTIONS \
  "Tensor? list_index, Tensor? list_count, SymInt block_q, SymInt block_k, bool mean_free_keys"

STABLE_TORCH_LIBRARY(sagebwd, m) {
  m.def("fwd(Tensor q, Tensor k, Tensor v, " SAGEBWD_OPTIONS
        "bool deterministic, bool return_max_logit, bool save_codes) -> "
        "(Tensor out, Tensor lse, Tensor max_logit, Tensor codes)");
  m.def(
      "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? "
      "dlse, " SAGEBWD_OPTIONS
      "bool deterministic, bool partial_kv, Tensor? codes) -> "
      "(Tensor dq, Tensor dk, Tensor dv)");
  m.def("explain(Tensor q, Tensor k, Tensor v, " SAGEBWD_OPTIONS "bool is_backward) -> str");
  for (const char* name : {"linear_fwd", "linear_fwd_cuda"})
    m.def((std::string(name) + "(Tensor q, Tensor k, Tensor v, " SAGEBWD_LINEAR_OPTIONS
                               ") -> (Tensor out, Tensor norm)")
              .c_str());
  for (const char* name : {"linear_bwd", "linear_bwd_cuda"})
    m.def((std::string(name) +
           "(Tensor dout, Tensor? dnorm, Tensor q, Tensor k, Tensor v, " SAGEBWD_LINEAR_OPTIONS
           ") -> (Tensor dq, Tensor dk, Tensor dv)")
              .c_str());
  m.def("version() -> str");
  m.def("build() -> str");
  m.def("tuned_head_dim(str dtype) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(sagebwd, CPU, m) {
  m.impl("fwd", TORCH_BOX(&sagebwd::binding::fwd));
  m.impl("bwd", TORCH_BOX(&sagebwd::binding::bwd));
  m.impl("explain", TORCH_BOX(&sagebwd::binding::explain));
  m.impl("linear_fwd", TORCH_BOX(&sagebwd::binding::linear_fwd));
  m.impl("linear_bwd", TORCH_BOX(&sagebwd::binding::linear_bwd));
}

STABLE_TORCH_LIBRARY_IMPL(sagebwd, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&sagebwd::binding::fwd));
  m.impl("bwd", TORCH_BOX(&sagebwd::binding::bwd));
  m.impl("explain", TORCH_BOX(&sagebwd::binding::explain));
  // python/sagebwd/ops.py serves linear_fwd and linear_bwd: by these, or else by PyTorch's matmuls.
  m.impl("linear_fwd_cuda", TORCH_BOX(&sagebwd::binding::linear_fwd));
  m.impl("linear_bwd_cuda", TORCH_BOX(&sagebwd::binding::linear_bwd));
}

STABLE_TORCH_LIBRARY_IMPL(sagebwd, CompositeExplicitAutograd, m) {
  m.impl("version", TORCH_BOX(&sagebwd::binding::library_version));
  m.impl("build", TORCH_BOX(&sagebwd::binding::library_build));
  m.impl("tuned_head_dim", TORCH_BOX(&sagebwd::binding::largest_tuned));
}
