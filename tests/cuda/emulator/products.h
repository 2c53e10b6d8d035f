// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup that are under way. With late copies a product happens at the wait for
// it: then it reads its operands, and until then its sums are poison. Each thread works out its own
// sums.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sagebwd::emulator {

/// Of the elements of A; those of B have the same type, but are signed bytes.
enum class Element { s8, u8, f16, bf16 };

struct Product {
  void* sums;         // of the thread: `count` of 32 bits
  int count;          // twice as many columns has B
  const uint32_t* a;  // four registers, or null: then a_place describes the operand
  uint64_t a_place, b_place;
  bool add;
  Element element;
  bool minus;  // of A
};

void issue(const Product& product);
void product_fence();
void commit_products();
/// Until at most `pending` groups are under way.
void wait_for_products(size_t pending);
/// A thread that ends has none under way.
void check_no_products();

}  // namespace sagebwd::emulator
