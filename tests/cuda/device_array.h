// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace sagebwd::gpu {

/// Device memory of `count` values.
template <typename T>
struct Array {
  explicit Array(size_t n) : count(n) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, n * sizeof(T)) != cudaSuccess) throw std::bad_alloc();
    data = static_cast<T*>(memory);
  }
  explicit Array(const std::vector<T>& x) : Array(x.size()) { write(x, 0); }
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  void write(const std::vector<T>& x, int64_t at) {
    cudaMemcpy(data + at, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  std::vector<T> read() const {
    std::vector<T> x(count);
    cudaMemcpy(x.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost);
    return x;
  }
  T* data = nullptr;
  size_t count;
};

}  // namespace sagebwd::gpu
