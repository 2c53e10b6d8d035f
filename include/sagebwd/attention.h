// SPDX-License-Identifier: Apache-2.0
// Attention forward and backward with INT8 matmuls.
//
//   sagebwd::ForwardArgs a{.q = …, .k = …, .v = …, .o = …, .lse = …};
//   std::vector<std::byte> ws(sagebwd::workspace_size(a));
//   a.workspace = ws.data(); a.workspace_bytes = ws.size();
//   sagebwd::forward(a);
//
// The caller owns all memory. Calls validate first and throw sagebwd::Error before anything is
// written. On a CPU the bits of a result depend neither on the number of threads nor, with nearest
// rounding, on the other sequences of the batch.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "sagebwd/error.h"
#include "sagebwd/recipe.h"
#include "sagebwd/types.h"

namespace sagebwd {

/// Where the causal diagonal and the window sit when there are more keys than queries, or fewer.
enum class Align : int {
  bottom_right = 0,  // the last query sees the last key (FlashAttention)
  top_left = 1,      // query i sees keys up to i (PyTorch)
};

/// Query i sees keys j with  i + shift - window_left <= j <= i + shift + window_right,
/// shift = nk - nq for bottom_right, 0 for top_left. -1 leaves a side open. causal caps
/// window_right at 0.
struct Mask {
  bool causal = false;
  Align align = Align::bottom_right;
  int64_t window_left = -1;
  int64_t window_right = -1;
};

/// Packed batches: q is [1, h, total_q, d], k [1, hk, total_k, d], v [1, hk, total_k, dv], and
/// document t holds tokens [cu_q[t], cu_q[t+1]) and keys [cu_k[t], cu_k[t+1]). Both arrays have
/// count + 1 entries. Empty documents are fine.
///
/// A CUDA call reads the arrays on the host, or with `on_device` on the GPU: then it waits for
/// nothing, can be captured into a graph, and a replay takes the offsets that are there at that
/// time. Nobody can check those beforehand: a document starts no earlier than the one before it and
/// ends within the tensor, whatever they say, and tokens of no document get o = 0, lse = -inf and
/// zero gradients.
struct Documents {
  const int32_t* cu_q = nullptr;
  const int32_t* cu_k = nullptr;
  int64_t count = 0;  // 0: not packed
  bool on_device = false;
};

/// Block-sparse attention: the key blocks that each block of queries sees. Blocks count from the
/// first token of a sequence (a batch entry, or a document of a packed batch). The mask acts inside
/// listed blocks. A query whose row lists nothing sees no key.
///
/// A row belongs to block_q queries of one head. Row r of head h of batch entry b is
///   n = b·stride_batch + h·stride_head + r,   with r < rows,
/// where `rows` counts the query blocks of a sequence, or of all documents one after the other. Its
/// entries are index[n·width] and the count[n] − 1 behind it, or with `offset` index[offset[n]] up
/// to index[offset[n + 1] − 1]. No block stands in a row twice.
///
/// A row has its best block first: `lead` entries keep P unquantised. Where few blocks are seen one
/// key often has most of a row, and INT8 would lose the others of its tile.
///
/// Lists of a CPU call are checked. With `on_device` they lie in GPU memory, where nobody can check
/// them beforehand: entries out of range are ignored, and a block that stands in a row twice counts
/// where it stands first.
struct BlockLists {
  const int32_t* index = nullptr;   // key blocks
  const int32_t* count = nullptr;   // entries in use of each row; null: `width`
  const int64_t* offset = nullptr;  // where each row starts, and where the last one ends; null:
                                    // every row has `width` places
  int64_t width = 0;                // not used with `offset`
  int64_t rows = 0;                 // 0: no lists, every block is seen
  int64_t stride_batch = 0, stride_head = 0;  // in rows; 0: all batch entries or heads share lists
  int block_q = 128, block_k = 64;            // tokens, multiples of 64
  int lead = 1;  // leading entries of each row whose P is not quantised; -1: all
  bool on_device = false;
};

/// What forward and backward share.
struct AttentionArgs {
  TensorView q;   // [b, h,  nq, d]
  TensorView k;   // [b, hk, nk, d], h a multiple of hk
  TensorView v;   // [b, hk, nk, dv]; dv may be smaller or larger than d
  TensorView o;   // [b, h,  nq, dv]; written by forward, read by backward
  StatsView lse;  // [b, h, nq], natural log of the true scaled logits (capped ones with softcap);
                  // written by forward, read by backward

