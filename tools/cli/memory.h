// SPDX-License-Identifier: Apache-2.0
// Refuses what cannot fit this machine's memory, in words and before it is allocated.
#pragma once

#include <string>

#include "spec/attn_case.h"

namespace sagebwd::cli {

/// Throws an Error when numbers of so many bytes cannot fit this machine's memory.
void check_memory(const std::string& what, double bytes);
/// The same for the tensors of a case.
void check_memory(const spec::AttnCase& c);

}  // namespace sagebwd::cli
