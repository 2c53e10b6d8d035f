// SPDX-License-Identifier: Apache-2.0
// Attention inputs captured from a model: tensors q, k, v and dout of a safetensors file, either
// plain or one set per layer as "layer.<N>.q" and so on. Shapes are [h, n, d] or [b, h, n, d]; k
// and v may have fewer heads.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "safetensors.h"
#include "spec/attn_case.h"
#include "trace/inputs.h"

namespace sagebwd::cli {

struct CapturedLayer {
  std::string prefix;    // "layer.3." or empty
  spec::AttnCase shape;  // sizes and element type; everything else at its default

  std::string label() const {
    return prefix.empty() ? "captured" : prefix.substr(0, prefix.size() - 1);
  }
};

/// The layers of a file in increasing order. Checks shapes and types, reads no data.
/// `dtype` overrides the file's element type, which otherwise must be one for all four tensors.
std::vector<CapturedLayer> find_layers(const SafeTensors& file, std::optional<Dtype> dtype);

/// The four tensors of a layer, rounded to its element type.
trace::Inputs read_layer(const SafeTensors& file, const CapturedLayer& layer);

}  // namespace sagebwd::cli
