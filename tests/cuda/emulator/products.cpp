// SPDX-License-Identifier: Apache-2.0
#include "emulator/products.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "emulator/block.h"
#include "emulator/faults.h"
#include "emulator/options.h"

namespace sagebwd::emulator {

/// Sums under way: what they will be, while poison lies in the thread's memory.
struct Shadow {
  void* sums;
  int count;
  int users;  // products that are not done
  uint32_t values[64];
};
struct Issued : Product {
  uint32_t a_words[4];  // as they were
};
struct Products {
  std::vector<Shadow> shadows;
  std::vector<std::vector<Issued>> groups;  // committed, oldest first
  std::vector<Issued> open;
  bool fenced = false;
};
void ForgetProducts::operator()(Products* products) const { delete products; }

namespace {

constexpr uint32_t kPoison = 0x7fc0dead;  // NaN, and a large integer

Products& mine() {
  if (!thread->products) thread->products.reset(new Products);
  return *thread->products;
}

/// An operand in shared memory, as the hardware reads its description: eight rows of 64 or 128
/// bytes, then eight more `stride` bytes further. The exclusive or is one of addresses.
class Operand {
 public:
  explicit Operand(uint64_t description)
      : start_((description & 0x3fff) << 4),
        stride_((description >> 32 & 0x3fff) << 4),
        row_(description >> 62 == 1 ? 128 : 64) {
    if (description >> 62 != 1 && description >> 62 != 2) fail("an operand with another swizzle");
    if (start_ % (8 * row_) >= row_) fail("an operand that starts inside eight rows");
  }
  /// 16 bytes of a row. byte: a multiple of 16.
  const uint8_t* at(unsigned row, unsigned byte) const {
    const auto address = static_cast<uint32_t>(start_ + row / 8 * stride_ + row % 8 * row_ + byte);
    return static_cast<const uint8_t*>(
        shared_pointer(address ^ (address >> 7 & (row_ == 128 ? 7 : 3)) << 4, 16));
  }

