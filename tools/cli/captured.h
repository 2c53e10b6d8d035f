// SPDX-License-Identifier: Apache-2.0
// Attention inputs captured from a model: tensors q, k, v and dout of a safetensors file, either
// plain or one set per layer as "layer.<N>.q" and so on. Shapes are [h, n, d] or [b, h, n, d]; k
// and v may have fewer heads.
//
// The file's metadata says what was computed, as sagebwd.diagnose(save_to=) writes it. Under the
// name "attention", or "layer.<N>.attention", it has JSON such as
//
//   {"causal": true, "align": "top_left", "window": [-1, -1], "softmax_scale": 0.125}
//
// and, for a packed batch, "cu_seqlens_q" and "cu_seqlens_k": the offsets of its documents along n.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "safetensors.h"
#include "spec/attn_case.h"
#include "trace/inputs.h"

namespace sagebwd::cli {

struct CapturedLayer {
  std::string prefix;      // "layer.3." or empty
  spec::AttnCase shape;    // sizes and element type; mask and scale where the file says them
  bool described = false;  // whether it does
  int64_t document = -1;   // of a packed batch
  int64_t first_q = 0, first_k = 0;  // where its tokens start in the file's tensors

  std::string label() const {
    const std::string name = prefix.empty() ? "captured" : prefix.substr(0, prefix.size() - 1);
    return document < 0 ? name : name + " document " + std::to_string(document);
  }
};

/// The layers of a file in increasing order. A packed layer becomes one entry per document;
/// documents without queries or keys are left out. Checks shapes, types and descriptions, but reads
/// no data. `dtype` overrides the file's element type; otherwise all four tensors must have one.
std::vector<CapturedLayer> find_layers(const SafeTensors& file, std::optional<Dtype> dtype);

/// The four tensors of a layer, rounded to its element type.
trace::Inputs read_layer(const SafeTensors& file, const CapturedLayer& layer);

}  // namespace sagebwd::cli
