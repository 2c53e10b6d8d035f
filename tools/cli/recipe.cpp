// SPDX-License-Identifier: Apache-2.0
// sagebwd recipe: the fields of recipes. tools/declare.py makes the Python class and the table of
// docs/numerics.md from its JSON.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "options.h"
#include "spec/recipe_fields.h"

namespace sagebwd::cli {
namespace {

using nlohmann::json;

/// Printed below the options by --help.
constexpr const char* kHelp =
    R"(A recipe is its name and the switches that differ from it, as in case strings:
  vectorwise
  paper rotate=on
  vectorwise smooth_k=off rounding=dither:dQ lift=dQ,dK tile=64x128

This is what --recipe of every program takes, and recipe= in Python.)";

/// A value as Python has it: texts for what has names.
json value_of(const Recipe& r, Scheme Recipe::*member) { return scheme_name(r.*member); }
json value_of(const Recipe& r, bool Recipe::*member) { return r.*member; }
json value_of(const Recipe& r, int Recipe::*member) { return r.*member; }
json value_of(const Recipe& r, uint64_t Recipe::*member) { return r.*member; }
json value_of(const Recipe& r, uint32_t Recipe::*member) {
  json names = json::array();
  for (uint32_t bit = 1; bit <= kMatmulAll; bit <<= 1)
    if ((r.*member & bit) != 0) names.push_back(matmul_name(bit));
  return names;
}
json value_of(const Recipe& r, Rounding Recipe::*member) {
  return r.*member == Rounding::nearest ? "nearest" : "dither";
}

const char* kind_of(Scheme) { return "scheme"; }
const char* kind_of(bool) { return "flag"; }
const char* kind_of(int) { return "integer"; }
const char* kind_of(uint64_t) { return "integer"; }
const char* kind_of(uint32_t) { return "matmuls"; }
const char* kind_of(Rounding) { return "rounding"; }

json values(const Recipe& r) {
  json all = json::object();
  spec::for_each_recipe_field(
      [&](const auto& field) { all[field.name] = value_of(r, field.member); });
  return all;
}

/// What each scheme's preset has in a field.
template <typename F>
json preset_values(const F& field) {
  json all = json::object();
  for (const std::string_view scheme : spec::kSchemes)
    all[std::string(scheme)] = value_of(parse_recipe(scheme), field.member);
  return all;
}

json declaration() {
  json fields = json::array();
  spec::for_each_recipe_field([&](const auto& field) {
    fields.push_back({{"name", field.name},
                      {"kind", kind_of(Recipe{}.*field.member)},
                      {"written", field.written == spec::Written::alone    ? "alone"
                                  : field.written == spec::Written::joined ? "joined"
                                                                           : "never"},
                      {"most", field.most},
                      {"step", field.step},
                      {"expected", field.expected},
                      {"presets", preset_values(field)},
                      {"help", field.help}});
  });
  json matmuls = json::array();  // in the order of their bits
  for (uint32_t bit = 1; bit <= kMatmulAll; bit <<= 1) matmuls.push_back(matmul_name(bit));
  return {{"fields", fields}, {"matmuls", matmuls}};
}

std::string shown(const json& value) {
  if (value.is_boolean()) return value ? "on" : "off";
  if (value.is_string()) return value;
  if (!value.is_array()) return value.dump();
  std::string names;
  for (const json& name : value) names += (names.empty() ? "" : ",") + name.get<std::string>();
  return names.empty() ? "none" : names;
}

void print_fields(const Recipe& r) {
  std::printf("%s\n\n", recipe_text(r).c_str());
  spec::for_each_recipe_field([&](const auto& field) {
    std::printf("%-14s  %-10s  %s\n", field.name, shown(value_of(r, field.member)).c_str(),
                field.help);
  });
}

struct RecipeOptions {
  std::string text = "vectorwise";
  bool as_json = false, declare = false;
};

void run(const RecipeOptions& o) {
  const Recipe r = parse_recipe(o.text);
  if (o.declare)
    std::fputs(json_text(declaration()).c_str(), stdout);
  else if (o.as_json)
    std::fputs(json_text({{"text", recipe_text(r)}, {"fields", values(r)}}).c_str(), stdout);
  else
    print_fields(r);
}

}  // namespace

void add_recipe(CLI::App& app) {
  auto* command = app.add_subcommand("recipe", "The switches of a recipe, and what they mean");
  auto o = std::make_shared<RecipeOptions>();
  command->add_option("recipe", o->text, "A recipe")->type_name("RECIPE")->capture_default_str();
  command->add_flag("--json", o->as_json, "Print its fields as JSON");
  command->add_flag("--declare", o->declare, "Print what fields recipes have, as JSON");
  command->footer(kHelp);
  command->callback([o] { run(*o); });
}

}  // namespace sagebwd::cli
