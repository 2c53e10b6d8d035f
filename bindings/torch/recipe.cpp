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

Rounding to_rounding(const std::string& value) {
  if (value == "nearest") return Rounding::nearest;
  if (value == "dither") return Rounding::dither;
  refuse("rounding: expected 'nearest' or 'dither', got '" + value + "'");
}

}  // namespace

Recipe parse_recipe(const std::string& text) {
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
      r.rounding = to_rounding(value);
    else if (key == "p_levels")
      r.p_levels = to_int(key, value);
    else if (key == "pv16_tiles")
      r.pv16_tiles = to_int(key, value);
    else if (key == "high_precision")
      r.high_precision = static_cast<uint32_t>(to_int(key, value));
    else
      refuse("unknown switch '" + key + "'");
  }
  return r;
}

}  // namespace sagebwd::binding
