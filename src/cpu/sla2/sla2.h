// SPDX-License-Identifier: Apache-2.0
// Sparse-linear attention on a CPU: its linear branch, and what stands around the branches.
#pragma once

#include <vector>

#include "backend/sla2.h"

namespace sagebwd::cpu::sla2 {

/// Best first, with the names of the implementations of attention.
std::vector<const backend::Sla2*> implementations();

}  // namespace sagebwd::cpu::sla2
