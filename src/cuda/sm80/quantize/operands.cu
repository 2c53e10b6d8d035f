// SPDX-License-Identifier: Apache-2.0
// All operands of a call in one launch. Thread blocks take pieces of work from a list
// (tuned/items.cuh) until it is empty.
#include "cuda/arch/kernel_order.cuh"
#include "cuda/host/device.h"
#include "cuda/host/instance.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/quantize/operands.h"
#include "cuda/sm80/quantize/queries.cuh"

namespace sagebwd::cuda::sm80 {

template <typename T, int D, bool kBackward, bool kPaper>
struct AnyWorker : QueryWorker<T, D, kBackward, kPaper> {
  using Base = QueryWorker<T, D, kBackward, kPaper>;
  using Base::job, Base::item, Base::next, Base::shared, Base::is_mean, Base::start,
      Base::reads_codes, Base::keys, Base::values, Base::queries;
  using typename Base::Block, typename Base::Mean;

  /// Works on `item`, whose stage has arrived, and asks for what `next` reads as soon as there is
  /// room for it. Keeps the ticket then: until the end it would take a register that codes need.
  __device__ void run(uint32_t ticket) {
    if (is_mean(item.kind)) {
      Mean{job, item.head, shared.mean, shared.stage}.run(
          item.block, item.end, item.from, item.left, [&](bool more, Source from, int left) {
            Kind kind = item.kind;
            if (!more) kind = next.kind, from = next.from, left = next.left;
            start(kind, from, left);
          });
      keep(ticket);
      return;
    }
    Block b(shared.block, item.left,
            item.head * (item.kind == Kind::queries ? job.tq : job.tk) +
                static_cast<int64_t>(item.block) * kBlock);
    if (reads_codes())
      b.take_codes(shared.stage);
    else
      b.take(b.chunk, shared.stage);
    start(next.kind, next.from, next.left);
    keep(ticket);
    if (item.kind == Kind::keys)
      keys(b);
    else if (item.kind == Kind::values)
      values(b);
    else if (item.kind == Kind::queries)
      queries(b);
  }

  __device__ void keep(uint32_t ticket) const {
    __syncwarp();  // the warp has read the one before
    if (arch::thread_index() == 0) shared.ticket = ticket;
  }
};

template <typename T, int D, bool kBackward, bool kPaper>
__global__ void __launch_bounds__(kRowThreads, AnyWorker<T, D, kBackward, kPaper>::kResident)
    operand_kernel(const __grid_constant__ OperandJob job) {
  using Work = AnyWorker<T, D, kBackward, kPaper>;
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Work::Shared*>(memory);
  arch::wait_for_earlier_kernels();
  arch::let_next_kernel_start();
  if (threadIdx.x == 0) {
    shared.item.kind = Kind::none;  // the first round asks for the first piece and does nothing
    shared.ticket = atomicAdd(job.next, 2u);
  }
  if (threadIdx.x < 16)
    shared.signs.packed[threadIdx.x / 4][threadIdx.x % 4] =
        job.rotation > 0 ? tile::packed_signs(threadIdx.x % 4 * 32 + threadIdx.x / 4 * 8) : 0u;
  __syncthreads();
  // While a thread block works on a piece, it knows the next one, copies the one behind that, and
  // takes the number of yet another. So no answer is waited for. Threads that have a part of an
  // item are of the first warp.
  constexpr uint32_t kParts = sizeof(Item) / sizeof(uint4);
  const auto part_of = [](Item& item) {
    return reinterpret_cast<uint4*>(&item) + arch::thread_index();
  };
  const auto copy = [&](Item& to) {  // other warps must not read the ticket: it may be written now
    if (arch::thread_index() < kParts)
      arch::cp_async_16(arch::shared_address(part_of(to)),
                        part_of(job.items[min(shared.ticket, job.last_item)]));
  };
  copy(shared.next);
  arch::cp_async_commit();
  arch::cp_async_wait<0>();
  __syncthreads();
  if (threadIdx.x == 0) ++shared.ticket;
  do {
    uint32_t ticket = 0;
    if (threadIdx.x == 0) ticket = atomicAdd(job.next, 1u);
    __syncwarp();
    copy(shared.after);
    Work{job, shared.item, shared.next, shared}.run(ticket);
    Work::wait_for_stage();
    __syncthreads();
    if (arch::thread_index() < kParts)
      *part_of(shared.item) = *part_of(shared.next), *part_of(shared.next) = *part_of(shared.after);
    __syncthreads();
  } while (shared.item.kind != Kind::none);
}

namespace {

template <typename T, int D, bool kBackward, bool kPaper>
void run(OperandJob job, cudaStream_t stream) {
  using Work = AnyWorker<T, D, kBackward, kPaper>;
  const int64_t places = int64_t{multiprocessors()} * Work::kResident,
                items = launch_prepare(job, places * 3, stream);  // at work, asked for, known
  launch(operand_kernel<T, D, kBackward, kPaper>,
         dim3(static_cast<unsigned>(items < places ? items : places)), kRowThreads,
         static_cast<int>(sizeof(typename Work::Shared)), job, stream);
}

}  // namespace

void launch_operands(const OperandJob& job, Dtype dtype, cudaStream_t stream) {
  with_instance(dtype, job.padded_d, [&]<typename T, int D>() {
    if (job.paper)
      job.backward ? run<T, D, true, true>(job, stream) : run<T, D, false, true>(job, stream);
    else
      job.backward ? run<T, D, true, false>(job, stream) : run<T, D, false, false>(job, stream);
  });
}

}  // namespace sagebwd::cuda::sm80
