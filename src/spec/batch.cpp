// SPDX-License-Identifier: Apache-2.0
#include "spec/batch.h"

#include <algorithm>

#include "base/check.h"
#include "spec/views.h"

namespace sagebwd::spec {

void check_head_dim(const char* name, int64_t d) {
  SAGE_CHECK(d >= 8 && d <= 256 && d % 8 == 0,
             name << ": expected a multiple of 8 from 8 to 256, got " << d);
}

Batch resolve_batch(const TensorView& q, const TensorView& k, Device device, Direction direction) {
  const auto& qs = q.shape;
  const auto& ks = k.shape;
  SAGE_CHECK(device == Device::cpu || device == Device::cuda,
             "device: expected 0 (cpu) or 1 (cuda), got " << static_cast<int>(device));
  SAGE_CHECK(q.dtype == Dtype::f32 || q.dtype == Dtype::bf16 || q.dtype == Dtype::f16,
             "q: expected dtype f32, bf16 or f16, got code " << static_cast<int>(q.dtype));
  for (size_t i = 0; i < 4; ++i)
    SAGE_CHECK(qs[i] >= 0 && ks[i] >= 0,
               "q, k: expected non-negative sizes, got q " << show(qs) << " k " << show(ks));
  for (const auto& shape : {qs, ks}) {
    int64_t elements = 1;
    for (int64_t n : shape)
      SAGE_CHECK(!__builtin_mul_overflow(elements, std::max<int64_t>(n, 1), &elements) &&
                     elements <= kMostElements,
                 "q, k: expected at most 2^47 elements, got shape " << show(shape));
  }
  Batch batch{};
  batch.direction = direction;
  batch.device = device;
  batch.dtype = q.dtype;
  batch.b = qs[0], batch.h = qs[1], batch.nq = qs[2], batch.d = qs[3];
  batch.hk = ks[1], batch.nk = ks[2];
  check_head_dim("head dim", batch.d);
  SAGE_CHECK((batch.hk > 0 && batch.h % batch.hk == 0) || batch.h == 0,
             "heads: expected q heads to be a multiple of k heads, got " << batch.h << " and "
                                                                         << batch.hk);
  return batch;
}

}  // namespace sagebwd::spec