  float scale = 0.0f;  // of the logits; 0: 1/sqrt(d)
  Mask mask;
  Documents documents;
  BlockLists blocks;  // optional
  Recipe recipe;
  float softcap = 0.0f;  // a logit x becomes softcap·tanh(x / softcap); 0: it stays x

  /// Optional, codes_size() bytes that start at a multiple of 16: the forward writes its quantised
  /// inputs there, and a backward that gets them takes them instead of q, k and v, whose data is
  /// then not looked at. The gradients have the same bits either way.
  void* codes = nullptr;
  size_t codes_bytes = 0;

  Device device = Device::cpu;
  void* workspace = nullptr;  // workspace_size() bytes of any alignment
  size_t workspace_bytes = 0;
  Allocator allocator;  // asked for the workspace if that is null and the call needs some: a call
                        // is then checked once, not for workspace_size() as well
  ParallelFor parallel_for;
  void* stream = nullptr;  // cudaStream_t for Device::cuda
};

struct ForwardArgs : AttentionArgs {
  float* max_logit = nullptr;  // optional, [b, h] ([documents, h] when packed): largest true scaled
                               // logit, after softcap; -inf if none
};

struct BackwardArgs : AttentionArgs {
  TensorView dout;             // [b, h,  nq, dv]
  TensorView dq;               // [b, h,  nq, d], written
  TensorView dk;               // [b, hk, nk, d], written
  TensorView dv;               // [b, hk, nk, dv], written
  StatsView dlse;              // optional gradient of lse
  bool partial_kv = false;     // k, v are part of the keys and lse is of all of them (a ring step)
  bool deterministic = false;  // dQ bit-equal from run to run; always so on a CPU
};

/// Bytes of workspace the call needs; grows linearly with the number of tokens. Validates the
/// arguments (workspace fields and data pointers are not looked at).
SAGEBWD_API size_t workspace_size(const ForwardArgs& args);
SAGEBWD_API size_t workspace_size(const BackwardArgs& args);

/// Bytes of codes: about one per channel and token of q, k and v, which have two in 16 bits.
/// Refuses a recipe whose codes do not stand for its inputs.
SAGEBWD_API size_t codes_size(const ForwardArgs& args);
/// Whether the codes of a recipe stand for its inputs.
SAGEBWD_API bool codes_suffice(const Recipe& recipe);

SAGEBWD_API void forward(const ForwardArgs& args);
SAGEBWD_API void backward(const BackwardArgs& args);

/// Why no implementation serves the call: a line for each. Empty: one does. Validates like
/// workspace_size().
SAGEBWD_API std::string refusal(const ForwardArgs& args);
SAGEBWD_API std::string refusal(const BackwardArgs& args);
/// The calls for those who have another way: false, and nothing written, if no implementation
/// serves them.
SAGEBWD_API bool try_forward(const ForwardArgs& args);
SAGEBWD_API bool try_backward(const BackwardArgs& args);

/// One implementation's answer to a call: used, able, or why not.
struct Candidate {
  std::string name;  // "cpu-avx2"
  bool chosen = false;
  bool supported = false;
  std::string reason;  // why it declines; empty when supported
  int tile_q = 0;      // tile sizes it would use; 0 when it declines
  int tile_k = 0;
  int p_levels = 0;  // of the codes of P; 0 when it declines
  int dk_q = 0;      // queries of a tile that share a scale of dS for dK; 0 when it declines

  /// "64x128"; where dK has scales of its own "128x128 (dK: 64 queries)".
  std::string tiles(const char* times = "x") const {
    return std::to_string(tile_q) + times + std::to_string(tile_k) +
           (dk_q == tile_q ? "" : " (dK: " + std::to_string(dk_q) + " queries)");
  }
};

/// The ordered list of implementations, best first, with each one's answer. SAGEBWD_IMPL pins one
/// by name.
SAGEBWD_API std::vector<Candidate> explain(const ForwardArgs& args);
SAGEBWD_API std::vector<Candidate> explain(const BackwardArgs& args);

SAGEBWD_API const char* version();

}  // namespace sagebwd
