// SPDX-License-Identifier: Apache-2.0
#include "spec/lists.h"

#include <vector>

#include "base/check.h"

namespace sagebwd::spec {
namespace {

/// No list of a real problem comes near, and products of sizes stay far from overflow below it.
constexpr int64_t kMostPlaces = int64_t{1} << 47;

int64_t rows_of(const Batch& p) {
  return p.packed() ? first_list_row(p, p.num_sequences()) : ceil_div(p.nq, p.blocks.block_q);
}

void check_block(const char* name, const char* field, int block, const char* tile_name, int tile) {
  SAGE_CHECK(block > 0 && block % 64 == 0,
             name << field << ": expected a multiple of 64 tokens, got " << block);
  SAGE_CHECK(tile == 0 || block % tile == 0, name << field << ": expected a multiple of "
                                                  << tile_name << " (" << tile << "), got "
                                                  << block);
}

template <typename T>
void check_array(const char* name, const char* field, const T* array) {
  SAGE_CHECK(reinterpret_cast<uintptr_t>(array) % alignof(T) == 0,
             name << field << ": expected a pointer aligned to " << alignof(T) << " bytes, got "
                  << static_cast<const void*>(array));
}

/// Checks the rows of a set that belong to one sequence. `last_row` has, per key block, the number
/// of the last row that listed it.
void check_rows(const char* name, const ListSets& sets, int64_t set, int64_t first, int64_t count,
                int64_t key_blocks, std::vector<int64_t>& last_row) {
  last_row.assign(static_cast<size_t>(key_blocks), -1);
  for (int64_t row = first; row < first + count; ++row) {
    const BlockList list = sets.row(set, row);
    SAGE_CHECK(sets.lists.offset != nullptr || (list.count >= 0 && list.count <= sets.lists.width),
               name << ".count: expected 0 to width (" << sets.lists.width << "), got "
                    << list.count << " in row " << row << " of set " << set);
    SAGE_CHECK(list.count == 0 || sets.lists.index != nullptr,
               name << ".index: expected the entries of the lists, got null");
    for (int64_t e = 0; e < list.count; ++e) {
      const int64_t block = list.index[e];
      SAGE_CHECK(block >= 0 && block < key_blocks,
                 name << ".index: expected key blocks from 0 to " << key_blocks - 1 << ", got "
                      << block << " at entry " << e << " of row " << row << " of set " << set);
      SAGE_CHECK(last_row[block] != row, name << ".index: expected each key block once, got "
                                              << block << " again at entry " << e << " of row "
                                              << row << " of set " << set);
      last_row[block] = row;
    }
  }
}

}  // namespace

void check_lists(const Batch& p, bool check_memory, const char* name, ListTiles tiles) {
  const BlockLists& l = p.blocks;
  if (l.index == nullptr && l.count == nullptr && l.offset == nullptr && l.rows == 0) return;
  check_block(name, ".block_q", l.block_q, "recipe.tile_q", tiles.q);
  check_block(name, ".block_k", l.block_k, "recipe.tile_k", tiles.k);
  SAGE_CHECK(l.lead >= -1, name << ".lead: expected -1 (all) or more, got " << l.lead);
  SAGE_CHECK(!l.on_device || p.device == Device::cuda, name << ".on_device: expected a CUDA call");
  SAGE_CHECK(l.count == nullptr || l.offset == nullptr,
             name << ": expected count or offset, got both");
  SAGE_CHECK(l.width >= 0 && l.rows >= 0 && l.stride_batch >= 0 && l.stride_head >= 0,
             name << ": expected width, rows and strides of 0 or more, got " << l.width << ", "
                  << l.rows << ", " << l.stride_batch << ", " << l.stride_head);
  int64_t reach = 0, far = 0, places = 0;
  SAGE_CHECK(!__builtin_mul_overflow(l.stride_batch, std::max<int64_t>(p.b - 1, 0), &reach) &&
                 !__builtin_mul_overflow(l.stride_head, std::max<int64_t>(p.h - 1, 0), &far) &&
                 !__builtin_add_overflow(reach, far, &reach) &&
                 !__builtin_add_overflow(reach, l.rows, &reach) &&
                 !__builtin_mul_overflow(reach, std::max<int64_t>(l.width, 1), &places) &&
                 places <= kMostPlaces,
             name << ": expected at most 2^47 entries, got " << l.rows << " rows of " << l.width
                  << " with strides " << l.stride_batch << " and " << l.stride_head);
  // With documents on the device nobody on the host knows how many rows there are.
  if (!p.packed() || !p.documents.on_device)
    SAGE_CHECK(l.rows == rows_of(p), name << ".rows: expected " << rows_of(p) << ", one per "
                                          << l.block_q << " queries of a sequence, got " << l.rows);
  check_array(name, ".index", l.index);
  check_array(name, ".count", l.count);
  check_array(name, ".offset", l.offset);
  if (l.on_device) return;

  const ListSets sets(p);
  for (int64_t set = 0; set < sets.count() && l.offset != nullptr; ++set)
    for (int64_t n = sets.first_row(set); n < sets.first_row(set) + l.rows; ++n)
      SAGE_CHECK(l.offset[n] >= 0 && l.offset[n] <= l.offset[n + 1],
                 name << ".offset: expected offsets that start at 0 or later and do not fall, got "
                      << l.offset[n] << " then " << l.offset[n + 1] << " at row " << n);
  if (!check_memory || (p.packed() && p.documents.on_device)) return;
  std::vector<int64_t> last_row;
  for (int64_t set = 0; set < sets.count(); ++set) {
    if (!p.packed()) {
      check_rows(name, sets, set, 0, l.rows, ceil_div(p.nk, l.block_k), last_row);
      continue;
    }
    int64_t first = 0;
    for (int64_t t = 0; t < p.num_sequences(); ++t) {
      const Sequence s = p.sequence(t);
      const int64_t rows = ceil_div(s.nq, l.block_q);
      check_rows(name, sets, set, first, rows, ceil_div(s.nk, l.block_k), last_row);
      first += rows;
    }
  }
}

}  // namespace sagebwd::spec
