// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // PyTorch 2.11 has another name for it
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

// Defined in libtorch_cuda.so; null if PyTorch was built without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** ret_stream);

namespace sagebwd::binding {
namespace {

using torch::headeronly::ScalarType;

std::string shape_text(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

Dtype dtype_of(const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::f16;
    default:
      refuse_argument(std::string(name) + ": expected dtype float32, bfloat16 or float16");
  }
}

bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && a.is_cpu() == b.is_cpu() &&
         a.get_device_index() == b.get_device_index();
}

void check_dims(const char* name, const Tensor& t, int64_t dims) {
  if (t.dim() != dims)
    refuse_argument(std::string(name) + ": expected " + std::to_string(dims) +
                    " dimensions, got shape " + shape_text(t));
}

/// One cu_seqlens array, in memory where it can be read. Checks only what reading it requires; the
/// library checks the rest.
Tensor readable_offsets(const char* name, const Tensor& cu, const Tensor& q, bool on_device) {
  if (!cu.is_cpu() && !same_device(cu, q))
    refuse_argument(std::string(name) + ": expected a tensor on the CPU or on the device of q");
  if (cu.dim() != 1 || cu.size(0) < 1 || cu.scalar_type() != ScalarType::Int)
    refuse_argument(std::string(name) +
                    ": expected a one-dimensional int32 tensor of at least one entry, got shape " +
                    shape_text(cu));
  const Tensor there =
      cu.is_cpu() || on_device
          ? cu
          : torch::stable::to(cu, torch::stable::Device(torch::stable::DeviceType::CPU));
  return torch::stable::contiguous(there);
}

const int32_t* offsets_of(const Tensor& t) {
  return static_cast<const int32_t*>(t.const_data_ptr());
}

/// The last offset, which is how many tokens belong to documents. The first one is checked here,
/// because the library reads no offsets if there is no document.
int64_t covered(const char* name, const int32_t* cu, int64_t count, int64_t total,
                int64_t longest) {
  if (cu[0] != 0)
    refuse_argument(std::string(name) + ": expected to start at 0, got " + std::to_string(cu[0]));
  const int64_t end = cu[count];
  if (end < 0 || end > total)
    refuse_argument(std::string(name) + ": expected to end within the packed length " +
                    std::to_string(total) + ", got " + std::to_string(end));
  for (int64_t t = 0; longest >= 0 && t < count; ++t)
    if (int64_t{cu[t + 1]} - cu[t] > longest)
      refuse_argument(std::string("max_seqlen of ") + name + ": got " + std::to_string(longest) +
                      ", but document " + std::to_string(t) + " has length " +
                      std::to_string(int64_t{cu[t + 1]} - cu[t]));
  return end;
}

/// The library's loops on PyTorch's threads. Work is handed out one item at a time because items
/// differ in size (causal masks, documents); inside another parallel region PyTorch runs the whole
/// loop on the calling thread.
void run_on_torch_threads(void*, int64_t count, void (*body)(void*, int64_t), void* user) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(torch::stable::get_num_threads(), count);
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) body(user, i);
  });
}

void check_longest(const char* name, int64_t longest, bool packed) {
  if (longest < -1 || (!packed && longest > 0))
    refuse_argument(std::string(name) + ": expected " +
                    (packed ? "a length, or -1 for not told" : "-1 without cu_seqlens") + ", got " +
                    std::to_string(longest));
}

/// The scale as the library takes it. There 0 stands for "the default", so a caller's own value
/// must not be 0 nor round to 0 in FP32.
float scale_of(std::optional<double> softmax_scale) {
  if (!softmax_scale) return 0.0f;
  const auto scale = static_cast<float>(*softmax_scale);
  if (scale == 0.0f || !std::isfinite(scale)) {
    std::ostringstream got;
    got << *softmax_scale;
    refuse_argument("softmax_scale: expected a finite number other than 0 within float32, got " +
                    got.str());
  }
  return scale;
}

/// An uninitialised tensor on the device of `like`. This function of PyTorch costs a fraction of
/// torch::stable::new_empty, which looks up an operator by its name, and a small call is half
/// allocations.
Tensor new_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, int64_t dims,
                   int32_t dtype) {
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, dtype, type, like.get_device_index(), &made));
  return Tensor(made);
}

Tensor new_contiguous(const Tensor& like, std::initializer_list<int64_t> shape, int32_t dtype) {
  std::array<int64_t, 4> strides{};
  int64_t size = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = size;
    size *= std::max<int64_t>(shape.begin()[i], 1);
  }
  return new_strided(like, shape.begin(), strides.data(), static_cast<int64_t>(shape.size()),
                     dtype);
}

