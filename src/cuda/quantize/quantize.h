// SPDX-License-Identifier: Apache-2.0
// Three kernels. One turns the caller's tensors, or the codes that a forward saved, into what the
// main kernels read: means, INT8 codes (row-major and transposed), padded 16-bit copies, and
// numbers of each query. One before it zeroes counters and lists the pieces of its work. The last
// decodes the largest logits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/quantize/formats.h"
#include "cuda/tile/layout.h"
#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "sagebwd/recipe.h"
#include "sagebwd/types.h"

namespace sagebwd::cuda {

/// Divides numbers below 2^31 by one that the host knows, without a division.
struct Divisor {
  uint32_t factor = 0;
  int shift = 0;
  Divisor() = default;
  explicit Divisor(int64_t by) {
    while ((int64_t{1} << shift) < by) ++shift;
    if (by > 0) factor = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + by - 1) / by);
    shift += 31;
  }
  template <typename Int>
  constexpr Int divide(Int x) const {
    return static_cast<Int>((static_cast<uint64_t>(x) * factor) >> shift);
  }
};

/// The mean over the keys of each sequence. It leaves out tokens that hold NaN or Inf.
struct MeanJob {
  float* mean = nullptr;        // [sequences, hk, D], +0 at the start; null: there is none
  double* part = nullptr;       // [hk, blocks, D]
  int* tokens = nullptr;        // [hk, blocks]: tokens in each part
  uint32_t* arrived = nullptr;  // [sequences, hk], 0 at the start: parts that are done
  // As mean, with the signs of the rotation; null: unwanted. For sm90 it is rotated, without the
  // factor 1/√D.
  float* turned = nullptr;
  float* saved = nullptr;  // [sequences, hk, d]: another copy for the caller; null: unwanted
};

/// Codes in the caller's memory (sagebwd/codes.h), without padding.
struct SavedCodes {
  int64_t queries, keys, key_blocks;
  int8_t* q8 = nullptr;         // [h, queries, d]; null: there are no saved codes
  int8_t *k8, *v8;              // [hk, keys, d]
  float *q_scale, *mean_logit;  // [h, queries]
  float* k_scale;               // [hk, key_blocks], or [hk, keys] with k_per_token
  float* v_scale;               // [hk, keys]
  float* v_mean;                // [sequences, hk, d]
};

/// Pieces of memory that are set to zero.
struct Zeros {
  struct Piece {
    uint32_t* at;
    int64_t words;
  } piece[3];
};

struct Item;  // a piece of work (items.cuh)
inline constexpr int64_t kItemBytes = 160;
/// Pieces of a call at most, and one more that says that there are none left. Means, keys and
/// values have as many as there are blocks of keys, or fewer.
inline int64_t most_items(int64_t hk, int64_t group, int64_t q_blocks, int64_t k_blocks) {
  return hk * (4 * k_blocks + group * q_blocks) + 1;
}

/// Everything that a forward or a backward needs before its main kernel. Outputs that are null are
/// not made.
struct OperandJob {
  Sequences seq;
  int d, padded_d, h, hk, group, q_blocks, k_blocks;
  int64_t tq, tk;  // padded totals
  bool backward;
  int q_tokens, k_tokens;  // that share a scale in `paper`
  Scheme scheme;
  bool k_per_token;  // in `vectorwise`: K has a scale per token, else per kBlock keys
  int rotation;      // channels that the rotation of Q and K mixes (numerics/rotate.h); 0: none
  bool folds_v;      // V's token scale is folded into P, and dP is made from the codes of V
  Zeros zeros;
  Item* items;         // all pieces of work, and one more that is none
  uint32_t last_item;  // the number of that
  uint32_t* next;      // the number of the next one; 0 at the start
  int lead;            // how many portions the means are ahead of the codes
  // By pieces, means and codes of a portion, by key heads, and by blocks of a portion; by blocks of
  // a sequence, where nothing is packed.
  Divisor by_pieces, by_means, by_codes, by_hk, by_q_blocks, q_blocks_each, k_blocks_each;
  SavedCodes
      saved;  // the forward writes them; the backward takes them instead of q, k, v and means

  Strided k;
  MeanJob k_mean;
  int8_t* k8 = nullptr;   // [hk, tk, D]
  int8_t* k8t = nullptr;  // [hk, tk / kSlab, D, kSlab], in the order of tile::turned
  KeyScale* k_scale;      // [hk, tk]; for sm90 only of blocks with a poisoned key

  Strided v;
  MeanJob v_mean;
  int8_t* v8t = nullptr;            // [hk, tk / kSlab, D, kSlab]
  TileScale* tile_scale = nullptr;  // [hk, tk / tile_k]; forward
  int tile_k;
  FoldedScales* folded = nullptr;  // [hk, tk / kBlock]; forward
  float* v_scale = nullptr;        // [hk, tk]; backward: NaN for a poisoned token

  // For sm90 alone. Its backward turns K8 around and widens the codes of V by itself.
  BlockScales* block_scales = nullptr;  // [hk, tk / kBlock]; forward
  float* block_k_scale = nullptr;       // [hk, tk / kBlock]; backward
  int8_t* v8 = nullptr;                 // [hk, tk, D]; backward
  // The saved codes and scales of K and V serve as they are: only the largest scales are missing.
  bool keys_are_ready = false;
  uint16_t* v_share = nullptr;  // [hk, tk], halves in the order of tile::permuted; forward
  QueryStats* stats = nullptr;  // [h, tq / kSlab]; backward
  // Bits of the largest scale of V, and how many blocks it is made of: [sequences, hk], 0 at the
  // start; backward.
  uint2* v_top = nullptr;
  uint32_t* k_top = nullptr;  // bits of the largest scale of K; nobody waits for it
  float* dq_lift = nullptr;   // [h, tq]: what the sums of dQ are multiplied by, a power of two

  // V in 16 bit, [hk, tk, D]. Forward: codes of the leading pv16_tiles tiles (V itself if
  // v16_is_v), and V itself of poisoned ones. Backward: codes if folds_v, else V itself.
  void* v16 = nullptr;
  int64_t pv16_tiles;
  bool v16_is_v;

  Strided q;
  float logit_scale;
  int8_t* q8 = nullptr;  // [h, tq, D]

  // Forward.
  float *logit_factor, *mean_logit;  // [h, tq]; the latter in a capped backward too

  // Backward.
  Strided o, dout;
  StridedStats lse, dlse;   // dlse.data null: none
  int8_t *q8t, *do8t;       // [h, tq / kSlab, D, kSlab]
  void* do16 = nullptr;     // [h, tq, D]
  QueryRow* row;            // [h, tq]
  QueryExponent* exponent;  // [h, tq]
  QueryGradient* gradient;  // [h, tq]
  void* dq_sum = nullptr;   // [h, tq, D], set to zero
  bool dq_halves = false;   // its numbers have 16 bits
  bool capped = false;      // logits have the mean key's before they are capped, and so has LSE
};

/// What the operand kernel needs: zeros, and its pieces of work. Tells the job how many those are,
/// and returns it. `ahead`: how many pieces a mean is ahead of the first codes that need it.
int64_t launch_prepare(OperandJob& job, int64_t ahead, cudaStream_t stream);

void launch_operands(const OperandJob& job, Dtype dtype, cudaStream_t stream);

/// Codes of tile/ordered.cuh back to floats: 0 (nothing seen) is -inf.
void launch_decode_max(const uint32_t* codes, float* out, int64_t count, cudaStream_t stream);

}  // namespace sagebwd::cuda
