// SPDX-License-Identifier: Apache-2.0
// The recipe oracle as an implementation behind the public API: SAGEBWD_IMPL=ref.
#pragma once

#include "dispatch/implementation.h"

namespace sagebwd::ref {

const dispatch::Implementation& implementation();

}  // namespace sagebwd::ref
