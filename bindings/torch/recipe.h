// SPDX-License-Identifier: Apache-2.0
// Recipes as text. Operators take them in this form, so that a traced graph shows its recipe.
#pragma once

#include <string>

#include "sagebwd/recipe.h"

namespace sagebwd::binding {

/// "vectorwise", or a name followed by the switches that differ from it: "paper smooth_v=1
/// rounding=dither high_precision=96". Throws Error(invalid_argument) for anything it
/// does not know.
Recipe parse_recipe(const std::string& text);

}  // namespace sagebwd::binding
