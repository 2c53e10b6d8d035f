// SPDX-License-Identifier: Apache-2.0
// A linear branch that mixes: mixed_fwd, mixed_bwd, and mix_sparse_bwd for the gradient that goes
// to the sparse branch. Tensors are [b, h, n, d]; results have the strides of the tensor they
// belong to. python/sagebwd/sla2_ops.py makes one operator of both branches of them. No
// implementation serves the first two on a CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "arguments.h"
#include "call.h"

namespace sagebwd::binding {
namespace {

/// A call whose tensors have no documents.
struct Dense {
  Dense(const Tensor& q, const Tensor& k, std::optional<Tensor> list_index,
        std::optional<Tensor> list_count, int64_t block_q, int64_t block_k)
      : options(linear_options(list_index, list_count, block_q, block_k)),
        packing(options, q, k, Offsets::on_host),
        lists(options, q, packing) {
    // α of nothing has no memory, by which the library knows that a call mixes.
    if (q.numel() == 0 || k.numel() == 0)
      throw Error(ErrorKind::unsupported, "mixing: expected tensors that are not empty");
  }
  Options options;
  Packing packing;
  Lists lists;
};

/// Means of K and V [2, b, hk, d]. The result keeps their memory.
std::optional<Tensor> fill_means(LinearArgs& args, const std::optional<Tensor>& means,
                                 const Tensor& k) {
  if (!means.has_value()) return std::nullopt;
  check_float("means", *means, {2, k.size(0), k.size(1), k.size(3)}, k);
  Tensor readable = torch::stable::contiguous(*means);
  args.k_mean = static_cast<const float*>(readable.const_data_ptr());
  args.v_mean = args.k_mean + k.size(0) * k.size(1) * k.size(3);
  return readable;
}

std::tuple<Tensor, Tensor, Tensor> mixed_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const Tensor& sparse, const Tensor& alpha,
                                             int64_t alpha_block, std::optional<Tensor> list_index,
                                             std::optional<Tensor> list_count, int64_t block_q,
                                             int64_t block_k, bool mean_free_keys,
                                             std::optional<Tensor> means, bool save_averages) {
  return translated([&] {
    const OnDeviceOf device(q);
    const Dense call(q, k, list_index, list_count, block_q, block_k);
    LinearForwardArgs args;
    fill_linear(args, q, k, v, call.packing, call.lists, mean_free_keys);
    const std::optional<Tensor> readable_means = fill_means(args, means, k);
    check_same_device("sparse", sparse, q);
    const Tensor readable = fill_alpha(args.alpha, alpha, alpha_block, q);
    const Tensor out = new_like(q), norm = new_float(q, {q.size(0), q.size(1), q.size(2)});
    args.sparse = dense_view_of("sparse", sparse);
    args.o = dense_view_of("out", out);
    args.norm = stats_of("norm", norm, q, call.packing);
    const size_t bytes = save_averages ? averages_size(args) : 0;
    const Tensor averages = workspace(q, bytes);
    if (bytes > 0) args.averages = averages.mutable_data_ptr(), args.averages_bytes = bytes;
    run(args, q, [](const LinearForwardArgs& a) { linear_forward(a); });
    return std::make_tuple(out, norm, averages);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mixed_bwd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& alpha,
    int64_t alpha_block, const Tensor& dq_sparse, const Tensor& dk_sparse, const Tensor& dv_sparse,
    std::optional<Tensor> alpha_parts, std::optional<Tensor> averages,
    std::optional<Tensor> list_index, std::optional<Tensor> list_count, int64_t block_q,
    int64_t block_k, bool mean_free_keys, std::optional<Tensor> means) {
  return translated([&] {
    const OnDeviceOf device(q);
    const Dense call(q, k, list_index, list_count, block_q, block_k);
    LinearBackwardArgs args;
    fill_linear(args, q, k, v, call.packing, call.lists, mean_free_keys);
    const std::optional<Tensor> readable_means = fill_means(args, means, k);
    const Tensor readable = fill_alpha(args.alpha, alpha, alpha_block, q);
    const Tensor dout_rows = with_unit_channel_stride(dout);
    const Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
    const bool with_dalpha = alpha_parts.has_value();
    const Tensor dalpha = with_dalpha
                              ? new_float(q, {args.alpha.batches, q.size(1), args.alpha.rows})
                              : new_float(q, {0});
    for (const Tensor* t : {&dout, &dq_sparse, &dk_sparse, &dv_sparse})
      check_same_device("dout, dq_sparse, dk_sparse, dv_sparse", *t, q);
    args.dout = dense_view_of("dout", dout_rows);
    args.dq = dense_view_of("dq", dq), args.dq_sparse = dense_view_of("dq_sparse", dq_sparse);
    args.dk = dense_view_of("dk", dk), args.dk_sparse = dense_view_of("dk_sparse", dk_sparse);
    args.dv = dense_view_of("dv", dv), args.dv_sparse = dense_view_of("dv_sparse", dv_sparse);
    std::optional<Tensor> parts;
    if (with_dalpha) {
      check_float("alpha_parts", *alpha_parts, {q.size(0), q.size(1), (q.size(2) + 63) / 64}, q);
      parts = torch::stable::contiguous(*alpha_parts);
      args.alpha_parts = static_cast<const float*>(parts->const_data_ptr());
      args.dalpha = static_cast<float*>(dalpha.mutable_data_ptr());
    }
    std::optional<Tensor> kept;
    if (averages.has_value()) {
      kept = readable_bytes("averages", *averages, q);
      args.averages = kept->const_data_ptr();
      args.averages_bytes = static_cast<size_t>(kept->size(0));
    }
    run(args, q, [](const LinearBackwardArgs& a) { linear_backward(a); });
    return std::make_tuple(dq, dk, dv, dalpha);
  });
}

std::tuple<Tensor, Tensor> mix_sparse_bwd(const Tensor& dout, const Tensor& sparse,
                                          const Tensor& alpha, const Tensor& norm, int64_t block,
                                          bool with_dalpha) {
  return translated([&] {
    const OnDeviceOf device(sparse);
    check_same_device("dout", dout, sparse);
    const Tensor dout_rows = with_unit_channel_stride(dout), dsparse = new_like(sparse);
    const int64_t b = sparse.size(0), h = sparse.size(1), n = sparse.size(2);
    const Tensor parts =
        with_dalpha ? new_float(sparse, {b, h, (n + 63) / 64}) : new_float(sparse, {0});
    MixSparseArgs args;
    const Tensor readable = fill_alpha(args.alpha, alpha, block, sparse);
    args.sparse = dense_view_of("sparse", sparse), args.dout = dense_view_of("dout", dout_rows);
    args.norm = fill_norm(norm, sparse);
    args.dsparse = dense_view_of("dsparse", dsparse);
    if (with_dalpha) args.parts = static_cast<float*>(parts.mutable_data_ptr());
    set_place(args, sparse);
    mix_sparse_backward(args);
    return std::make_tuple(dsparse, parts);
  });
}

}  // namespace
}  // namespace sagebwd::binding

#define SAGEBWD_MIXED_LISTS                                                                       \
  "Tensor? list_index, Tensor? list_count, SymInt block_q, SymInt block_k, bool mean_free_keys, " \
  "Tensor? means"

STABLE_TORCH_LIBRARY_FRAGMENT(sagebwd, m) {
  m.def(
      "mixed_fwd(Tensor q, Tensor k, Tensor v, Tensor sparse, Tensor alpha, SymInt "
      "alpha_block, " SAGEBWD_MIXED_LISTS
      ", bool save_averages) -> (Tensor out, Tensor norm, Tensor averages)");
  m.def(
      "mixed_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor alpha, SymInt alpha_block, "
      "Tensor dq_sparse, Tensor dk_sparse, Tensor dv_sparse, Tensor? alpha_parts, "
      "Tensor? averages, " SAGEBWD_MIXED_LISTS
      ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dalpha)");
  m.def(
      "mix_sparse_bwd(Tensor dout, Tensor sparse, Tensor alpha, Tensor norm, SymInt block, "
      "bool with_dalpha) -> (Tensor dsparse, Tensor alpha_parts)");
}

STABLE_TORCH_LIBRARY_IMPL(sagebwd, CPU, m) {
  m.impl("mixed_fwd", TORCH_BOX(&sagebwd::binding::mixed_fwd));
  m.impl("mixed_bwd", TORCH_BOX(&sagebwd::binding::mixed_bwd));
  m.impl("mix_sparse_bwd", TORCH_BOX(&sagebwd::binding::mix_sparse_bwd));
}

STABLE_TORCH_LIBRARY_IMPL(sagebwd, CUDA, m) {
  m.impl("mixed_fwd", TORCH_BOX(&sagebwd::binding::mixed_fwd));
  m.impl("mixed_bwd", TORCH_BOX(&sagebwd::binding::mixed_bwd));
  m.impl("mix_sparse_bwd", TORCH_BOX(&sagebwd::binding::mix_sparse_bwd));
}
