// SPDX-License-Identifier: Apache-2.0
// Recipes as text, and the declaration of their fields.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "sagebwd/error.h"
#include "spec/recipe_fields.h"
#include "support/random.h"

namespace sagebwd::spec {
namespace {

std::string error_of(const std::string& text) {
  try {
    parse_recipe(text);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(ParseMatmuls, ReadsListsAndTheQuoteFreeAlias) {
  EXPECT_EQ(parse_matmuls("S"), kMatmulS);
  EXPECT_EQ(parse_matmuls("S',dQ"), kMatmulSRecompute | kMatmulDQ);
  EXPECT_EQ(parse_matmuls("S2"), kMatmulSRecompute);
  EXPECT_THROW(parse_matmuls(""), Error);
  EXPECT_THROW(parse_matmuls("S,,O"), Error);
}

TEST(RecipeText, NamesThePresetAndWhatDiffers) {
  EXPECT_EQ(recipe_text(Recipe::vectorwise()), "vectorwise");
  EXPECT_EQ(recipe_text(Recipe::paper()), "paper");
  const Recipe r = parse_recipe("smooth_q=on paper\ttile=64x128 rounding=dither:dQ lift=dQ,S2 ");
  EXPECT_EQ(r.scheme, Scheme::paper);
  EXPECT_TRUE(r.smooth_q);
  EXPECT_FALSE(r.rotate);
  EXPECT_EQ(r.tile_q, 64);
  EXPECT_EQ(r.tile_k, 128);
  EXPECT_EQ(r.dithered, kMatmulDQ);
  EXPECT_EQ(r.high_precision, kMatmulDQ | kMatmulSRecompute);
  EXPECT_EQ(recipe_text(r), "paper tile=64x128 smooth_q=on rounding=dither:dQ lift=S',dQ");
  // What is the preset's own may be said.
  EXPECT_EQ(recipe_text(parse_recipe("vectorwise smooth_k=on")), "vectorwise");
  EXPECT_EQ(recipe_text(parse_recipe("rotate=off")), "vectorwise rotate=off");
}

TEST(RecipeText, RefusesWhatItDoesNotKnow) {
  const auto says = [](const std::string& text, const std::string& words) {
    EXPECT_NE(error_of(text).find(words), std::string::npos) << text << ": " << error_of(text);
  };
  says("", "got an empty text");
  says("Paper", "did you mean \"paper\"?");
  says("vectorwise smoth_k=off", "did you mean \"smooth_k\"?");
  says("vectorwise smooth_k=1", "\"smooth_k=1\": expected on or off");
  says("vectorwise smooth_k=off smooth_k=on", "smooth_k is given twice");
  says("paper vectorwise", "scheme is given twice");
  says("paper tile=64", "expected tile=<queries>x<keys>");
  says("paper tile=64x64.5", "expected a whole number from 0 to 256");
  says("paper seed=3", "got \"seed=3\"");
  says("paper rounding=diter", "did you mean \"dither\"?");
  says("paper rounding=dither:S", "expected dither of O, dV, dQ or dK");
  says("paper lift=dv", "did you mean \"dV\"?");
  says("vectorwise smooth_v=off", "got \"smooth_v=off\"");
}

/// What would let a later token change an earlier one.
TEST(CheckRecipe, VectorwiseRefusesWhatLooksAhead) {
  const auto refusal = [](const char* text) -> std::string {
    try {
      check_recipe(parse_recipe(text));
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(refusal("vectorwise"), "");
  EXPECT_EQ(refusal("vectorwise smooth_k=off rotate=off tile=256x64"), "");
  EXPECT_NE(refusal("vectorwise smooth_q=on").find("Recipe paper takes it"), std::string::npos);
  EXPECT_EQ(refusal("paper smooth_q=on tile=64x256"), "");
  for (const char* tile : {"vectorwise tile=64x192", "vectorwise tile=64x256"})
    EXPECT_NE(refusal(tile).find("expected 0, 64 or 128"), std::string::npos);
}

TEST(RecipeText, RoundTrips) {
  testing::Random random(1);
  for (int i = 0; i < 200; ++i) {
    Recipe r = random.chance(0.5) ? Recipe::paper() : Recipe::vectorwise();
    for_each_recipe_field([&](const auto& field) {
      using T = std::remove_cvref_t<decltype(r.*field.member)>;
      if (field.written == Written::never || random.chance(0.6)) return;
      const auto most = static_cast<int64_t>(field.most / field.step);
      const auto value = field.step * static_cast<uint64_t>(random.integer(0, most));
      r.*field.member = static_cast<T>(std::is_same_v<T, uint32_t> ? value & field.most : value);
    });
    if (r.rounding == Rounding::nearest || r.dithered == 0) r.dithered = kMatmulDitherable;
    if (r.scheme == Scheme::vectorwise) r.smooth_q = false, r.tile_k %= 192;
    check_recipe(r);
    const Recipe again = parse_recipe(recipe_text(r));
    for_each_recipe_field([&](const auto& field) {
      EXPECT_EQ(as_number(again.*field.member), as_number(r.*field.member))
          << field.name << " of " << recipe_text(r);
    });
  }
}

TEST(RecipeFields, EveryOneIsCheckedByItsName) {
  for_each_recipe_field([](const auto& field) {
    if (field.most == UINT64_MAX) return;  // the seed
    using T = std::remove_cvref_t<decltype(Recipe{}.*field.member)>;
    if constexpr (!std::is_same_v<T, bool>) {
      Recipe r;
      r.*field.member = static_cast<T>(field.most + field.step);
      try {
        check_recipe(r);
        ADD_FAILURE() << field.name;
      } catch (const Error& e) {
        const std::string words = e.what();
        EXPECT_NE(words.find(std::string("recipe.") + field.name + ": expected "),
                  std::string::npos)
            << words;
        EXPECT_NE(words.find(field.expected), std::string::npos) << words;
      }
    }
  });
}

/// A switch that has no word could be set in C++ and be lost in every text.
TEST(RecipeFields, SwitchesHaveWords) {
  const std::vector<std::string> names = switch_names();
  const std::set<std::string> known(names.begin(), names.end());
  EXPECT_EQ(known.size(), names.size());
  for_each_recipe_field([&](const auto& field) {
    EXPECT_EQ(known.contains(field.name) && std::string(field.name) != "rounding",
              field.written == Written::alone)
        << field.name;
  });
  for (const char* joined : {"tile", "rounding", "lift"}) EXPECT_TRUE(known.contains(joined));
}

}  // namespace
}  // namespace sagebwd::spec
