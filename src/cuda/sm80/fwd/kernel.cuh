// SPDX-License-Identifier: Apache-2.0
// O = softmax(c·QKᵀ)·V: one thread block per 16·warps queries of a head, looping over tiles of
// tile_k keys.
//
//               keys →  tile 0 | tile 1 | …
//   warps of           ┌──────┬──────┬───   S  = Q8·K8ᵀ (INT8)     P = 2^(S - largest in the tile)
//   16 queries each →  │      │      │ …    O += P8·V8  (INT8)     one scale of P per row and tile
//                      └──────┴──────┴───   O += P·V    (16 bit)   in leading and poisoned tiles
//
// But in `paper` V has a scale per token, and P is multiplied with it: its logarithm is added to
// the logit, so that the largest exponent of a tile is that of P·scale, and the row sums, which are
// of P alone, multiply by its inverse.
//
// A warp has its rows to itself. It meets the other warps only at the barrier that protects the two
// stages of key tiles. The codes of P are A operands straight from registers, because V8 comes
// transposed in the order of the accumulators (tile/codes.cuh).
//
// Tiles in INT8 come first and those in 16 bit after them. The order does not matter to the sums,
// and the loop that takes the time has one kind of tile only, which saves registers. In 16 bit are
// the leading tiles of a list (all tiles where O is lifted) and, in `paper`, poisoned ones, whose V
// holds NaN or Inf.
//
// But in `paper` no bit of a row may depend on other rows, on keys that it does not see, or on how
// many keys there are. So nothing may follow from the end of a walk, and a poisoned tile stays in
// INT8, because it would round otherwise in 16 bit. (Lists have no such promise for the number of
// keys.) Keys lack the centre of their octave; a tile lies in one, so the centre's logit is one
// number per row. So do codes of V; what they lack comes to O when the walk leaves the octave.
//
// config.cuh has the instances, work.cuh the queries and keys of a thread block, shared.cuh the
// shared memory.
#pragma once

#include "cuda/arch/scalar.cuh"
#include "cuda/arch/target.cuh"
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/fwd/fwd.h"
#include "cuda/sm80/fwd/loads.cuh"
#include "cuda/sm80/fwd/products.cuh"
#include "cuda/sm80/fwd/results.cuh"
#include "cuda/sm80/fwd/scores.cuh"
#include "cuda/sm80/fwd/softmax.cuh"
#include "cuda/tile/codes.cuh"

namespace sagebwd::cuda::sm80::fwd {

/// What a thread keeps from tile to tile. One object, because apart the compiler puts its parts
/// into registers too early and spills some of them.
template <Config kConfig>
struct State {
  Thread<kConfig> me;
  Queries<kConfig> queries;
  Accumulators<kConfig> sums;

