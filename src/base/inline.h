// SPDX-License-Identifier: Apache-2.0
// Small helpers are also compiled into files with wider instruction sets. Always inlining them keeps the linker from
// keeping such a copy for everybody, which would fault on a CPU without those instructions.
#pragma once

#define SAGE_INLINE [[gnu::always_inline]] inline