/// Whether the elements of the first dimensions of a tensor lie behind one another in some order of
/// these dimensions.
bool is_dense(const Tensor& t, int64_t dims) {
  const auto sizes = t.sizes(), strides = t.strides();
  const auto taken = [&](int64_t dim) { return sizes[dim] > 1; };  // other strides: any number
  int64_t span = 1, left = 0;
  for (int64_t dim = 0; dim < dims; ++dim) left += taken(dim);
  for (; left > 0; --left) {
    int64_t next = 0;  // the dimension that steps over what the ones before it span
    while (next < dims && !(taken(next) && strides[next] == span)) ++next;
    if (next == dims) return false;
    span *= sizes[next];
  }
  return t.numel() > 0;
}

void* current_stream(int32_t device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr)
    refuse_argument("this PyTorch has no CUDA support");
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

/// Puts a call on the stream of q's device, or on PyTorch's threads.
template <typename Args>
void run_where(Args& args, const Tensor& q) {
  if (q.is_cuda()) {
    args.device = Device::cuda;
    args.stream = current_stream(q.get_device_index());
  } else {
    args.parallel_for = {run_on_torch_threads, nullptr};
  }
}

}  // namespace

std::string in_words_of_python(std::string message) {
  for (const auto& [field, argument] :
       {std::pair<std::string, std::string>{"documents.cu_q", "cu_seqlens_q"},
        {"documents.cu_k", "cu_seqlens_k"}})
    for (size_t at = 0; (at = message.find(field, at)) != std::string::npos;)
      message.replace(at, field.size(), argument);
  return message;
}

void refuse_argument(const std::string& what) { throw Error(ErrorKind::invalid_argument, what); }

Packing::Packing(const Options& options, const Tensor& q, const Tensor& k, Offsets offsets) {
  if (options.cu_seqlens_q.has_value() != options.cu_seqlens_k.has_value())
    refuse_argument("cu_seqlens_q, cu_seqlens_k: expected both or neither");
  const bool has_documents = options.cu_seqlens_q.has_value();
  check_longest("max_seqlen_q", options.max_seqlen_q, has_documents);
  check_longest("max_seqlen_k", options.max_seqlen_k, has_documents);
  const int64_t dims = has_documents ? 3 : 4;
  if (q.dim() != dims || k.dim() != dims)
    refuse_argument("q, k: expected " + std::to_string(dims) + " dimensions, got shapes " +
                    shape_text(q) + " and " + shape_text(k));
  if (!has_documents) {
    if (options.tokens_first) std::swap(heads_dim_, tokens_dim_);
    tokens_q_ = tokens(q), tokens_k_ = tokens(k);
    return;
  }
  tokens_dim_ = 0;
  const bool on_device = offsets == Offsets::on_device && q.is_cuda() &&
                         same_device(*options.cu_seqlens_q, q) &&
                         same_device(*options.cu_seqlens_k, q);
  cu_q_ = readable_offsets("cu_seqlens_q", *options.cu_seqlens_q, q, on_device);
  cu_k_ = readable_offsets("cu_seqlens_k", *options.cu_seqlens_k, q, on_device);
  if (cu_q_->size(0) != cu_k_->size(0))
    refuse_argument("cu_seqlens_q, cu_seqlens_k: expected the same length, got " +
                    std::to_string(cu_q_->size(0)) + " and " + std::to_string(cu_k_->size(0)));
  documents_ = {offsets_of(*cu_q_), offsets_of(*cu_k_), cu_q_->size(0) - 1, on_device};
  const int64_t count = documents_.count;
  // For the library, "no document" means "not packed". Here it means that no token belongs to one.
  tokens_q_ = count > 0 ? q.size(0) : 0, tokens_k_ = count > 0 ? k.size(0) : 0;
  if (on_device) return;
  tokens_q_ = covered("cu_seqlens_q", documents_.cu_q, count, q.size(0), options.max_seqlen_q);
  tokens_k_ = covered("cu_seqlens_k", documents_.cu_k, count, k.size(0), options.max_seqlen_k);
}

