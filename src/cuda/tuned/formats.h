// SPDX-License-Identifier: Apache-2.0
// Scales and numbers of a query as operand kernels write them and main kernels read them, on either
// architecture. Each architecture has more in a file of its own (sm80/formats.h, sm90/formats.h).
#pragma once

namespace sagebwd::cuda::tuned {

/// Scale of a key's codes. An integer sum s arrives as the float 1.5·2^23 + s (tile/codes.cuh). One
/// multiply-add makes scale·s of it, with `offset` = -1.5·2^23·scale. That product is exact,
/// because the scale is rounded to 22 bits. A poisoned key has the scale NaN and the offset of the
/// keys that it shares a scale with.
struct KeyScale {
  float scale, offset;
};

/// What dQ needs of a query. divisor: what its sums of dQ have to be divided by; for sm80 that is
/// its logit factor, the scale of its codes times c·log2 e. lse2: log2 of the sum over keys of
/// 2^logit, with the logit in log2 units; +inf for a query without keys, so that its P is 0.
struct QueryRow {
  float divisor, lse2;
};

}  // namespace sagebwd::cuda::tuned
