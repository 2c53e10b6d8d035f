// SPDX-License-Identifier: Apache-2.0
#include "spec/views.h"

#include <algorithm>

#include "base/check.h"

namespace sagebwd::spec {
namespace {

/// The largest address space there is. Addresses inside a tensor of that size can be computed
/// without overflow, whatever its strides.
constexpr int64_t kMostBytes = int64_t{1} << 57;

/// Whether no two elements share an address: each dimension steps over all that the dimensions with
/// smaller strides span. `inner` elements are contiguous. Writes to one place from two threads are
/// what this keeps out.
bool apart(std::array<int64_t, 3> shape, std::array<int64_t, 3> stride, int64_t inner) {
  std::array<size_t, 3> order{0, 1, 2};
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return stride[a] < stride[b]; });
  int64_t span = inner;
  for (size_t i : order) {
    if (shape[i] <= 1) continue;
    int64_t reach = 0;
    if (stride[i] < span) return false;
    if (__builtin_mul_overflow(stride[i], shape[i] - 1, &reach)) return false;
    if (__builtin_add_overflow(span, reach, &span)) return false;
  }
  return true;
}

/// Bytes from the first element to behind the last, at most kMostBytes. `inner` bytes are
/// contiguous.
int64_t checked_extent(const char* name, std::array<int64_t, 3> shape,
                       std::array<int64_t, 3> stride, int64_t element, int64_t inner) {
  int64_t bytes = inner;
  for (size_t i = 0; i < 3; ++i) {
    int64_t reach = 0;
    if (shape[i] <= 1) continue;
    SAGE_CHECK(!__builtin_mul_overflow(stride[i], shape[i] - 1, &reach) &&
                   !__builtin_mul_overflow(reach, element, &reach) &&
                   !__builtin_add_overflow(bytes, reach, &bytes) && bytes <= kMostBytes,
               name << ": expected a tensor within 2^57 bytes, got " << shape[i]
                    << " steps of stride " << stride[i]);
  }
  return bytes;
}

}  // namespace

std::string show(const std::array<int64_t, 4>& a) {
  std::string s = "[";
  for (size_t i = 0; i < 4; ++i) s += (i ? ", " : "") + std::to_string(a[i]);
  return s + "]";
}

void check_pointer(const char* name, const void* data, int64_t alignment, int64_t bytes) {
  SAGE_CHECK(data != nullptr, name << ": expected a data pointer, got null");
  SAGE_CHECK(reinterpret_cast<uintptr_t>(data) <= UINTPTR_MAX - static_cast<uintptr_t>(bytes),
             name << ": expected " << bytes << " bytes of memory, got the address " << data);
  SAGE_CHECK(
      reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(alignment) == 0,
      name << ": expected a data pointer aligned to " << alignment << " bytes, got " << data);
}

void check_shape(const char* name, const TensorView& t, Dtype dtype, std::array<int64_t, 4> shape) {
  SAGE_CHECK(t.dtype == dtype,
             name << ": expected dtype " << dtype_name(dtype) << ", got " << dtype_name(t.dtype));
  SAGE_CHECK(t.shape == shape, name << ": expected shape " << show(shape) << " ([b, h, n, d]), got "
                                    << show(t.shape));
}

void check_view(const char* name, const TensorView& t, Dtype dtype, std::array<int64_t, 4> shape,
                bool written, bool check_memory) {
  check_shape(name, t, dtype, shape);
  const bool empty = shape[0] == 0 || shape[1] == 0 || shape[2] == 0;
  if (empty) return;
  SAGE_CHECK(t.stride[3] == 1,
             name << ": expected channel stride 1, got strides " << show(t.stride));
  for (size_t i = 0; i < 3; ++i)
    SAGE_CHECK(t.stride[i] >= 0, name << ": expected non-negative strides, got " << show(t.stride));
  SAGE_CHECK(
      !written ||
          apart({shape[0], shape[1], shape[2]}, {t.stride[0], t.stride[1], t.stride[2]}, shape[3]),
      name << ": expected strides that keep the elements of a written tensor apart, got shape "
           << show(shape) << " strides " << show(t.stride));
  const int64_t size = dtype_size(dtype);
  const int64_t bytes =
      checked_extent(name, {shape[0], shape[1], shape[2]}, {t.stride[0], t.stride[1], t.stride[2]},
                     size, shape[3] * size);
  if (check_memory) check_pointer(name, t.data, size, bytes);
}

void check_stats(const char* name, const StatsView& s, std::array<int64_t, 3> shape, bool written,
                 bool check_memory) {
  for (int64_t stride : s.stride)
    SAGE_CHECK(stride >= 0, name << ": expected non-negative strides, got " << stride);
  if (shape[0] == 0 || shape[1] == 0 || shape[2] == 0) return;
  const int64_t bytes = checked_extent(name, shape, s.stride, sizeof(float), sizeof(float));
  if (!check_memory) return;
  SAGE_CHECK(
      !written || apart(shape, s.stride, 1),
      name << ": expected strides that keep the elements of a written tensor apart, got shape ["
           << shape[0] << ", " << shape[1] << ", " << shape[2] << "] strides [" << s.stride[0]
           << ", " << s.stride[1] << ", " << s.stride[2] << "]");
  check_pointer(name, s.data, alignof(float), bytes);
}

}  // namespace sagebwd::spec
