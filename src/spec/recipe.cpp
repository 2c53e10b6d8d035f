// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <sstream>

#include "base/check.h"
#include "base/suggest.h"
#include "spec/recipe_fields.h"
#include "spec/text.h"

namespace sagebwd {
namespace spec {
namespace {

void set_rounding(Recipe& r, std::string_view text) {
  const size_t colon = text.find(':');
  const std::string_view word = text.substr(0, colon);
  SAGE_CHECK(word == "dither" || text == "nearest",
             "rounding: expected nearest, dither or dither:<matmul>[,…], got \""
                 << text << "\"" << did_you_mean(word, {"nearest", "dither"}));
  r.rounding = word == "dither" ? Rounding::dither : Rounding::nearest;
  r.dithered = kMatmulDitherable;
  if (colon == std::string_view::npos) return;
  r.dithered = parse_matmuls(text.substr(colon + 1));
  SAGE_CHECK((r.dithered & ~kMatmulDitherable) == 0,
             "rounding: expected dither of O, dV, dQ or dK, got \"" << text << "\"");
}

std::string rounding_text(const Recipe& r) {
  if (r.rounding == Rounding::nearest) return "nearest";
  return r.dithered == kMatmulDitherable ? "dither" : "dither:" + matmul_names(r.dithered);
}

/// A word whose value is not that of one field.
struct JoinedWord {
  const char* name;
  void (*set)(Recipe&, std::string_view value, const std::string& where);
  std::string (*text)(const Recipe&);
};

constexpr JoinedWord kTile = {
    "tile",
    [](Recipe& r, std::string_view value, const std::string& where) {
      const auto sides = split(value, "x");
      SAGE_CHECK(sides.size() == 2, where << ": expected tile=<queries>x<keys>");
      r.tile_q = number<int>(sides[0], where, 0, 256);
      r.tile_k = number<int>(sides[1], where, 0, 256);
    },
    [](const Recipe& r) { return std::to_string(r.tile_q) + "x" + std::to_string(r.tile_k); }};
constexpr JoinedWord kRounding = {
    "rounding",
    [](Recipe& r, std::string_view value, const std::string&) { set_rounding(r, value); },
    rounding_text};
constexpr JoinedWord kLift = {"lift",
                              [](Recipe& r, std::string_view value, const std::string&) {
                                r.high_precision = parse_matmuls(value);
                              },
                              [](const Recipe& r) { return matmul_names(r.high_precision); }};

template <typename T, typename C>
void set_alone(const Field<T, C>& field, Recipe& r, std::string_view value,
               const std::string& where) {
  if constexpr (std::is_same_v<T, bool>) {
    SAGE_CHECK(value == "on" || value == "off",
               where << ": expected on or off, got \"" << value << "\"");
    r.*field.member = value == "on";
  } else if constexpr (std::is_same_v<T, int>) {
    r.*field.member = number<int>(value, where, 0, static_cast<int>(field.most));
  }
}

template <typename T, typename C>
std::string text_alone(const Field<T, C>& field, const Recipe& r) {
  if constexpr (std::is_same_v<T, bool>)
    return r.*field.member ? "on" : "off";
  else
    return std::to_string(as_number(r.*field.member));
}

/// visit(name, set, text) for each word, in the order in which they are printed.
template <typename Visit>
void for_each_word(Visit visit) {
  const auto joined = [&](const JoinedWord& word) { visit(word.name, word.set, word.text); };
  joined(kTile);
  for_each_recipe_field([&](const auto& field) {
    if (field.written != Written::alone) return;
    visit(
        field.name,
        [&](Recipe& r, std::string_view value, const std::string& where) {
          set_alone(field, r, value, where);
        },
        [&](const Recipe& r) { return text_alone(field, r); });
  });
  joined(kRounding), joined(kLift);
}

Recipe preset(std::string_view scheme) {
  return scheme == "paper" ? Recipe::paper() : Recipe::vectorwise();
}

/// `vectorwise` promises that no later token changes an earlier row, and its tiles of keys have one
/// centre.
void check_vectorwise(const Recipe& r) {
  SAGE_CHECK(!r.smooth_q,
             "recipe.smooth_q: expected 0 in recipe vectorwise, because the mean of a block of "
             "queries holds later ones; got 1. Recipe paper takes it");
  SAGE_CHECK(r.tile_k == 0 || kKeysPerScale % r.tile_k == 0,
             "recipe.tile_k: expected 0, 64 or 128 in recipe vectorwise, so that the keys of a "
             "tile have one centre; got "
                 << r.tile_k);
}

}  // namespace

bool is_scheme(std::string_view word) {
  return std::find(kSchemes.begin(), kSchemes.end(), word) != kSchemes.end();
}

void check_recipe(const Recipe& r) {
  for_each_recipe_field([&](const auto& field) {
    using T = std::remove_cvref_t<decltype(r.*field.member)>;
    const uint64_t value = as_number(r.*field.member);
    if constexpr (std::is_same_v<T, uint32_t>)
      SAGE_CHECK((value & ~field.most) == 0, "recipe." << field.name << ": expected "
                                                       << field.expected << ", got 0x" << std::hex
                                                       << value);
    else
      SAGE_CHECK(value <= field.most && value % field.step == 0,
                 "recipe." << field.name << ": expected " << field.expected << ", got "
                           << static_cast<int64_t>(value));
  });
  if (r.scheme == Scheme::vectorwise) check_vectorwise(r);
}

bool set_switch(Recipe& r, std::string_view name, std::string_view value,
                const std::string& where) {
  bool found = false;
  for_each_word([&](std::string_view known, const auto& set, const auto&) {
    if (known != name) return;
    set(r, value, where);
    found = true;
  });
  return found;
}

std::string switches_text(const Recipe& r) {
  const Recipe usual = preset(scheme_name(r.scheme));
  std::string out;
  for_each_word([&](const char* name, const auto&, const auto& text) {
    if (const std::string value = text(r); value != text(usual))
      out += std::string(" ") + name + "=" + value;
  });
  return out;
}

std::vector<std::string> switch_names() {
  std::vector<std::string> names;
  for_each_word([&](const char* name, const auto&, const auto&) { names.push_back(name); });
  return names;
}

uint32_t parse_matmuls(std::string_view list) {
  const auto bit_of = [](std::string_view name) {
    if (name == "S2") return static_cast<uint32_t>(kMatmulSRecompute);
    for (uint32_t bit = 1; bit <= kMatmulAll; bit <<= 1)
      if (name == matmul_name(bit)) return bit;
    SAGE_THROW(ErrorKind::invalid_argument,
               "matmul: expected S, O, S' (or S2), dV, dP, dQ or dK, got \""
                   << name << "\""
                   << did_you_mean(name, {"S", "O", "S'", "S2", "dV", "dP", "dQ", "dK"}));
  };
  uint32_t bits = 0;
  for (std::string_view name : split(list, ",")) bits |= bit_of(name);
  return bits;
}

std::string matmul_names(uint32_t bits) {
  std::string names;
  for (uint32_t bit = 1; bit <= kMatmulAll; bit <<= 1)
    if (bits & bit) names += (names.empty() ? "" : ",") + std::string(matmul_name(bit));
  return names;
}

}  // namespace spec

Recipe parse_recipe(std::string_view text) {
  if (spec::is_scheme(text)) return spec::preset(text);  // most calls
  const auto tokens = spec::words(text);
  Recipe r;
  // The scheme first: its preset would overwrite the switches that refine it.
  for (std::string_view t : tokens)
    if (spec::is_scheme(t)) r = spec::preset(t);
  std::set<std::string_view> given;
  for (std::string_view t : tokens) {
    const size_t equals = t.find('=');
    const bool assigns = equals != std::string_view::npos;
    const std::string_view name = assigns ? t.substr(0, equals) : "scheme";
    const std::string where = "recipe \"" + std::string(t) + "\"";
    const bool known =
        assigns ? spec::set_switch(r, name, t.substr(equals + 1), where) : spec::is_scheme(t);
    if (!known) {
      std::vector<std::string> names =
          assigns ? spec::switch_names()
                  : std::vector<std::string>(spec::kSchemes.begin(), spec::kSchemes.end());
      SAGE_THROW(ErrorKind::invalid_argument,
                 "recipe: expected vectorwise or paper, and switches such as smooth_k=off, got \""
                     << t << "\"" << did_you_mean(assigns ? name : t, names));
    }
    SAGE_CHECK(given.insert(name).second, where << ": " << name << " is given twice");
  }
  SAGE_CHECK(!tokens.empty(), "recipe: expected vectorwise or paper, got an empty text");
  return r;
}

std::string recipe_text(const Recipe& r) { return scheme_name(r.scheme) + spec::switches_text(r); }

}  // namespace sagebwd
