// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"

namespace sagebwd::cpu::isa {

#if defined(__x86_64__)
namespace avx512 {
extern const Kernels kTable, kBf16Table;
}
namespace avx2 {
extern const Kernels kTable;
}
#endif
namespace scalar {
extern const Kernels kTable;
}

const Kernels* const* tables(int* count) {
  static const Kernels* const all[] = {
#if defined(__x86_64__)
    &avx512::kBf16Table,
    &avx512::kTable,
    &avx2::kTable,
#endif
    &scalar::kTable,
  };
  *count = static_cast<int>(sizeof(all) / sizeof(all[0]));
  return all;
}

}  // namespace sagebwd::cpu::isa
