// SPDX-License-Identifier: Apache-2.0
// The ordered list of implementations, and the choice of one for a call.
#pragma once

#include <vector>

#include "backend/implementation.h"
#include "backend/mix.h"

namespace sagebwd::dispatch {

// So that callers can name these types without a second header.
using backend::Implementation;
using backend::kWorkspaceAlign;
using backend::Tiles;

/// The remedy for a GPU in a build without CUDA.
inline constexpr const char* kHowToGetCuda =
    "build sagebwd again where nvcc 12.8 or later is found (pip install . does it then by itself; "
    "docs/install.md)";

/// All implementations, best first.
const std::vector<const Implementation*>& implementations();

/// The first implementation that accepts, or the one SAGEBWD_IMPL names. Throws Error(unsupported)
/// with every refusal.
const Implementation& choose(const spec::Problem&);
/// The same for the linear branch.
const Implementation& choose_linear(const spec::Problem&);

/// What serves sagebwd/mix.h in memory of this kind. Throws Error(unsupported) if nothing does.
const backend::Mix& mix_on(Device);

/// Every implementation's answer.
std::vector<Candidate> explain(const spec::Problem&);

}  // namespace sagebwd::dispatch
