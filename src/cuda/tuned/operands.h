// SPDX-License-Identifier: Apache-2.0
// What a kernel that makes operands is told. It turns the caller's tensors, or the codes that a
// forward saved, into what the main kernels read: means, INT8 codes (row-major and transposed),
// padded 16-bit copies, and numbers of each query. A kernel before it zeroes counters and lists the
// pieces of its work.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/tile/layout.h"
#include "cuda/tile/sequences.h"
#include "cuda/tile/views.h"
#include "cuda/tuned/centres.h"
#include "cuda/tuned/divisor.h"
#include "cuda/tuned/formats.h"

namespace sagebwd::cuda::tuned {

/// The mean over the keys of each sequence, in `paper`. It leaves out tokens that hold NaN or Inf.
struct MeanJob {
  float* mean = nullptr;        // [sequences, hk, D], +0 at the start; null: there is none
  double* part = nullptr;       // [hk, blocks, D]
  int* tokens = nullptr;        // [hk, blocks]: tokens in each part
  uint32_t* arrived = nullptr;  // [sequences, hk], 0 at the start: parts that are done
  // As mean, with the signs of the rotation; null: unwanted. For sm90 it is rotated, without the
  // factor 1/√D.
  float* turned = nullptr;
};

/// Codes in the caller's memory (sagebwd/codes.h), without padding.
struct SavedCodes {
  int64_t queries, keys, key_blocks;
  int8_t* q8 = nullptr;      // [h, queries, d]; null: there are no saved codes
  int8_t *k8, *v8;           // [hk, keys, d]
  float* q_scale;            // [h, queries]
  float *k_scale, *v_scale;  // [hk, keys]
};

/// Pieces of memory that are set to zero.
struct Zeros {
  struct Piece {
    uint32_t* at;
    int64_t words;
  } piece[2];
};

struct Item;  // a piece of work (items.cuh)
inline constexpr int64_t kItemBytes = 112;
/// Pieces of a call at most, and one more that says that there are none left. Means, keys and
/// values have as many as there are blocks of keys, or fewer.
inline int64_t most_items(int64_t hk, int64_t group, int64_t q_blocks, int64_t k_blocks) {
  return hk * (3 * k_blocks + group * q_blocks) + 1;
}

/// What either architecture says of a call's operands: where they come from, and the list of pieces
/// of work. Outputs that are null are not made.
struct OperandJob {
  Sequences seq;
  int d, padded_d, h, hk, group, q_blocks, k_blocks;
  int64_t tq, tk;  // padded totals
  bool backward;
  bool makes_values;  // V is one of the operands
  int rotation;       // channels that the rotation of Q and K mixes (numerics/rotate.h); 0: none
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

  Strided q, k, v;
  MeanJob k_mean;
  Centres centres, value_centres;  // of K and V; not in `paper`
  float logit_scale;
  int8_t* q8 = nullptr;           // [h, tq, D]
  int8_t* k8 = nullptr;           // [hk, tk, D]
  KeyScale* k_scale = nullptr;    // [hk, tk]
  int8_t* v8t = nullptr;          // [hk, tk / kSlab, D, kSlab]; forward
  float* logit_factor = nullptr;  // [h, tq]; forward
  float* mean_logit = nullptr;    // [h, tq]; forward
};

/// What the operand kernel needs: zeros, and its pieces of work. Tells the job how many those are,
/// and returns it. `ahead`: how many pieces a mean is ahead of the first codes that need it.
int64_t launch_prepare(OperandJob& job, int64_t ahead, cudaStream_t stream);

}  // namespace sagebwd::cuda::tuned
