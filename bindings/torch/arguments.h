// SPDX-License-Identifier: Apache-2.0
// Turns PyTorch tensors into the library's views, and takes memory, threads and the stream of a
// call from PyTorch.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "options.h"
#include "sagebwd/attention.h"
#include "sagebwd/linear.h"
#include "sagebwd/mix.h"

namespace sagebwd::binding {

/// Who reads the document boundaries of a GPU call: its kernels, if the boundaries are on its
/// device, or the host, which has to wait for them.
enum class Offsets { on_device, on_host };

/// Where a call's tensors have heads and tokens, and document boundaries. Tokens after the last one
/// belong to no document.
class Packing {
 public:
  Packing(const Options& options, const Tensor& q, const Tensor& k, Offsets offsets);
  bool packed() const { return cu_q_.has_value(); }
  bool on_device() const { return documents_.on_device; }
  int64_t num_documents() const { return documents_.count; }
  // Tokens that belong to a document; all of them if only the device knows.
  int64_t tokens_q() const { return tokens_q_; }
  int64_t tokens_k() const { return tokens_k_; }
  const Documents& documents() const { return documents_; }
  // Of a tensor like q or k.
  int64_t heads(const Tensor& t) const { return t.size(heads_dim_); }
  int64_t tokens(const Tensor& t) const { return t.size(tokens_dim_); }
  int64_t heads_dim() const { return heads_dim_; }
  int64_t tokens_dim() const { return tokens_dim_; }

 private:
  std::optional<Tensor> cu_q_, cu_k_;
  Documents documents_;
  int64_t tokens_q_ = 0, tokens_k_ = 0;
  int64_t heads_dim_ = 1, tokens_dim_ = 2;
};

/// Block lists: index [b or 1, h or 1, rows, width] and count [b or 1, h or 1, rows].
class Lists {
 public:
  Lists(const Options& options, const Tensor& q, const Packing& packing);
  const BlockLists& view() const { return view_; }

 private:
  std::optional<Tensor> index_, count_;  // contiguous
  BlockLists view_;
};

/// As [b, h, n, d]: a tensor of the call's layout, or packed [t, h, d] with b = 1 and n = tokens.
TensorView view_of(const char* name, const Tensor& t, const Packing& packing, int64_t tokens);

/// [b, h, n, d].
TensorView dense_view_of(const char* name, const Tensor& t);

/// [b, h, n], or packed [h, t].
StatsView stats_of(const char* name, const Tensor& t, const Tensor& q, const Packing& packing);

/// Everything of AttentionArgs but the workspace and o, lse.
void fill_shared(AttentionArgs& args, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Options& options, const Packing& packing, const Lists& lists);

/// Everything of LinearArgs but the workspace.
void fill_linear(LinearArgs& args, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Packing& packing, const Lists& lists, bool mean_free_keys);

/// The options of the linear branch: lists alone.
Options linear_options(std::optional<Tensor> list_index, std::optional<Tensor> list_count,
                       int64_t block_q, int64_t block_k);

/// α [b or 1, h, rows] for x [b, h, n, d]; the result keeps its memory.
Tensor fill_alpha(Alpha& to, const Tensor& alpha, int64_t block, const Tensor& x);

/// Norms [b, h, n] of x [b, h, n, d].
StatsView fill_norm(const Tensor& norm, const Tensor& x);

/// The stream of x's device, or PyTorch's threads.
void set_place(Place& place, const Tensor& x);

/// Refuses anything but FP32 of this shape on the device of x.
void check_float(const char* name, const Tensor& t, std::initializer_list<int64_t> shape,
                 const Tensor& x);
void check_same_device(const char* name, const Tensor& t, const Tensor& x);

/// At least `bytes` bytes from PyTorch's allocator for the device of `like`.
Tensor workspace(const Tensor& like, size_t bytes);

/// The bytes of a row that a forward gave, side by side and from an aligned start: hooks that keep
/// saved tensors elsewhere may bring them back otherwise. Refuses anything but a row of bytes on
/// the device of q.
Tensor readable_bytes(const char* name, const Tensor& t, const Tensor& q);

/// A FP32 tensor on the device of `like`.
Tensor new_float(const Tensor& like, std::initializer_list<int64_t> shape);

/// An int32 tensor on the device of `like`.
Tensor new_int(const Tensor& like, std::initializer_list<int64_t> shape);

/// torch.empty_like: a tensor with the shape, the dtype and, as far as they are dense, the strides
/// of another.
Tensor new_like(const Tensor& t);

/// The same with another number of channels, next to each other; the other dimensions keep their
/// order in memory.
Tensor new_like(const Tensor& t, int64_t channels);

/// `t` with the channels next to each other. A gradient may be an expanded scalar.
Tensor with_unit_channel_stride(const Tensor& t);

/// The library names the fields of its structs; the operators' arguments have other names.
std::string in_words_of_python(std::string message);

[[noreturn]] void refuse_argument(const std::string& what);

}  // namespace sagebwd::binding