Lists::Lists(const Options& options, const Tensor& q, const Packing& packing) {
  const auto refuse = [](const char* name, const char* shape, const Tensor& t) {
    refuse_argument(std::string(name) + ": expected int32 of shape " + shape +
                    " on the device of q, got shape " + shape_text(t));
  };
  if (!options.list_index) {
    if (options.list_count) refuse_argument("list_count: expected list_index beside it");
    return;
  }
  const Tensor& index = *options.list_index;
  const int64_t batches = packing.packed() ? 1 : q.size(0);
  if (index.dim() != 4 || index.scalar_type() != ScalarType::Int || !same_device(index, q) ||
      (index.size(0) != 1 && index.size(0) != batches) ||
      (index.size(1) != 1 && index.size(1) != packing.heads(q)))
    refuse("list_index", "[batch or 1, heads or 1, rows, width]", index);
  index_ = torch::stable::contiguous(index);
  view_.index = static_cast<const int32_t*>(index_->const_data_ptr());
  view_.rows = index.size(2), view_.width = index.size(3);
  view_.stride_head = index.size(1) == 1 ? 0 : view_.rows;
  view_.stride_batch = index.size(0) == 1 ? 0 : index.size(1) * view_.rows;
  const auto block = [](const char* name, int64_t size) {
    if (size < 0 || size > std::numeric_limits<int>::max())
      refuse_argument(std::string(name) + ": expected a multiple of 64, got " +
                      std::to_string(size));
    return static_cast<int>(size);
  };
  view_.block_q = block("block_q", options.block_q);
  view_.block_k = block("block_k", options.block_k);
  view_.lead =
      static_cast<int>(std::clamp<int64_t>(options.lead, -2, std::numeric_limits<int>::max()));
  view_.on_device = q.is_cuda();
  if (!options.list_count) return;
  const Tensor& count = *options.list_count;
  if (count.dim() != 3 || count.scalar_type() != ScalarType::Int || !same_device(count, q) ||
      count.size(0) != index.size(0) || count.size(1) != index.size(1) ||
      count.size(2) != index.size(2))
    refuse("list_count", "[batch or 1, heads or 1, rows] like list_index", count);
  count_ = torch::stable::contiguous(count);
  view_.count = static_cast<const int32_t*>(count_->const_data_ptr());
}

TensorView view_of(const char* name, const Tensor& t, const Packing& packing, int64_t tokens) {
  const Dtype dtype = dtype_of(name, t);
  const bool packed = packing.packed();
  check_dims(name, t, packed ? 3 : 4);
  const int64_t h = packing.heads_dim(), n = packing.tokens_dim(), d = packed ? 2 : 3;
  return {const_cast<void*>(t.const_data_ptr()),
          dtype,
          {packed ? 1 : t.size(0), t.size(h), packed ? tokens : t.size(n), t.size(d)},
          {packed ? 0 : t.stride(0), t.stride(h), t.stride(n), t.stride(d)}};
}

TensorView dense_view_of(const char* name, const Tensor& t) {
  const Dtype dtype = dtype_of(name, t);
  check_dims(name, t, 4);
  return {const_cast<void*>(t.const_data_ptr()),
          dtype,
          {t.size(0), t.size(1), t.size(2), t.size(3)},
          {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}};
}

StatsView stats_of(const char* name, const Tensor& t, const Tensor& q, const Packing& packing) {
  const bool packed = packing.packed();
  const int64_t batches = packed ? 0 : 1;  // dimensions before the heads
  const bool fits = t.dim() == 2 + batches && (packed || t.size(0) == q.size(0)) &&
                    t.size(batches) == packing.heads(q) && t.size(batches + 1) == packing.tokens(q);
  if (!fits || t.scalar_type() != ScalarType::Float)
    refuse_argument(std::string(name) + ": expected float32 of shape " +
                    (packed ? "[heads, tokens]" : "[batch, heads, tokens]") + ", got shape " +
                    shape_text(t));
  check_same_device(name, t, q);
  float* data = static_cast<float*>(const_cast<void*>(t.const_data_ptr()));
  if (packed) return {data, {0, t.stride(0), t.stride(1)}};
  return {data, {t.stride(0), t.stride(1), t.stride(2)}};
}

void fill_shared(AttentionArgs& args, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Options& o, const Packing& packing, const Lists& lists) {
  check_same_device("k", k, q);
  check_same_device("v", v, q);
  args.q = view_of("q", q, packing, packing.tokens_q());
  args.k = view_of("k", k, packing, packing.tokens_k());
  args.v = view_of("v", v, packing, packing.tokens_k());
  args.scale = scale_of(o.softmax_scale);
  args.softcap = static_cast<float>(o.softcap);
  args.mask = {o.causal, o.top_left ? Align::top_left : Align::bottom_right, o.window_left,
               o.window_right};
  args.documents = packing.documents();
  args.blocks = lists.view();
  args.recipe = parse_recipe(o.recipe);
  args.recipe.seed = static_cast<uint64_t>(o.seed);
  run_where(args, q);
}

void fill_linear(LinearArgs& args, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Packing& packing, const Lists& lists, bool mean_free_keys) {
  check_same_device("k", k, q);
  check_same_device("v", v, q);
  args.q = view_of("q", q, packing, packing.tokens_q());
  args.k = view_of("k", k, packing, packing.tokens_k());
  args.v = view_of("v", v, packing, packing.tokens_k());
  args.excluded = lists.view();
  args.mean_free_keys = mean_free_keys;
  run_where(args, q);
}

Options linear_options(std::optional<Tensor> list_index, std::optional<Tensor> list_count,
                       int64_t block_q, int64_t block_k) {
  Options options;
  options.list_index = list_index, options.list_count = list_count;
  options.block_q = block_q, options.block_k = block_k;
  return options;
}

