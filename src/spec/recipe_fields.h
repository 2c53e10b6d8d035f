// SPDX-License-Identifier: Apache-2.0
// The one declaration of a recipe's fields. Validation, the C interface, the words of recipe texts
// and case strings, the Python class and the table in docs/numerics.md come from it
// (tools/declare.py writes the last two).
//
// A new switch is a member of Recipe (sagebwd/recipe.h), a member of sagebwd_recipe at the end of
// that struct (sagebwd/sagebwd.h), and a row here.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "sagebwd/recipe.h"
#include "sagebwd/sagebwd.h"

namespace sagebwd::spec {

/// How a field stands in a recipe text.
enum class Written {
  alone,   // name=value: on or off, or a number
  joined,  // in a word with another field, or under another name: tile=, rounding=, lift=
  never,   // the scheme is the text's first word; the seed is no part of it
};

template <typename T, typename C>
struct Field {
  const char* name;  // in C++, C and Python
  T Recipe::*member;
  C sagebwd_recipe::*c_member;
  Written written;
  uint64_t most;         // the largest value; of matmuls the bits that may be set
  uint64_t step;         // values are multiples of it
  const char* expected;  // which values, in words
  const char* help;      // one sentence without a full stop
};

inline constexpr auto kRecipeFields = std::tuple(
    Field{"scheme", &Recipe::scheme, &sagebwd_recipe::scheme, Written::never, 1, 1,
          "0 (paper) or 1 (vectorwise)",
          "which values share a scale. `vectorwise` has one per token of Q, K, V and dO, and per "
          "query or key of each tile of P and dS; under a causal mask no later token changes a bit "
          "of an earlier output. `paper` has one per block of tokens and one per tile of P and dS, "
          "as published: later tokens change the rounding of earlier rows, and the gradient error "
          "grows with the batch"},
    Field{"tile_q", &Recipe::tile_q, &sagebwd_recipe::tile_q, Written::joined, 256, 64,
          "0 or a multiple of 64 up to 256", "queries of a tile; 0: the backend's choice"},
    Field{"tile_k", &Recipe::tile_k, &sagebwd_recipe::tile_k, Written::joined, 256, 64,
          "0 or a multiple of 64 up to 256",
          "keys of a tile, in `vectorwise` up to 128; 0: the backend's choice"},
    Field{
        "smooth_k", &Recipe::smooth_k, &sagebwd_recipe::smooth_k, Written::alone, 1, 1, "0 or 1",
        "subtract a mean key before K is quantised. `vectorwise` takes means of earlier keys, one "
        "for each octave of blocks, and adds their logits again, exactly; it does the same with V, "
        "and adds the means to O again. `paper` takes the mean of the whole sequence: all logits "
        "of a row shift alike, so P does not change, and LSE is still that of the true logits"},
    Field{"smooth_q", &Recipe::smooth_q, &sagebwd_recipe::smooth_q, Written::alone, 1, 1, "0 or 1",
          "in `paper` alone, because a block holds later queries: subtract the mean query of each "
          "block. The bias row c·μ_Q·Kᵀ is added to S, and "
          "(Σᵢ dSᵢⱼ)·μ_Q to dK"},
    Field{"rotate", &Recipe::rotate, &sagebwd_recipe::rotate, Written::alone, 1, 1, "0 or 1",
          "multiply Q and K by a fixed orthogonal matrix before they are quantised, which spreads "
          "outlier channels; the gradients are turned back"},
    Field{"rounding", &Recipe::rounding, &sagebwd_recipe::rounding, Written::joined, 1, 1,
          "0 (nearest) or 1 (dither)",
          "`dither` rounds P and dS without bias, and replayably. `dither:dQ` does so for the "
          "operand of dQ alone, `dither:O,dQ` for those of two of O, dV, dQ, dK"},
    Field{"dithered", &Recipe::dithered, &sagebwd_recipe::dithered, Written::joined,
          kMatmulDitherable, 1, "bits of O, dV, dQ and dK (0x6a)",
          "the matmuls that dither applies to"},
    Field{"seed", &Recipe::seed, &sagebwd_recipe::seed, Written::never, UINT64_MAX, 1,
          "a number from 0 to 2^64 - 1",
          "of the dither; the same seed gives the same bits (dQ on a GPU: in deterministic mode)"},
    Field{"high_precision", &Recipe::high_precision, &sagebwd_recipe::high_precision,
          Written::joined, kMatmulAll, 1, "bits of the seven matmuls (0x7f)",
          "matmuls to lift out of INT8, of S, O, S', dV, dP, dQ, dK"});

/// visit(field) for each of them.
template <typename Visit>
constexpr void for_each_recipe_field(Visit visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, kRecipeFields);
}

/// The value as a number, whatever its type; negative ones are larger than any limit.
template <typename T>
constexpr uint64_t as_number(T value) {
  if constexpr (std::is_enum_v<T>)
    return static_cast<uint64_t>(static_cast<std::underlying_type_t<T>>(value));
  else
    return static_cast<uint64_t>(value);
}

/// The names of the schemes, each of which is a preset.
inline constexpr std::array<std::string_view, 2> kSchemes = {"paper", "vectorwise"};
bool is_scheme(std::string_view word);

/// Throws Error(invalid_argument) that names the field.
void check_recipe(const Recipe& r);

/// Sets what a word of a recipe text says: name=value. False if no switch has this name. Errors
/// begin with `where`, such as `case token "smooth_k=1"`.
bool set_switch(Recipe& r, std::string_view name, std::string_view value, const std::string& where);
/// " smooth_k=off lift=dQ": the words of what differs from the preset.
std::string switches_text(const Recipe& r);
/// The names that set_switch knows.
std::vector<std::string> switch_names();

/// Matmul bits of a list such as "S,dV": names as matmul_name() gives them, S2 for S' where a quote
/// is awkward. Throws Error(invalid_argument) for anything else.
uint32_t parse_matmuls(std::string_view list);
/// "S,dV": the opposite.
std::string matmul_names(uint32_t bits);

}  // namespace sagebwd::spec
