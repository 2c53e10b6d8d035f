// SPDX-License-Identifier: Apache-2.0
#include "trace_plan.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "spec/recipe_fields.h"
#include "spec/text.h"
#include "table.h"

namespace sagebwd::cli {
namespace {

/// Matmul bits of "dV", "S+S'" or "all".
uint32_t lift_bits(std::string lift) {
  if (lift == "all") return kMatmulAll;
  std::replace(lift.begin(), lift.end(), '+', ',');
  return spec::parse_matmuls(lift);
}

/// The lift in canonical spelling.
std::string lift_name(uint32_t bits) {
  if (bits == kMatmulAll) return "all";
  std::string names = spec::matmul_names(bits);
  std::replace(names.begin(), names.end(), ',', '+');
  return names;
}

std::vector<uint32_t> lifts_of(const TraceRequest& request) {
  std::vector<uint32_t> lifts{0};  // the recipe as it is comes first
  for (const std::string& lift : request.lifts) {
    if (lift == "each") {
      for (uint32_t bit = 1; bit <= kMatmulAll; bit <<= 1) lifts.push_back(bit);
    } else {
      lifts.push_back(lift_bits(lift));
    }
  }
  return lifts;
}

}  // namespace

std::vector<std::string> split_recipes(const std::string& text) {
  constexpr std::array<std::string_view, 8> kMatmuls{"S", "O", "S'", "S2", "dV", "dP", "dQ", "dK"};
  std::vector<std::string> recipes;
  for (std::string_view part : spec::split(text, ",")) {
    const auto words = spec::words(part);
    const bool goes_on =
        !recipes.empty() && !words.empty() && std::ranges::count(kMatmuls, words[0]);
    if (goes_on)
      recipes.back() += "," + std::string(part);
    else
      recipes.emplace_back(part);
  }
  return recipes;
}

std::string Source::label() const { return sigma ? name + " σ=" + shortest(*sigma) : name; }

spec::AttnCase parse_base_case(const std::string& text) {
  const spec::AttnCase c = spec::AttnCase::parse(text);
  spec::AttnCase plain = c;
  plain.recipe = Recipe{};
  SAGE_CHECK(c.to_string() == plain.to_string(),
             "--case \"" << text
                         << "\": expected sizes, mask, element type and seed only; the recipe has "
                            "an option of its own, --recipe");
  return c;
}

TracePlan plan_trace(const TraceRequest& request, const SafeTensors* file) {
  TracePlan plan;
  const auto add = [&](const std::string& recipe, uint32_t lift) {
    Recipe settings = parse_recipe(recipe);
    const std::string name = recipe_text(settings);
    settings.high_precision |= lift;
    settings.seed = request.base.seed;
    plan.variants.push_back({name, lift_name(lift), settings});
  };
  for (const std::string& recipe : request.recipes)
    for (uint32_t lift : lifts_of(request)) add(recipe, lift);
  if (request.yardstick) add(request.recipes.back(), kMatmulAll);
  if (file != nullptr) {
    for (CapturedLayer& layer : find_layers(*file, request.dtype)) {
      Source source{layer.label(), std::nullopt, layer.shape, layer};
      const bool said = request.full || request.base.mask.causal;
      SAGE_CHECK(layer.described || said,
                 request.from << ": " << layer.label()
                              << ": the file does not say which mask it was captured with; give "
                                 "--causal or --full (the scale is 1/sqrt(d) then), or write it "
                                 "with sagebwd.diagnose(save_to=)");
      SAGE_CHECK(!(layer.described && said),
                 request.from << ": " << layer.label()
                              << ": the file says which mask it was captured with; leave out "
                                 "--causal and --full");
      if (!layer.described) source.shape.mask = request.base.mask;
      plan.sources.push_back(std::move(source));
    }
    return plan;
  }
  for (const std::string& name : request.inputs) {
    trace::input_by_name(name);  // refuse a wrong name before any work
    for (double sigma : request.sigmas)
      plan.sources.push_back({name, sigma, request.base, std::nullopt});
  }
  SAGE_CHECK(plan.cases() > 0,
             "trace: nothing to do, expected at least one input, sigma and recipe");
  return plan;
}

trace::Inputs load(const Source& source, const SafeTensors* file) {
  if (source.layer) return read_layer(*file, *source.layer);
  return trace::make_inputs(source.shape, trace::input_by_name(source.name), *source.sigma);
}

}  // namespace sagebwd::cli
