// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/mix.h"

namespace sagebwd::cpu {

const backend::Mix& mix_calls();

}  // namespace sagebwd::cpu
