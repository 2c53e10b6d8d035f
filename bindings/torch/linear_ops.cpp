// SPDX-License-Identifier: Apache-2.0
// The linear branch alone: linear_fwd, linear_bwd, and what is asked beforehand. Tensors are
// [b, h, n, d]; results have the strides of the tensor they belong to.
// python/sagebwd/_ops/linear.py adds fake kernels and autograd, and PyTorch's matmuls for what no
// kernel serves on a GPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "arguments.h"
#include "call.h"
#include "sagebwd/build.h"

namespace sagebwd::binding {
namespace {

/// What forward and backward share.
struct LinearCall {
  LinearCall(const Tensor& q, const Tensor& k, std::optional<Tensor> list_index,
             std::optional<Tensor> list_count, int64_t block_q, int64_t block_k)
      : options(linear_options(list_index, list_count, block_q, block_k)),
        packing(options, q, k, Offsets::on_host),
        lists(options, q, packing) {}
  Options options;
  Packing packing;
  Lists lists;
};

std::tuple<Tensor, Tensor> linear_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                      std::optional<Tensor> list_index,
                                      std::optional<Tensor> list_count, int64_t block_q,
                                      int64_t block_k, bool mean_free_keys) {
  return translated([&] {
    const OnDeviceOf device(q);
    const LinearCall call(q, k, list_index, list_count, block_q, block_k);
    LinearForwardArgs args;
    fill_linear(args, q, k, v, call.packing, call.lists, mean_free_keys);
    const Tensor out = new_like(q);
    const Tensor norm = new_float(q, {q.size(0), q.size(1), q.size(2)});
    args.o = dense_view_of("out", out);
    args.norm = stats_of("norm", norm, q, call.packing);
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
    const LinearCall call(q, k, list_index, list_count, block_q, block_k);
    LinearBackwardArgs args;
    fill_linear(args, q, k, v, call.packing, call.lists, mean_free_keys);
    const Tensor dout_rows = with_unit_channel_stride(dout);
    const Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
    args.dout = dense_view_of("dout", dout_rows);
    if (dnorm.has_value()) args.dnorm = stats_of("dnorm", *dnorm, q, call.packing);
    args.dq = dense_view_of("dq", dq);
    args.dk = dense_view_of("dk", dk);
    args.dv = dense_view_of("dv", dv);
    run(args, q, [](const LinearBackwardArgs& a) { linear_backward(a); });
    return std::make_tuple(dq, dk, dv);
  });
}

/// Why no implementation serves the call, a line for each; empty: one does.
std::string linear_refusal(const Tensor& q, const Tensor& k, const Tensor& v,
                           std::optional<Tensor> list_index, std::optional<Tensor> list_count,
                           int64_t block_q, int64_t block_k, bool mean_free_keys) {
  return translated([&] {
    const OnDeviceOf device(q);
    const LinearCall call(q, k, list_index, list_count, block_q, block_k);
    LinearForwardArgs args;
    fill_linear(args, q, k, v, call.packing, call.lists, mean_free_keys);
    args.o = args.q;
    return refusal(args);
  });
}

/// "64 128": the head dims that kernels of a GPU serve, of tensors of a dtype.
std::string linear_head_dims(std::string dtype) {
  for (Dtype t : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    if (dtype != dtype_name(t)) continue;
    std::string text;
    for (int64_t d : sagebwd::linear_head_dims(t))
      text += (text.empty() ? "" : " ") + std::to_string(d);
    return text;
  }
  throw std::runtime_error("linear_head_dims: expected f32, bf16 or f16, got " + dtype);
}

}  // namespace
}  // namespace sagebwd::binding

#define SAGEBWD_LINEAR_INPUTS                                                                     \
  "Tensor q, Tensor k, Tensor v, Tensor? list_index, Tensor? list_count, SymInt block_q, SymInt " \
  "block_k, bool mean_free_keys"

STABLE_TORCH_LIBRARY_FRAGMENT(SAGEBWD_OPERATORS, m) {
  m.def("linear_fwd(" SAGEBWD_LINEAR_INPUTS ") -> (Tensor out, Tensor norm)");
  m.def("linear_bwd(Tensor dout, Tensor? dnorm, " SAGEBWD_LINEAR_INPUTS
        ") -> (Tensor dq, Tensor dk, Tensor dv)");
  m.def("linear_refusal(" SAGEBWD_LINEAR_INPUTS ") -> str");
  m.def("linear_head_dims(str dtype) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CPU, m) {
  m.impl("linear_fwd", TORCH_BOX(&sagebwd::binding::linear_fwd));
  m.impl("linear_bwd", TORCH_BOX(&sagebwd::binding::linear_bwd));
  m.impl("linear_refusal", TORCH_BOX(&sagebwd::binding::linear_refusal));
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CUDA, m) {
  m.impl("linear_fwd", TORCH_BOX(&sagebwd::binding::linear_fwd));
  m.impl("linear_bwd", TORCH_BOX(&sagebwd::binding::linear_bwd));
  m.impl("linear_refusal", TORCH_BOX(&sagebwd::binding::linear_refusal));
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CompositeExplicitAutograd, m) {
  m.impl("linear_head_dims", TORCH_BOX(&sagebwd::binding::linear_head_dims));
}
