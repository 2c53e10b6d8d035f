// SPDX-License-Identifier: Apache-2.0
// The operators around the two branches of sparse-linear attention: mix_fwd, mix_bwd, block_means,
// top_k. Tensors are [b, h, n, d]; results have the strides of the tensor they belong to (out,
// dsparse: sparse; dlinear: linear). python/sagebwd/_ops/mix.py adds fake kernels and autograd.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <tuple>

#include "arguments.h"
#include "call.h"

namespace sagebwd::binding {
namespace {

/// What forward and backward share. `alpha` is [b or 1, h, rows]; the result keeps its memory.
Tensor fill_mix(MixArgs& args, const Tensor& sparse, const Tensor& linear, const Tensor& alpha,
                const std::optional<Tensor>& norm, int64_t block) {
  args.sparse = dense_view_of("sparse", sparse);
  args.linear = dense_view_of("linear", linear);
  const Tensor readable = fill_alpha(args.alpha, alpha, block, sparse);
  if (norm.has_value()) args.norm = fill_norm(*norm, sparse);
  set_place(args, sparse);
  return readable;
}

Tensor mix_fwd(const Tensor& sparse, const Tensor& linear, const Tensor& alpha,
               std::optional<Tensor> norm, int64_t block) {
  return translated([&] {
    const OnDeviceOf device(sparse);
    MixForwardArgs args;
    check_same_device("linear", linear, sparse);
    const Tensor sparse_rows = with_unit_channel_stride(sparse);
    const Tensor linear_rows = with_unit_channel_stride(linear);
    const Tensor kept = fill_mix(args, sparse_rows, linear_rows, alpha, norm, block);
    const Tensor out = new_like(sparse_rows);
    args.out = dense_view_of("out", out);
    mix_forward(args);
    return out;
  });
}

std::tuple<Tensor, Tensor, Tensor> mix_bwd(const Tensor& dout, const Tensor& sparse,
                                           const Tensor& linear, const Tensor& alpha,
                                           std::optional<Tensor> norm, int64_t block,
                                           bool with_dalpha) {
  return translated([&] {
    const OnDeviceOf device(sparse);
    MixBackwardArgs args;
    check_same_device("linear", linear, sparse);
    check_same_device("dout", dout, sparse);
    const Tensor dout_rows = with_unit_channel_stride(dout);
    const Tensor sparse_rows = with_unit_channel_stride(sparse);
    const Tensor linear_rows = with_unit_channel_stride(linear);
    const Tensor kept = fill_mix(args, sparse_rows, linear_rows, alpha, norm, block);
    const Tensor dsparse = new_like(sparse_rows), dlinear = new_like(linear_rows);
    const Tensor dalpha =
        with_dalpha ? new_float(sparse, {args.alpha.batches, sparse.size(1), args.alpha.rows})
                    : new_float(sparse, {0});
    args.dout = dense_view_of("dout", dout_rows);
    args.dsparse = dense_view_of("dsparse", dsparse);
    args.dlinear = dense_view_of("dlinear", dlinear);
    if (with_dalpha) args.dalpha = static_cast<float*>(dalpha.mutable_data_ptr());
    run_in_workspace(args, sparse, [](const MixBackwardArgs& a) { mix_backward(a); });
    // The sum over no token.
    if (with_dalpha && sparse.numel() == 0) torch::stable::fill_(Tensor(dalpha), 0.0);
    return std::make_tuple(dsparse, dlinear, dalpha);
  });
}

std::tuple<Tensor, Tensor> block_means_of(const Tensor& q, const Tensor& k, int64_t block_q,
                                          int64_t block_k, bool mean_free_keys) {
  return translated([&] {
    const OnDeviceOf device(q);
    check_same_device("k", k, q);
    const Tensor q_rows = with_unit_channel_stride(q), k_rows = with_unit_channel_stride(k);
    BlockMeansArgs args;
    args.q = dense_view_of("q", q_rows), args.k = dense_view_of("k", k_rows);
    args.block_q = block_q, args.block_k = block_k, args.mean_free_keys = mean_free_keys;
    set_place(args, q);
    workspace_size(args);  // checks the sizes of blocks
    const auto blocks = [](const Tensor& x, int64_t block) {
      return (x.size(2) + block - 1) / block;
    };
    const Tensor q_means = new_float(q, {q.size(0), q.size(1), blocks(q, block_q), q.size(3)});
    const Tensor k_means = new_float(k, {k.size(0), k.size(1), blocks(k, block_k), k.size(3)});
    args.q_means = static_cast<float*>(q_means.mutable_data_ptr());
    args.k_means = static_cast<float*>(k_means.mutable_data_ptr());
    run_in_workspace(args, q, [](const BlockMeansArgs& a) { block_means(a); });
    return std::make_tuple(q_means, k_means);
  });
}

std::tuple<Tensor, Tensor> top_k_of(const Tensor& scores, int64_t k) {
  return translated([&] {
    const OnDeviceOf device(scores);
    if (scores.dim() != 4 || scores.scalar_type() != torch::headeronly::ScalarType::Float)
      refuse_argument("scores: expected float32 of shape [batch, heads, rows, columns]");
    const Tensor readable = torch::stable::contiguous(scores);
    const int64_t b = scores.size(0), h = scores.size(1), rows = scores.size(2);
    const Tensor index = new_int(scores, {b, h, rows, k}), count = new_int(scores, {b, h, rows});
    TopKArgs args;
    args.scores = static_cast<const float*>(readable.const_data_ptr());
    args.rows = b * h * rows, args.columns = scores.size(3), args.k = k;
    args.index = static_cast<int32_t*>(index.mutable_data_ptr());
    args.count = static_cast<int32_t*>(count.mutable_data_ptr());
    set_place(args, scores);
    top_k(args);
    return std::make_tuple(index, count);
  });
}

}  // namespace
}  // namespace sagebwd::binding

#define SAGEBWD_MIX_INPUTS "Tensor sparse, Tensor linear, Tensor alpha, Tensor? norm, SymInt block"

STABLE_TORCH_LIBRARY_FRAGMENT(SAGEBWD_OPERATORS, m) {
  m.def("mix_fwd(" SAGEBWD_MIX_INPUTS ") -> Tensor out");
  m.def("mix_bwd(Tensor dout, " SAGEBWD_MIX_INPUTS
        ", bool with_dalpha) -> (Tensor dsparse, Tensor dlinear, Tensor dalpha)");
  m.def(
      "block_means(Tensor q, Tensor k, SymInt block_q, SymInt block_k, bool mean_free_keys) -> "
      "(Tensor q_means, Tensor k_means)");
  m.def("top_k(Tensor scores, SymInt k) -> (Tensor index, Tensor count)");
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CPU, m) {
  m.impl("mix_fwd", TORCH_BOX(&sagebwd::binding::mix_fwd));
  m.impl("mix_bwd", TORCH_BOX(&sagebwd::binding::mix_bwd));
  m.impl("block_means", TORCH_BOX(&sagebwd::binding::block_means_of));
  m.impl("top_k", TORCH_BOX(&sagebwd::binding::top_k_of));
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CUDA, m) {
  m.impl("mix_fwd", TORCH_BOX(&sagebwd::binding::mix_fwd));
  m.impl("mix_bwd", TORCH_BOX(&sagebwd::binding::mix_bwd));
  m.impl("block_means", TORCH_BOX(&sagebwd::binding::block_means_of));
  m.impl("top_k", TORCH_BOX(&sagebwd::binding::top_k_of));
}