Tensor fill_alpha(Alpha& to, const Tensor& alpha, int64_t block, const Tensor& x) {
  if (block < 1 || (block != 1 && block % 64 != 0))
    refuse_argument("block: expected 1 or a multiple of 64, got " + std::to_string(block));
  if (alpha.dim() != 3) refuse_argument("alpha: expected 3 dimensions [b or 1, h, rows]");
  const int64_t b = x.size(0), h = x.size(1), n = x.size(2);
  const int64_t batches = alpha.size(0) == 1 ? 1 : b, rows = n / block + (n % block != 0);
  check_float("alpha", alpha, {batches, h, rows}, x);
  const Tensor readable = torch::stable::contiguous(alpha);
  to = {static_cast<const float*>(readable.const_data_ptr()), batches, rows, block};
  return readable;
}

StatsView fill_norm(const Tensor& norm, const Tensor& x) {
  check_float("norm", norm, {x.size(0), x.size(1), x.size(2)}, x);
  return {static_cast<float*>(const_cast<void*>(norm.const_data_ptr())),
          {norm.stride(0), norm.stride(1), norm.stride(2)}};
}

void check_same_device(const char* name, const Tensor& t, const Tensor& x) {
  if (!same_device(t, x))
    refuse_argument(std::string(name) + ": expected the device of the other tensors");
}

void set_place(Place& place, const Tensor& x) { run_where(place, x); }

void check_float(const char* name, const Tensor& t, std::initializer_list<int64_t> shape,
                 const Tensor& x) {
  check_same_device(name, t, x);
  const auto sizes = t.sizes();
  if (t.scalar_type() != ScalarType::Float ||
      !std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    std::string wanted;
    for (int64_t size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
    refuse_argument(std::string(name) + ": expected float32 of shape [" + wanted + "], got shape " +
                    shape_text(t));
  }
}

Tensor workspace(const Tensor& like, size_t bytes) {
  return new_contiguous(like, {static_cast<int64_t>(bytes)}, aoti_torch_dtype_uint8());
}

Tensor readable_bytes(const char* name, const Tensor& t, const Tensor& q) {
  check_same_device(name, t, q);
  if (t.dim() != 1 || t.scalar_type() != ScalarType::Byte)
    refuse_argument(std::string(name) + ": expected the uint8 tensor that the forward gave, got " +
                    "another of shape " + shape_text(t));
  constexpr uintptr_t kAlign = 16;
  const bool dense = t.size(0) < 2 || t.stride(0) == 1,
             aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlign == 0;
  if (dense && aligned) return t;
  Tensor copy = workspace(q, static_cast<size_t>(t.size(0)));
  torch::stable::copy_(copy, t);
  return copy;
}

Tensor new_float(const Tensor& like, std::initializer_list<int64_t> shape) {
  return new_contiguous(like, shape, aoti_torch_dtype_float32());
}

Tensor new_int(const Tensor& like, std::initializer_list<int64_t> shape) {
  return new_contiguous(like, shape, aoti_torch_dtype_int32());
}

Tensor new_like(const Tensor& t) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  const auto sizes = t.sizes(), strides = t.strides();
  const int64_t dims = t.dim(), last = dims - 1;
  if (is_dense(t, dims)) return new_strided(t, sizes.data(), strides.data(), dims, dtype);
  // What stands in for k beside codes has one element for all channels.
  if (dims > 4 || strides[last] != 0 || !is_dense(t, last)) return torch::stable::empty_like(t);
  std::array<int64_t, 4> spread{};
  for (int64_t dim = 0; dim < last; ++dim) spread[dim] = strides[dim] * sizes[last];
  spread[last] = 1;
  return new_strided(t, sizes.data(), spread.data(), dims, dtype);
}

Tensor new_like(const Tensor& t, int64_t channels) {
  const int64_t dims = t.dim(), last = dims - 1;
  if (channels == t.size(last)) return new_like(t);
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  const auto sizes = t.sizes(), strides = t.strides();
  std::array<int64_t, 4> order{}, shape{}, dense{};
  for (int64_t dim = 0; dim < last; ++dim) order[dim] = last - 1 - dim, shape[dim] = sizes[dim];
  std::stable_sort(order.begin(), order.begin() + last,
                   [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  shape[last] = channels, dense[last] = 1;
  int64_t span = channels;
  for (int64_t i = 0; i < last; ++i) {
    dense[order[i]] = span;
    span *= shape[order[i]];
  }
  return new_strided(t, shape.data(), dense.data(), dims, dtype);
}

Tensor with_unit_channel_stride(const Tensor& t) {
  return t.stride(t.dim() - 1) == 1 ? t : torch::stable::contiguous(t);
}

}  // namespace sagebwd::binding
