// SPDX-License-Identifier: Apache-2.0
// Both branches of sparse-linear attention and their mix as one operator in each direction:
// sla2_fwd, sla2_bwd. Tensors are [b, h, n, d]; results have the strides of the tensor they belong
// to. python/sagebwd/_ops/sla2.py adds fake kernels and autograd.
//
// Where a linear branch mixes, what lies between the branches need not pass through memory: it
// writes the mixed output, and its backward adds the gradients of the sparse branch to its own.
// Elsewhere (on a CPU) the mix is a call of its own. Which of the two it is, is asked beforehand.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <utility>

#include "arguments.h"
#include "attention.h"
#include "call.h"

namespace sagebwd::binding {
namespace {

/// The arguments that both operators have after their tensors, in order.
#define SAGEBWD_SLA2_PARAMETERS                                                                    \
  bool causal, std::string recipe, int64_t seed, const Tensor &list_index,                         \
      std::optional<Tensor> list_count, int64_t lead, const Tensor &excluded_index,                \
      std::optional<Tensor> excluded_count, int64_t block_q, int64_t block_k, bool mean_free_keys, \
      int64_t alpha_block, bool deterministic
#define SAGEBWD_SLA2_ARGUMENTS                                                                 \
  causal, recipe, seed, list_index, list_count, lead, excluded_index, excluded_count, block_q, \
      block_k, mean_free_keys, alpha_block, deterministic
#define SAGEBWD_SLA2_OPTIONS                                                                   \
  "bool causal, str recipe, SymInt seed, Tensor list_index, Tensor? list_count, SymInt lead, " \
  "Tensor excluded_index, Tensor? excluded_count, SymInt block_q, SymInt block_k, "            \
  "bool mean_free_keys, SymInt alpha_block, bool deterministic"

class Sla2 {
 public:
  Sla2(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& share,
       SAGEBWD_SLA2_PARAMETERS)
      : q(query),
        k(key),
        v(value),
        sparse_(linear_options(list_index, std::move(list_count), block_q, block_k)),
        excluded_(linear_options(excluded_index, std::move(excluded_count), block_q, block_k)),
        packing_(excluded_, q, k, Offsets::on_host),
        lists_(excluded_, q, packing_),
        mean_free_keys_(mean_free_keys),
        deterministic_(deterministic) {
    sparse_.causal = causal;
    sparse_.window_left = sparse_.window_right = -1;
    sparse_.recipe = std::move(recipe), sparse_.seed = seed;
    sparse_.lead = lead;
    readable_alpha_ = fill_alpha(alpha_, share, alpha_block, q);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(bool save_codes,
                                                                     bool save_averages) const {
    const Results sparse = attention_forward(q, k, v, sparse_, false, save_codes);
    const Tensor codes = sparse.codes ? *sparse.codes : workspace(q, 0);
    const Tensor out = new_like(q), norm = new_float(q, {q.size(0), q.size(1), q.size(2)});
    LinearForwardArgs args;
    fill(args);
    args.norm = stats_of("norm", norm, q, packing_);
    args.o = dense_view_of("out", out);
    const Tensor averages = workspace(q, save_averages ? averages_size(args) : 0);

    LinearForwardArgs mixed = args;
    mixed.alpha = alpha_, mixed.sparse = dense_view_of("sparse", sparse.out);
    if (save_averages) set_averages(mixed, averages);
    if (mixes(mixed)) {
      run(mixed, q, [](const LinearForwardArgs& a) { linear_forward(a); });
    } else {
      const Tensor linear = new_like(q);
      args.o = dense_view_of("linear", linear);
      run(args, q, [](const LinearForwardArgs& a) { linear_forward(a); });
      MixForwardArgs mix;
      fill(mix, sparse.out, linear, norm);
      mix.out = dense_view_of("out", out);
      mix_forward(mix);
      // Nobody reads these: what does not mix here does not in the backward. They are NaN.
      torch::stable::fill_(averages, 255.0);
    }
    return {out, sparse.out, sparse.lse, norm, codes, averages};
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dout, const Tensor& sparse,
                                                      const Tensor& lse, const Tensor& norm,
                                                      const std::optional<Tensor>& codes,
                                                      const std::optional<Tensor>& averages,
                                                      bool with_dalpha) const {
    check_same_device("dout", dout, q);
    check_same_device("sparse", sparse, q);
    const Tensor dout_rows = with_unit_channel_stride(dout),
                 sparse_rows = with_unit_channel_stride(sparse);
    Tensor parts = new_float(q, {0});
    const auto [dq_sparse, dk_sparse, dv_sparse] = [&] {
      const Tensor dsparse = new_like(sparse_rows);
      if (with_dalpha) parts = new_float(q, {q.size(0), q.size(1), (q.size(2) + 63) / 64});
      sparse_share(dout_rows, sparse_rows, norm, dsparse, with_dalpha ? &parts : nullptr);
      return attention_backward(dsparse, q, k, v, sparse, lse, std::nullopt, codes, sparse_,
                                {.deterministic = deterministic_});
    }();

    const Tensor dq = new_like(q), dk = new_like(k), dv = new_like(v);
    const Tensor dalpha =
        with_dalpha ? new_float(q, {alpha_.batches, q.size(1), alpha_.rows}) : new_float(q, {0});
    LinearBackwardArgs args;
    fill(args);
    args.dout = dense_view_of("dout", dout_rows);
    args.dq = dense_view_of("dq", dq), args.dk = dense_view_of("dk", dk);
    args.dv = dense_view_of("dv", dv);

    LinearBackwardArgs mixed = args;
    mixed.alpha = alpha_;
    mixed.dq_sparse = dense_view_of("dq", dq_sparse);
    mixed.dk_sparse = dense_view_of("dk", dk_sparse);
    mixed.dv_sparse = dense_view_of("dv", dv_sparse);
    if (with_dalpha) {
      mixed.alpha_parts = static_cast<const float*>(parts.const_data_ptr());
      mixed.dalpha = static_cast<float*>(dalpha.mutable_data_ptr());
    }
    std::optional<Tensor> kept;
    if (averages.has_value()) {
      kept = readable_bytes("averages", *averages, q);
      set_averages(mixed, *kept);
    }
    if (mixes(mixed)) {
      run(mixed, q, [](const LinearBackwardArgs& a) { linear_backward(a); });
      return {dq, dk, dv, dalpha};
    }
    const Tensor dlinear = gradient_of_linear(dout_rows, sparse_rows, norm, dalpha, with_dalpha);
    args.dout = dense_view_of("dlinear", dlinear);
    run(args, q, [](const LinearBackwardArgs& a) { linear_backward(a); });
    const auto sum = [](const Tensor& a, const Tensor& b) {
      return torch::stable::subtract(a, b, -1.0);
    };
    return {sum(dq_sparse, dq), sum(dk_sparse, dk), sum(dv_sparse, dv), dalpha};
  }

 private:
  void fill(LinearArgs& args) const {
    fill_linear(args, q, k, v, packing_, lists_, mean_free_keys_);
  }
  void fill(MixArgs& args, const Tensor& sparse, const Tensor& linear, const Tensor& norm) const {
    args.sparse = dense_view_of("sparse", sparse), args.linear = dense_view_of("linear", linear);
    args.alpha = alpha_, args.norm = fill_norm(norm, q);
    set_place(args, q);
  }
  template <typename Args>
  static void set_averages(Args& args, const Tensor& averages) {
    args.averages = const_cast<void*>(averages.const_data_ptr());
    args.averages_bytes = static_cast<size_t>(averages.size(0));
  }
  /// Whether a linear branch takes the mix as well. α of nothing has no memory, by which the
  /// library knows that a call mixes.
  template <typename Args>
  bool mixes(const Args& args) const {
    return q.numel() > 0 && k.numel() > 0 && refusal(args).empty();
  }

  /// The gradient of the sparse branch, and its parts of that of α.
  void sparse_share(const Tensor& dout, const Tensor& sparse, const Tensor& norm,
                    const Tensor& dsparse, const Tensor* parts) const {
    MixSparseArgs args;
    args.sparse = dense_view_of("sparse", sparse), args.dout = dense_view_of("dout", dout);
    args.alpha = alpha_, args.norm = fill_norm(norm, q);
    args.dsparse = dense_view_of("dsparse", dsparse);
    if (parts != nullptr) args.parts = static_cast<float*>(parts->mutable_data_ptr());
    set_place(args, q);
    mix_sparse_backward(args);
  }

  /// The gradient of the linear branch, whose output is made again, and that of α.
  Tensor gradient_of_linear(const Tensor& dout, const Tensor& sparse, const Tensor& norm,
                            const Tensor& dalpha, bool with_dalpha) const {
    const Tensor linear = new_like(q), dlinear = new_like(q), dsparse = new_like(q);
    LinearForwardArgs again;
    fill(again);
    again.o = dense_view_of("linear", linear);
    run(again, q, [](const LinearForwardArgs& a) { linear_forward(a); });
    MixBackwardArgs mix;
    fill(mix, sparse, linear, norm);
    mix.dout = dense_view_of("dout", dout);
    mix.dsparse = dense_view_of("dsparse", dsparse);
    mix.dlinear = dense_view_of("dlinear", dlinear);
    if (with_dalpha) mix.dalpha = static_cast<float*>(dalpha.mutable_data_ptr());
    run_in_workspace(mix, q, [](const MixBackwardArgs& a) { mix_backward(a); });
    // The sum over no token.
    if (with_dalpha && q.numel() == 0) torch::stable::fill_(dalpha, 0.0);
    return dlinear;
  }

  const Tensor &q, &k, &v;
  Options sparse_, excluded_;
  Packing packing_;
  Lists lists_;
  Alpha alpha_;
  Tensor readable_alpha_;
  bool mean_free_keys_, deterministic_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sla2_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& alpha, SAGEBWD_SLA2_PARAMETERS,
    bool save_codes, bool save_averages) {
  return translated([&] {
    const OnDeviceOf device(q);
    return Sla2(q, k, v, alpha, SAGEBWD_SLA2_ARGUMENTS).forward(save_codes, save_averages);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sla2_bwd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& alpha,
    const Tensor& sparse, const Tensor& lse, const Tensor& norm, std::optional<Tensor> codes,
    std::optional<Tensor> averages, SAGEBWD_SLA2_PARAMETERS, bool with_dalpha) {
  return translated([&] {
    const OnDeviceOf device(q);
    return Sla2(q, k, v, alpha, SAGEBWD_SLA2_ARGUMENTS)
        .backward(dout, sparse, lse, norm, codes, averages, with_dalpha);
  });
}

}  // namespace
}  // namespace sagebwd::binding

STABLE_TORCH_LIBRARY_FRAGMENT(SAGEBWD_OPERATORS, m) {
  m.def("sla2_fwd(Tensor q, Tensor k, Tensor v, Tensor alpha, " SAGEBWD_SLA2_OPTIONS
        ", bool save_codes, bool save_averages) -> (Tensor out, Tensor sparse, Tensor lse, "
        "Tensor norm, Tensor codes, Tensor averages)");
  m.def(
      "sla2_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor sparse, "
      "Tensor lse, Tensor norm, Tensor? codes, Tensor? averages, " SAGEBWD_SLA2_OPTIONS
      ", bool with_dalpha) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dalpha)");
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CPU, m) {
  m.impl("sla2_fwd", TORCH_BOX(&sagebwd::binding::sla2_fwd));
  m.impl("sla2_bwd", TORCH_BOX(&sagebwd::binding::sla2_bwd));
}

STABLE_TORCH_LIBRARY_IMPL(SAGEBWD_OPERATORS, CUDA, m) {
  m.impl("sla2_fwd", TORCH_BOX(&sagebwd::binding::sla2_fwd));
  m.impl("sla2_bwd", TORCH_BOX(&sagebwd::binding::sla2_bwd));
}
