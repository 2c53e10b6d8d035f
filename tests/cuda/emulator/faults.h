// SPDX-License-Identifier: Apache-2.0
// Mistakes that the emulator makes on purpose, so that a test can see that they are found.
#pragma once

namespace sagebwd::emulator {

/// One of the ways to get a pipeline wrong.
enum class Fault {
  none,
  wait,           // waits for barrier `number` of the block return at once
  parity,         // they look at the other phase
  bytes,          // of barrier `number` 16 bytes too many are announced
  arrivals,       // barrier `number` takes one arrival too few
  arrive,         // arrivals at barrier `number` are lost
  copy_place,     // copies end up 128 bytes further
  swizzle,        // copies are not swizzled
  a_place,        // descriptors of A point to the neighbouring 32 bytes
  b_place,        // those of B
  product_wait,   // waits for products return at once
  pending,        // they leave one group more under way
  commit,         // products are not committed
  fence,          // there is no fence before products
  sums,           // products add to the sums, or start them, where they should not
  named_barrier,  // barriers of some of the threads are left out
};

/// Whether SAGEBWD_EMULATOR_FAULT asks for it, in blocks of this size: "parity:3/512" for barrier 3
/// (in the order in which the kernel made them) of blocks of 512 threads.
bool has_fault(Fault fault, int number = 0);

}  // namespace sagebwd::emulator
