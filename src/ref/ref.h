// SPDX-License-Identifier: Apache-2.0
// The recipe oracle as an implementation behind the public API: SAGEBWD_IMPL=ref.
#pragma once

#include "backend/implementation.h"

namespace sagebwd::ref {

const backend::Implementation& implementation();

}  // namespace sagebwd::ref
