// SPDX-License-Identifier: Apache-2.0
// Plain types of the public interface: element types, tensor views, and the parallel-for callback.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#if defined(SAGEBWD_STATIC)
#define SAGEBWD_API
#else
#define SAGEBWD_API __attribute__((visibility("default")))
#endif

namespace sagebwd {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };
enum class Device : int { cpu = 0, cuda = 1 };

/// Bytes of one element.
constexpr int64_t dtype_size(Dtype t) { return t == Dtype::f32 ? 4 : 2; }
SAGEBWD_API const char* dtype_name(Dtype t);

/// A strided four-dimensional tensor [batch, head, token, channel] the caller owns.
///
/// Any layout (BHSD, BSHD, packed THD, a slice of a fused QKV buffer) is a choice of strides; only
/// the channel stride must be 1. Strides count elements and are not negative; zero repeats a tensor
/// that is read. A tensor that is written shares no memory with itself, with any other tensor of
/// the call or with the workspace; views that interleave, such as dq, dk and dv in one buffer, are
/// fine.
struct TensorView {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::array<int64_t, 4> shape{};   // [b, h, n, d]
  std::array<int64_t, 4> stride{};  // in elements; stride[3] == 1
};

/// A contiguous [b, h, n, d] view.
inline TensorView contiguous(void* data, Dtype dtype, std::array<int64_t, 4> s) {
  return {data, dtype, s, {s[1] * s[2] * s[3], s[2] * s[3], s[3], 1}};
}

/// FP32 statistics with one value per query, [batch, head, token]: log-sum-exp and its gradient.
struct StatsView {
  float* data = nullptr;
  std::array<int64_t, 3> stride{};  // in elements
};

/// Contiguous [b, h, n] statistics.
inline StatsView contiguous_stats(float* data, int64_t h, int64_t n) {
  return {data, {h * n, n, 1}};
}

/// Runs body(user, i) once for every i in [0, count), on any threads and in any order, and returns
/// when all are done. `context` is ParallelFor::context. A caller with its own thread pool passes
/// it in through this. `body` throws nothing. What the function itself throws leaves the call, so
/// it must have stopped its threads by then. Missing items are an invalid_argument, with results
/// half written.
using ParallelForFn = void (*)(void* context, int64_t count, void (*body)(void* user, int64_t i),
                               void* user);
struct ParallelFor {
  ParallelForFn run = nullptr;  // null: the library's own threads (SAGEBWD_THREADS, else all cores;
                                // fewer where the system refuses some)
  void* context = nullptr;
};

/// Gives a call its workspace: at least `bytes` bytes of any alignment, until the call returns, or
/// on a GPU until its stream has done the call's work. What the function throws leaves the call,
/// which has written nothing then.
using AllocateFn = void* (*)(void* context, size_t bytes);
struct Allocator {
  AllocateFn run = nullptr;
  void* context = nullptr;
};

}  // namespace sagebwd