  __device__ State(uint8_t* memory, const ForwardParams& p, const Work<kConfig>& w)
      : me(p, memory) {
    share_work(me, w);
    queries.load(me, w);
  }
};

/// Before a tile: what changes with the octave of its keys. A list may come back to an octave.
template <Config kConfig>
__device__ __forceinline__ void enter(State<kConfig>& state, int tile) {
  if constexpr (kConfig.has_centres()) {
    const int octave = numerics::octave_of_block(tile / (kBlock / kConfig.tile_k));
    if (octave == state.queries.octave) return;
    leave_octave(state.sums, state.me, state.queries.octave);
    enter_octave(state.queries, state.me, octave);
  }
}

/// Whether the starts of sums come off O behind a tile. `left`: tiles in INT8 from this one on. In
/// a band the tiles that a row sees alone may decide: how many come behind depends on other rows.
/// Those it does not see add nothing, and no start.
template <Config kConfig>
__device__ __forceinline__ bool settles(int tile, int left) {
  if constexpr (kConfig.paper || kConfig.lists)
    return left % tile::kTilesWithStart == 0;
  else
    return tile % tile::kTilesWithStart == tile::kTilesWithStart - 1;
}

/// Adds a tile in INT8 to the sums.
template <Config kConfig>
__device__ __forceinline__ void visit(State<kConfig>& state, int stage, int tile) {
  auto& [me, queries, sums] = state;
  Scores<kConfig> x;
  Codes<kConfig> codes;
  TileRows rows;
  multiply_qk(x, me, queries, stage);
  softmax(x, rows, me, queries, stage, tile);
  tile::quantize_rows<tile::Bytes::u8, kConfig.key_blocks()>(codes, x, 1.0f, 1.0f);
  // The branch in here keeps the compiler from mixing codes and products, which would take more
  // registers than there are.
  sums.template carry_over<Product::int8>(rows, me);
  sums.add_mass(rows);
  multiply_int8(sums, me, codes, rows, stage);
}

/// Adds a tile in 16 bit to the sums: V itself, or its codes in leading tiles of lists. The mass of
/// a poisoned tile that is not leading was counted in INT8. V in 16 bit lies in the stage that is
/// not the tile's.
template <typename T, Config kConfig>
__device__ __forceinline__ void visit_16(State<kConfig>& state, int stage, int tile, bool leading,
                                         bool poisoned) {
  auto& [me, queries, sums] = state;
  Scores<kConfig> x;
  TileRows rows;
  load_v16<T>(me, other(stage), tile);
  arch::cp_async_commit();
  multiply_qk(x, me, queries, stage);
  softmax(x, rows, me, queries, stage, tile);
  sums.template carry_over<Product::floating>(rows, me);
  if (leading) sums.add_mass(rows);
  wait_for_copies();
  if (poisoned) {
    clean_v16<T>(me, other(stage));
    __syncthreads();
  }
  multiply_16<T>(sums, me, x, rows, other(stage));
  if (poisoned) spread_poison<T>(sums, me, tile);
}

template <typename T, Config kConfig>
__device__ __forceinline__ void forward(const ForwardParams& p, uint8_t* memory) {
  // The last queries of a causal sequence have the most keys, and the grid starts with them.
  const Work<kConfig> own_work = work_of<kConfig>(p, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  if (own_work.has_no_queries()) return;  // the padding of a sequence
  State<kConfig> state(memory, p, own_work);
  auto& [me, queries, sums] = state;

  int stage = 0;
  int left = own_work.walk.steps - own_work.leading;  // steps in INT8 from this one on
  int next = own_work.walk.tile(left > 0 ? own_work.leading : 0);
  if (own_work.walk.steps > 0)
    load_tile(me, stage, own_work.keys + static_cast<uint32_t>(next) * kConfig.tile_k);
  arch::cp_async_commit();
  wait_for_copies();  // the Work is there too
  for (; left > 0; --left, stage = other(stage)) {
    // Where the loop has no registers left to hold what follows from the index.
    if constexpr (!arch::kIsHopper) me.set_index(arch::thread_index());
    const int tile = next;
    const auto& walk = me.work().walk;
    next = left > 1 ? walk.next(walk.steps - left, tile) : walk.tile(0);  // 0: the first in 16 bit
    load_tile(me, other(stage), me.key_row(next));
    arch::cp_async_commit();
    enter(state, tile);
    visit(state, stage, tile);
    if (settles<kConfig>(tile, left)) sums.settle();
    wait_for_copies();
  }
  sums.settle();

  const int last =
      kConfig.paper && me.any_poisoned() != 0 ? me.work().walk.steps : me.work().leading;
  for (int step = 0; step < last; ++step) {
    const int tile = me.work().walk.tile(step);
    const bool leading = step < me.work().leading;
    bool poisoned = me.poisoned(stage);
    if (!kConfig.paper && poisoned && !me.p.v16_is_v) {  // codes of V: those of NaN and Inf are 0
      if (me.index == 0) me.any_poisoned() = 1;
      poisoned = false;
    }
    enter(state, tile);
    if (leading || poisoned) visit_16<T>(state, stage, tile, leading, poisoned);
    __syncthreads();  // all have read the tile: the next one takes its place
    if (step + 1 < last) load_tile(me, stage, me.key_row(me.work().walk.tile(step + 1)));
    arch::cp_async_commit();
    wait_for_copies();
  }
  if constexpr (kConfig.has_centres()) leave_octave(sums, me, queries.octave);
  if constexpr (!kConfig.paper)
    if (me.any_poisoned() != 0) mark_rows(sums, me);
  store<T>(sums, me);
}

/// Thread blocks on a multiprocessor. On sm_100 three would leave those at d 64 too few registers.
template <Config kConfig>
inline constexpr int kResident = arch::resident(
    sizeof(SharedPlan<kConfig>),
    arch::kTarget == 1000 && kConfig.d == 64 && !kConfig.paper ? 2 : kConfig.resident);

}  // namespace sagebwd::cuda::sm80::fwd

namespace sagebwd::cuda::sm80 {

template <typename T, fwd::Instance kInstance>
__global__ void __launch_bounds__(fwd::config_of(kInstance).threads(),
                                  fwd::kResident<fwd::config_of(kInstance)>)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  constexpr fwd::Config kConfig = fwd::config_of(kInstance);
  if constexpr (!kConfig.capped || arch::caps(kConfig.d)) fwd::forward<T, kConfig>(p, memory);
}

/// Launches the instance of a call: kNarrow at head dims up to 64, else kWide.
template <fwd::Instance kNarrow, fwd::Instance kWide>
void run_forward(const ForwardCall& call) {
  with_instance(call.dtype, call.padded_d, [&]<typename T, int D>() {
    constexpr fwd::Instance kInstance = D == 64 ? kNarrow : kWide;
    constexpr fwd::Config kConfig = fwd::config_of(kInstance);
    launch(forward_kernel<T, kInstance>,
           dim3(static_cast<unsigned>(call.q_blocks * (kBlock / kConfig.queries())),
                static_cast<unsigned>(call.heads)),
           kConfig.threads(), static_cast<int>(sizeof(fwd::SharedPlan<kConfig>)), call.params,
           call.stream);
  });
}

}  // namespace sagebwd::cuda::sm80
