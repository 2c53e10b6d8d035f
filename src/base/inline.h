// SPDX-License-Identifier: Apache-2.0
// Small helpers are also compiled in files with wider instruction sets. The linker keeps one copy
// of a function that is not inlined; if it kept such a copy, a CPU without those instructions would
// fault. So helpers are always inlined. In CUDA files they serve host and device.
#pragma once

#ifdef __CUDACC__
#define SAGE_INLINE __host__ __device__ __forceinline__
#else
#define SAGE_INLINE [[gnu::always_inline]] inline
#endif
