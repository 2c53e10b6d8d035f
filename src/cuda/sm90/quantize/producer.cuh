// SPDX-License-Identifier: Apache-2.0
// The producer: one warp that takes pieces of work (tuned/items.cuh) and brings their tokens, and
// the centre that keys and values need.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/sm90/quantize/job.h"
#include "cuda/sm90/quantize/shared.cuh"
#include "cuda/tuned/rows.cuh"
#include "numerics/octaves.h"

namespace sagebwd::cuda::sm90::codes {

using tuned::Source;

template <typename T, int D>
struct Producer {
  using Plan = SharedPlan<T, D>;

  const CodesJob& job;
  Plan& shared;
  uint32_t lane;
  Ring<kStages> stage{1};  // the first round finds everything empty
  Ring<kSlots> slot{0};
  bool owes_centre = false;  // there is a piece before this one

  /// An item in parts of 16 bytes, of which a lane has one.
  static constexpr uint32_t kItemParts = sizeof(Item) / sizeof(uint4);
  __device__ uint4 part_of(uint32_t number) const {
    const auto* from = reinterpret_cast<const uint4*>(job.items + min(number, job.last_item));
    return lane < kItemParts ? from[lane] : make_uint4(0, 0, 0, 0);
  }
  __device__ uint32_t take_number() const { return lane == 0 ? atomicAdd(job.next, 1u) : 0u; }

  /// While an item is under way, the next one is known, and the number of the one behind it is
  /// taken. So no answer is waited for.
  __device__ void run() {
    uint4 part = part_of(__shfl_sync(0xffffffffu, take_number(), 0));
    uint32_t number = take_number();
    while (true) {
      Item item;
      spread(item, part);
      part = part_of(__shfl_sync(0xffffffffu, number, 0));
      number = take_number();
      put(piece_of(item), item.from);
      if (item.kind == Kind::none) return;
    }
  }

  __device__ Piece piece_of(const Item& item) const {
    const bool queries = item.kind == Kind::queries;
    const int64_t tokens = queries ? job.tq : job.tk,
                  saved = queries ? job.saved.queries : job.saved.keys,
                  begin = queries ? item.s.batch * job.seq.nq + item.s.q_begin
                                  : item.s.batch * job.seq.nk + item.s.k_begin;
    return {.kind = item.kind,
            .head = item.head,
            .s = item.s,
            .first = item.first,
            .left = item.left,
            .row = item.head * tokens + static_cast<int64_t>(item.block) * kBlock,
            .saved_row = item.head * saved + begin + item.first};
  }

  /// Gives every lane the whole item.
  __device__ void spread(Item& item, uint4 part) const {
    auto* words = reinterpret_cast<uint32_t*>(&item);
#pragma unroll
    for (uint32_t i = 0; i < kItemParts; ++i) {
      words[4 * i] = __shfl_sync(0xffffffffu, part.x, static_cast<int>(i));
      words[4 * i + 1] = __shfl_sync(0xffffffffu, part.y, static_cast<int>(i));
      words[4 * i + 2] = __shfl_sync(0xffffffffu, part.z, static_cast<int>(i));
      words[4 * i + 3] = __shfl_sync(0xffffffffu, part.w, static_cast<int>(i));
    }
  }

  /// Describes a piece and brings its tokens. Then brings the centre of the piece before it:
  /// consumers need that later than the tokens.
  __device__ void put(const Piece& piece, const Source& from) {
    const uint32_t full = arch::shared_address(&shared.full[stage.place()]);
    wait_for(shared.empty, stage);
    if (lane == 0) shared.piece[slot.place()] = piece;
    const bool mapped = piece.kind == Kind::none || start_copy(piece, full);
    if (!mapped) copy_slowly(piece.left, from);
    __syncwarp();  // the others' writes come before the arrival
    if (lane == 0) {
      if (mapped && piece.kind != Kind::none)
        arch::barrier_expect(full, sizeof(typename Plan::Stage));
      else
        arch::barrier_arrive(full);
    }
    if (owes_centre) bring_centre();
    owes_centre = true;
    stage.advance(), slot.advance();
  }

  /// One copy of all tokens, in panels. Tokens behind the last of the tensor are zero; behind the
  /// end of a document there may be others. Returns whether there is a map.
  __device__ bool start_copy(const Piece& piece, uint32_t full) const {
    const bool queries = piece.kind == Kind::queries, of_k = piece.kind == Kind::keys;
    const bool mapped = queries ? job.q_mapped : of_k ? job.k_mapped : job.v_mapped;
    if (!mapped || lane != 0) return mapped;
    const CUtensorMap& map = queries ? job.q_map : of_k ? job.k_map : job.v_map;
    const Strided& x = queries ? job.q : of_k ? job.k : job.v;
    const int64_t token = (queries ? piece.s.q_begin : piece.s.k_begin) + piece.first;
    const int head = x.head == 0 ? 0 : piece.head,
              batch = x.batch == 0 ? 0 : static_cast<int>(piece.s.batch);
    arch::copy_tokens_once(arch::shared_address(&shared.stage[stage.place()]), map,
                           static_cast<int>(token), head, batch, full);
    return true;
  }

  /// The same by loads and stores. Tokens from `left` on are zero.
  __device__ void copy_slowly(int left, const Source& from) const {
    constexpr uint32_t kChunks = D / 8;
    auto& to = shared.stage[stage.place()];
#pragma unroll 4
    for (uint32_t i = lane; i < kBlock * kChunks; i += 32) {
      const uint32_t token = i / kChunks, chunk = i % kChunks;
      const uint8_t* at = from.at + token * from.stride + chunk * 16;
      alignas(16) uint16_t x[8] = {};
      if (static_cast<int>(token) < left) {
        if (from.vector) {
          *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(at);
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) x[e] = reinterpret_cast<const uint16_t*>(at)[e];
        }
      }
      *reinterpret_cast<uint4*>(to.panel[chunk / 8] +
                                arch::swizzled<kRowBytes>(token * kRowBytes + chunk % 8 * 16)) =
          *reinterpret_cast<const uint4*>(x);
    }
    arch::shared_writes_done();
  }

  /// That of the piece before.
  __device__ void bring_centre() const {
    const int before = (slot.place() + kSlots - 1) % kSlots;
    const Piece& piece = shared.piece[before];
    if (piece.kind != Kind::queries && lane < D / 4) {
      const tuned::Centres& from = piece.kind == Kind::keys ? job.centres : job.value_centres;
      const int octave = numerics::octave_of_block(piece.first / kBlock);
      const int64_t row =
          from.row(piece.head, piece.s.k_pad / kBlock, numerics::first_block_of(octave));
      const uint32_t codes = reinterpret_cast<const uint32_t*>(from.codes + row * D)[lane];
      const float scale = from.scale[row];
      const auto value = [&](int i) {
        return __fmul_rn(scale, static_cast<int8_t>(codes >> 8 * i & 0xff));
      };
      reinterpret_cast<float4*>(shared.centre[before])[lane] =
          make_float4(value(0), value(1), value(2), value(3));
    }
    __syncwarp();
    if (lane == 0) arch::barrier_arrive(arch::shared_address(&shared.centre_full[before]));
  }
};

}  // namespace sagebwd::cuda::sm90::codes