 private:
  uint64_t start_, stride_, row_;
};

template <typename A>
int dot(const uint8_t* a, const uint8_t* b) {
  int sum = 0;
  for (int i = 0; i < 16; ++i)
    sum +=
        static_cast<int>(reinterpret_cast<const A*>(a)[i]) * reinterpret_cast<const int8_t*>(b)[i];
  return sum;
}

/// The thread's two rows of A in 32 bytes each.
void gather_a(uint8_t (&rows)[2][32], const Product& p, const uint32_t* words) {
  const unsigned lane = thread->lane, row = thread->index.x / 32 % 4 * 16 + lane / 4;
  if (p.a == nullptr) {
    const Operand a(p.a_place);
    for (unsigned r = 0; r < 2; ++r)
      for (unsigned half = 0; half < 2; ++half)
        std::memcpy(rows[r] + 16 * half, a.at(row + 8 * r, 16 * half), 16);
    return;
  }
  // A quad has the row: lane t bytes 4·t … 4·t + 3 of each half. This works while its lanes are at
  // the same product, so they meet.
  struct Given {
    const uint32_t* words;
    uint8_t (*rows)[32];
  } given{words, rows};
  meet<Given>(given, [](Lanes<Given> all) {
    for (unsigned to = 0; to < kLanes; ++to)
      for (unsigned t = 0; t < 4; ++t)
        for (unsigned i = 0; i < 4; ++i)
          std::memcpy(all[to].rows[i & 1] + 16 * (i >> 1) + 4 * t, &all[to / 4 * 4 + t].words[i],
                      4);
  });
}

void multiply_8(const Product& p, uint32_t* sums, const uint8_t (&a)[2][32]) {
  const Operand b(p.b_place);
  const unsigned t = thread->lane % 4;
  for (unsigned j = 0; j < static_cast<unsigned>(p.count) / 4; ++j)
    for (unsigned e = 0; e < 2; ++e)
      for (unsigned half = 0; half < 2; ++half) {
        const uint8_t* column = b.at(8 * j + 2 * t + e, 16 * half);
        for (unsigned r = 0; r < 2; ++r) {
          const uint8_t* row = a[r] + 16 * half;
          sums[4 * j + 2 * r + e] += static_cast<uint32_t>(
              p.element == Element::u8 ? dot<uint8_t>(row, column) : dot<int8_t>(row, column));
        }
      }
}

template <typename T>
void multiply_16(const Product& p, uint32_t* sums, const uint8_t (&a)[2][32]) {
  const auto number = [](const uint8_t* at) {
    T x;
    std::memcpy(&x, at, 2);
    return to_float(x);
  };
  const Operand b(p.b_place);
  const unsigned t = thread->lane % 4;
  float rows[2][16];
  for (unsigned r = 0; r < 2; ++r)
    for (unsigned k = 0; k < 16; ++k) rows[r][k] = (p.minus ? -1.0f : 1.0f) * number(a[r] + 2 * k);
  for (unsigned j = 0; j < static_cast<unsigned>(p.count) / 4; ++j)
    for (unsigned e = 0; e < 2; ++e) {
      const unsigned column = 8 * j + 2 * t + e;
      float numbers[16], sum[2] = {0.0f, 0.0f};
      for (unsigned k = 0; k < 16; ++k)
        numbers[k] = number(b.at(column, 2 * k & ~15u) + 2 * k % 16);
      for (unsigned r = 0; r < 2; ++r) {
        for (unsigned k = 0; k < 16; ++k) sum[r] += rows[r][k] * numbers[k];
        float x;
        std::memcpy(&x, &sums[4 * j + 2 * r + e], 4);
        x += sum[r];
        std::memcpy(&sums[4 * j + 2 * r + e], &x, 4);
      }
    }
}

void multiply(const Issued& p, uint32_t* sums) {
  uint8_t a[2][32];
  gather_a(a, p, p.a_words);
  if (!p.add) std::fill(sums, sums + p.count, 0u);
  switch (p.element) {
    case Element::s8:
    case Element::u8:
      return multiply_8(p, sums, a);
    case Element::f16:
      return multiply_16<f16>(p, sums, a);
    case Element::bf16:
      return multiply_16<bf16>(p, sums, a);
  }
}

Shadow& shadow_of(Products& all, const Product& p) {
  for (Shadow& shadow : all.shadows)
    if (shadow.sums == p.sums) return shadow;
  Shadow& fresh = all.shadows.emplace_back(Shadow{p.sums, p.count, 0, {}});
  std::memcpy(fresh.values, p.sums, static_cast<size_t>(p.count) * 4);
  std::fill_n(static_cast<uint32_t*>(p.sums), p.count, kPoison);
  return fresh;
}

void finish(Products& all, const Issued& p) {
  if (p.a != nullptr && std::memcmp(p.a, p.a_words, 16) != 0)
    fail("an operand in registers changes before the wait for its product");
  Shadow& shadow = shadow_of(all, p);
  multiply(p, shadow.values);
  if (--shadow.users > 0) return;
  const auto* now = static_cast<const uint32_t*>(shadow.sums);
  if (std::any_of(now, now + shadow.count, [](uint32_t x) { return x != kPoison; }))
    fail("sums are written before the wait for their product");
  std::memcpy(shadow.sums, shadow.values, static_cast<size_t>(shadow.count) * 4);
  std::erase_if(all.shadows, [](const Shadow& s) { return s.users == 0; });
}

}  // namespace

void issue(const Product& product) {
  Products& all = mine();
  Issued p{product, {}};
  if (has_fault(Fault::sums)) p.add = true;
  if (p.a == nullptr && has_fault(Fault::a_place)) p.a_place ^= 2;
  if (has_fault(Fault::b_place)) p.b_place ^= 2;
  if (p.a != nullptr) std::memcpy(p.a_words, p.a, 16);
  if (!all.fenced) fail("products without a fence before them");
  if (!options().late_copies) return multiply(p, static_cast<uint32_t*>(p.sums));
  ++shadow_of(all, p).users;
  all.open.push_back(p);
}

void product_fence() {
  if (!has_fault(Fault::fence)) mine().fenced = true;
}

void commit_products() {
  if (has_fault(Fault::commit)) return;
  Products& all = mine();
  all.fenced = false;
  all.groups.push_back(std::move(all.open));
  all.open.clear();
}

void wait_for_products(size_t pending) {
  if (has_fault(Fault::product_wait)) return;
  if (has_fault(Fault::pending)) ++pending;
  Products& all = mine();
  while (all.groups.size() > pending) {
    const std::vector<Issued> group = std::move(all.groups.front());
    all.groups.erase(all.groups.begin());
    for (const Issued& p : group) finish(all, p);
  }
}

void check_no_products() {
  if (!thread->products) return;
  const Products& all = *thread->products;
  if (!all.shadows.empty()) fail("a thread ends while products are under way");
  thread->products.reset();
}

}  // namespace sagebwd::emulator
