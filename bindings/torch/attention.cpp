// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <torch/csrc/stable/ops.h>

#include <limits>

#include "call.h"

namespace sagebwd::binding {
namespace {

/// Fills the results of tokens that belong to no document; they are defined too.
void fill_rest(const Tensor& t, int64_t dim, int64_t tokens, double value) {
  if (tokens == t.size(dim)) return;
  Tensor whole = t;
  torch::stable::fill_(torch::stable::narrow(whole, dim, tokens, t.size(dim) - tokens), value);
}

/// The codes of a call, if there are any. Without a document there are none, although their size
/// counts the tokens behind the last document.
void set_codes(AttentionArgs& args, const Tensor& codes, const Packing& packing) {
  if (codes.size(0) == 0 || (packing.packed() && packing.num_documents() == 0)) return;
  args.codes = const_cast<void*>(codes.const_data_ptr());
  args.codes_bytes = static_cast<size_t>(codes.size(0));
}

/// Runs a call. False if offsets on the device are what no implementation takes.
bool attempt(const Packing& packing, const ForwardArgs& args) {
  if (packing.on_device()) return try_forward(args);
  return forward(args), true;
}
bool attempt(const Packing& packing, const BackwardArgs& args) {
  if (packing.on_device()) return try_backward(args);
  return backward(args), true;
}

/// Bytes of the codes of a call. Tokens behind the last document count too, so that the size
/// follows from the shapes of the tensors alone.
size_t codes_bytes(const Tensor& q, const Tensor& k, const Tensor& v, const Packing& packing) {
  const bool packed = packing.packed();
  const int64_t batches = packed ? 1 : q.size(0);
  const CodesLayout layout({.h = packing.heads(q),
                            .hk = packing.heads(k),
                            .d = q.size(q.dim() - 1),
                            .dv = v.size(v.dim() - 1),
                            .queries = batches * packing.tokens(q),
                            .keys = batches * packing.tokens(k),
                            .sequences = packed ? packing.num_documents() : batches,
                            .packed = packed});
  return static_cast<size_t>(layout.bytes);
}

}  // namespace

Results attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options,
                          bool return_max_logit, bool save_codes) {
  const OnDeviceOf device(q);
  return with_packing(options, q, k, [&](const Packing& packing) -> std::optional<Results> {
    ForwardArgs args;
    const Lists lists(options, q, packing);
    fill_shared(args, q, k, v, options, packing, lists);
    const int64_t heads = packing.heads(q);
    Results r{new_like(q, v.size(v.dim() - 1)),
              packing.packed() ? new_float(q, {heads, q.size(0)})
                               : new_float(q, {q.size(0), heads, packing.tokens(q)}),
              std::nullopt, std::nullopt};
    args.o = view_of("out", r.out, packing, packing.tokens_q());
    args.lse = stats_of("lse", r.lse, q, packing);
    if (return_max_logit) {
      const int64_t rows = packing.packed() ? packing.num_documents() : q.size(0);
      r.max_logit = new_float(q, {rows, heads});
      if (rows * heads > 0) args.max_logit = static_cast<float*>(r.max_logit->mutable_data_ptr());
    }
    if (save_codes) {
      r.codes = workspace(q, codes_bytes(q, k, v, packing));
      set_codes(args, *r.codes, packing);
    }
    if (!run(args, q, [&](const ForwardArgs& a) { return attempt(packing, a); }))
      return std::nullopt;
    if (packing.packed()) {
      fill_rest(r.out, 0, packing.tokens_q(), 0.0);
      fill_rest(r.lse, 1, packing.tokens_q(), -std::numeric_limits<double>::infinity());
    }
    return r;
  });
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const std::optional<Tensor>& dlse, const std::optional<Tensor>& codes,
    const Options& options, BackwardSwitches switches) {
  const OnDeviceOf device(q);
  using Gradients = std::tuple<Tensor, Tensor, Tensor>;
  return with_packing(options, q, k, [&](const Packing& packing) -> std::optional<Gradients> {
    BackwardArgs args;
    const Lists lists(options, q, packing);
    fill_shared(args, q, k, v, options, packing, lists);
    const Tensor dout_rows = with_unit_channel_stride(dout);
    const Tensor out_rows = with_unit_channel_stride(out);
    const Tensor dq = new_like(q);
    const Tensor dk = new_like(k);
    const Tensor dv = new_like(v);
    args.o = view_of("out", out_rows, packing, packing.tokens_q());
    args.lse = stats_of("lse", lse, q, packing);
    args.dout = view_of("dout", dout_rows, packing, packing.tokens_q());
    args.dq = view_of("dq", dq, packing, packing.tokens_q());
    args.dk = view_of("dk", dk, packing, packing.tokens_k());
    args.dv = view_of("dv", dv, packing, packing.tokens_k());
    if (dlse.has_value()) args.dlse = stats_of("dlse", *dlse, q, packing);
    args.partial_kv = switches.partial_kv;
    args.deterministic = switches.deterministic;
    std::optional<Tensor> readable;
    if (codes.has_value()) {
      readable = readable_bytes("codes", *codes, q);
      set_codes(args, *readable, packing);
    }
    if (!run(args, q, [&](const BackwardArgs& a) { return attempt(packing, a); }))
      return std::nullopt;
    if (packing.packed()) {
      fill_rest(dq, 0, packing.tokens_q(), 0.0);
      fill_rest(dk, 0, packing.tokens_k(), 0.0);
      fill_rest(dv, 0, packing.tokens_k(), 0.0);
    }
    return Gradients(dq, dk, dv);
  });
}

}  // namespace sagebwd::binding
