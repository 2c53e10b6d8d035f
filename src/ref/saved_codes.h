// SPDX-License-Identifier: Apache-2.0
// The oracle's quantised inputs in the layout of spec/codes.h.
#pragma once

#include "ref/attention_recipe.h"
#include "spec/problem.h"

namespace sagebwd::ref {

/// Writes those of query head h of sequence t; the first query head of a key head writes the keys.
void write_codes(const spec::Problem& p, void* codes, int64_t t, int64_t h, const RecipeInputs& in);
RecipeInputs read_codes(const spec::Problem& p, void* codes, int64_t t, int64_t h);

}  // namespace sagebwd::ref
