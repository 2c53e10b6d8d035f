// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/sla2.h"

namespace sagebwd::cpu::sla2 {

const backend::Mix& mix_calls();

}  // namespace sagebwd::cpu::sla2
