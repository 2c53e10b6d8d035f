// SPDX-License-Identifier: Apache-2.0
// Reader of safetensors files: u64 little-endian header length, JSON header, raw data.
//
// The file is not trusted. The header has a bound, every offset is checked against its shape and
// the file, and ranges must neither overlap nor leave gaps. Whatever is wrong becomes
// Error(invalid_argument) that names the file.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "sagebwd/types.h"

namespace sagebwd::cli {

struct TensorInfo {
  std::string dtype;  // as the file spells it: F32, BF16, F16, I64, …
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // in the data section

  std::string show() const;  // "BF16 [8, 4096, 64]"
};

class SafeTensors {
 public:
  explicit SafeTensors(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  /// The file's own notes, text by name.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// Element type of a tensor the library can use; an Error for the others.
  Dtype dtype(const std::string& name) const;
  /// The values of a tensor as FP32.
  std::vector<float> read(const std::string& name) const;

 private:
  const TensorInfo& find(const std::string& name) const;

  std::string path_;
  mutable std::ifstream file_;
  uint64_t data_begin_ = 0;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace sagebwd::cli
