// SPDX-License-Identifier: Apache-2.0
// The oracles as an implementation of the public API: SAGEBWD_IMPL=ref.
#pragma once

#include "backend/implementation.h"
#include "backend/sla2.h"

namespace sagebwd::ref {

const backend::Implementation& implementation();
/// The linear branch. It has no mix.
const backend::Sla2& linear();

}  // namespace sagebwd::ref
