// SPDX-License-Identifier: Apache-2.0
// The CPU backend: one implementation per instruction set, best first.
#pragma once

#include <vector>

#include "backend/implementation.h"

namespace sagebwd::cpu {

std::vector<const backend::Implementation*> implementations();

}  // namespace sagebwd::cpu
