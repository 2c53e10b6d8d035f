// SPDX-License-Identifier: Apache-2.0
// The ordered list of implementations, and the choice of one for a call.
#pragma once

#include <string>
#include <vector>

#include "backend/implementation.h"
#include "backend/sla2.h"

namespace sagebwd::dispatch {

// So that callers can name these types without a second header.
using backend::Implementation;
using backend::kWorkspaceAlign;
using backend::Sla2;
using backend::Tiles;

/// The remedy for a GPU in a build without CUDA.
inline constexpr const char* kHowToGetCuda =
    "build sagebwd again where nvcc 12.8 or later is found (pip install . does it then by itself; "
    "docs/install.md)";

/// All implementations, best first.
const std::vector<const Implementation*>& implementations();

/// The first implementation that accepts, or the one SAGEBWD_IMPL names. Null if none does.
const Implementation* find(const spec::Problem&);
/// The same. Throws Error(unsupported) with every refusal.
const Implementation& choose(const spec::Problem&);
/// Why nobody serves a problem: a line for each implementation. Empty: somebody does.
std::string refusal(const spec::Problem&);
/// Every implementation's answer.
std::vector<Candidate> explain(const spec::Problem&);

// --- sparse-linear attention ---

/// What has a linear branch, best first. Each has the name of an implementation of attention.
const std::vector<const Sla2*>& sla2_implementations();

/// As of attention. An implementation that SAGEBWD_IMPL names and that has no linear branch
/// refuses.
const Sla2& choose(const spec::LinearProblem&);
/// Why nobody serves a problem: a line for each implementation. Empty: somebody does.
std::string refusal(const spec::LinearProblem&);

/// What serves sagebwd/mix.h in memory of this kind: there is one, so there is nothing to pin.
/// Throws Error(unsupported) if nothing does.
const backend::Mix& mix_on(Device);

}  // namespace sagebwd::dispatch
