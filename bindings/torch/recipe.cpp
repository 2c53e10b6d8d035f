// SPDX-License-Identifier: Apache-2.0
#include "recipe.h"

#include <charconv>
#include <set>
#include <sstream>

#include "sagebwd/error.h"

namespace sagebwd::binding {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::invalid_argument, "recipe: " + what);
}

int to_int(const std::string& key, const std::string& value) {
  int n = 0;
  const char* end = value.data() + value.size();
  const auto [at, error] = std::from_chars(value.data(), end, n);
  if (error != std::errc() || at != end) refuse(key + ": expected an integer, got '" + value + "'");
  return n;
}

bool to_bool(const std::string& key, const std::string& value) {
  if (value != "0" && value != "1") refuse(key + ": expected 0 or 1, got '" + value + "'");
  return value == "1";
}

/// "nearest", "dither", or "dither:<bits>" with the bits of the matmuls that it applies to.
void set_rounding(Recipe& r, const std::string& value) {
  const size_t colon = value.find(':');
  const std::string word = value.substr(0, colon);
  if (word != "dither" && value != "nearest")
    refuse("rounding: expected 'nearest', 'dither' or 'dither:<bits>', got '" + value + "'");
  r.rounding = word == "dither" ? Rounding::dither : Rounding::nearest;
  r.dithered = colon == std::string::npos
                   ? kMatmulDitherable
                   : static_cast<uint32_t>(to_int("rounding", value.substr(colon + 1)));
}

}  // namespace

Recipe parse_recipe(const std::string& text) {
  if (text.find_first_of(" \t\n") == std::string::npos) return recipe_by_name(text);  // most calls
  std::istringstream words(text);
  std::string word;
  words >> word;
  Recipe r = recipe_by_name(word);
  std::set<std::string> seen;
  while (words >> word) {
    const size_t at = word.find('=');
    if (at == std::string::npos) refuse("expected key=value, got '" + word + "'");
    const std::string key = word.substr(0, at), value = word.substr(at + 1);
    if (!seen.insert(key).second) refuse(key + ": expected once, got it twice");
    if (key == "tile_q")
      r.tile_q = to_int(key, value);
    else if (key == "tile_k")
      r.tile_k = to_int(key, value);
    else if (key == "smooth_k")
      r.smooth_k = to_bool(key, value);
    else if (key == "smooth_q")
      r.smooth_q = to_bool(key, value);
    else if (key == "smooth_v")
      r.smooth_v = to_bool(key, value);
    else if (key == "rounding")
      set_rounding(r, value);
    else if (key == "rotate")
      r.rotate = to_bool(key, value);
    else if (key == "k_per_token")
      r.k_per_token = to_bool(key, value);
    else if (key == "high_precision")
      r.high_precision = static_cast<uint32_t>(to_int(key, value));
    else
      refuse("unknown switch '" + key + "'");
  }
  return r;
}

}  // namespace sagebwd::binding
