// SPDX-License-Identifier: Apache-2.0
// Small helpers are also compiled into files with wider instruction sets. Always inlining them
// keeps the linker from keeping such a copy for everybody, which would fault on a CPU without those
// instructions. In CUDA files the same helpers serve host and device.
#pragma once

#ifdef __CUDACC__
#define SAGE_INLINE __host__ __device__ __forceinline__
#else
#define SAGE_INLINE [[gnu::always_inline]] inline
#endif
