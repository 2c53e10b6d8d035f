// SPDX-License-Identifier: Apache-2.0
// From a request to results, JSON and a page.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "attention_run.h"
#include "page.h"
#include "sagebwd/error.h"
#include "trace_output.h"
#include "words.h"

namespace sagebwd::cli {
namespace {

TraceRequest small(const std::string& text = "h2 n128 d32") {
  TraceRequest r;
  r.base = spec::AttnCase::parse(text);
  return r;
}

Results run(const TraceRequest& r) {
  return run_trace(plan_trace(r, nullptr), nullptr, Talk::quiet);
}

TEST(TracePlan, CrossesSourcesAndVariants) {
  TraceRequest r = small();
  r.inputs = {"gaussian", "sink"};
  r.sigmas = {1, 3};
  r.lifts = {"each", "S+S2", "all"};
  const TracePlan plan = plan_trace(r, nullptr);
  EXPECT_EQ(plan.sources.size(), 4u);
  EXPECT_EQ(plan.variants.size(), 2u * (1 + 7 + 1 + 1));
  EXPECT_EQ(plan.variants[0].lift, "");
  EXPECT_EQ(plan.variants[3].lift, "S'");
  EXPECT_EQ(plan.variants[8].lift, "S+S'");
  EXPECT_EQ(plan.variants[8].settings.high_precision, kMatmulS | kMatmulSRecompute);
  EXPECT_EQ(plan.variants[9].settings.high_precision, kMatmulAll);
  EXPECT_EQ(plan.sources[1].label(), "gaussian σ=3");
}

TEST(TracePlan, RecipesHaveSwitches) {
  TraceRequest r = small();
  r.recipes = {" smooth_k=off  paper lift=dQ"};
  r.lifts = {"dV"};
  const TracePlan plan = plan_trace(r, nullptr);
  EXPECT_EQ(plan.variants[0].recipe, "paper smooth_k=off lift=dQ");
  EXPECT_EQ(plan.variants[0].lift, "");
  EXPECT_FALSE(plan.variants[0].settings.smooth_k);
  EXPECT_EQ(plan.variants[0].settings.tile_k, 64);
  EXPECT_EQ(plan.variants[1].lift, "dV");
  EXPECT_EQ(plan.variants[1].settings.high_precision, kMatmulDQ | kMatmulDV);
}

TEST(TracePlan, CommasSeparateRecipesAndMatmuls) {
  using Recipes = std::vector<std::string>;
  EXPECT_EQ(split_recipes("paper,vectorwise"), (Recipes{"paper", "vectorwise"}));
  EXPECT_EQ(split_recipes("paper lift=dQ,S' smooth_k=off,vectorwise rounding=dither:O,dQ"),
            (Recipes{"paper lift=dQ,S' smooth_k=off", "vectorwise rounding=dither:O,dQ"}));
  EXPECT_EQ(split_recipes("paper,dX"), (Recipes{"paper", "dX"}));
}

/// The oracle of P, dS and D has the leading entries of the case's lists.
TEST(Trace, LeadingEntriesReachTheOracle) {
  TraceRequest none = small("h1 n256 d32 f32 keep=1 lead=0"), all = none;
  all.base.lead = -1;
  EXPECT_LT(run(all)[1]["D"].rel_l2, 0.9 * run(none)[1]["D"].rel_l2);
}

TEST(TracePlan, RefusesWrongNames) {
  TraceRequest r = small();
  r.inputs = {"easy"};
  EXPECT_THROW(plan_trace(r, nullptr), Error);
  r = small(), r.recipes = {"fp4"};
  EXPECT_THROW(plan_trace(r, nullptr), Error);
  r = small(), r.lifts = {"dX"};
  EXPECT_THROW(plan_trace(r, nullptr), Error);
  r = small(), r.sigmas = {};
  EXPECT_THROW(plan_trace(r, nullptr), Error);
}

TEST(Trace, FindsSmallErrorsAndNoneWithoutInt8) {
  TraceRequest r = small("h2 n128 d32 f32");
  r.yardstick = true;
  const Results results = run(r);
  ASSERT_EQ(results.size(), 3u);
  for (const char* t : kOutputs) {
    EXPECT_GT(results[1][t].rel_l2, 1e-3) << t;
    EXPECT_LT(results[1][t].rel_l2, 0.04) << t;
    EXPECT_GT(results[1][t].cosine, 0.999) << t;
    EXPECT_LT(results[2][t].rel_l2, 1e-5) << t;
    EXPECT_GE(results[1][t].worst_head_rel_l2, results[1][t].rel_l2) << t;
    EXPECT_GE(results[1][t].worst_row_error, results[1][t].rel_l2) << t;
    EXPECT_LT(results[1][t].worst_row, 128) << t;
  }
  EXPECT_EQ(results[2].variant.lift, "all");
}

TEST(Trace, JudgesTheSumOverQueryHeadsThatShareKeys) {
  // With nothing in INT8 a wrong sum is the only way to be wrong.
  TraceRequest r = small("b2 h4 hk2 nq96 nk160 d32 f32 causal");
  r.recipes = {"vectorwise"};
  r.lifts = {"all"};
  const Results results = run(r);
  for (const char* t : kOutputs) EXPECT_LT(results[1][t].rel_l2, 1e-5) << t;
  for (const char* t : {"dK", "dV"}) {
    EXPECT_LT(results[0][t].worst_head, 2) << t;
    EXPECT_LT(results[0][t].rel_l2, 0.05) << t;
  }
}

TEST(Trace, LayoutsGiveTheSameBits) {
  const auto c = spec::AttnCase::parse("b2 h4 hk2 nq65 nk70 d32 causal");
  auto other = c;
  other.layout = spec::Layout::bshd;
  const auto in = trace::make_inputs(c, trace::InputKind::gaussian);
  const AttentionRun a(c, in), b(other, in);
  a.forward(), b.forward();
  a.backward(), b.backward();
  EXPECT_EQ(a.o(), b.o());
  EXPECT_EQ(a.dq(), b.dq());
  EXPECT_EQ(a.dk(), b.dk());
  EXPECT_EQ(a.dv(), b.dv());
}

TEST(Trace, JsonHasThePromisedShape) {
  const Results results = run(small("h2 n128 d32 causal"));
  const auto j = trace_json(results, "sagebwd trace");
  EXPECT_EQ(j["command"], "sagebwd trace");
  ASSERT_EQ(j["cases"].size(), 2u);
  const auto& c = j["cases"][1];
  EXPECT_EQ(c["recipe"], "vectorwise");
  EXPECT_EQ(c["sigma"], 1.0);
  EXPECT_EQ(c["n"], 128);
  EXPECT_EQ(c["d"], 32);
  EXPECT_EQ(c["heads"], 2);
  EXPECT_EQ(c["causal"], true);
  EXPECT_EQ(c["tile"].size(), 2u);
  EXPECT_EQ(c["case"], "b1 h2 hk2 nq128 nk128 d32 causal bf16 vectorwise bhsd seed1");
  for (const char* t : {"O", "dQ", "dK", "dV", "P", "dS", "D"})
    for (const char* figure : {"cos", "rel_l2", "projection", "worst_row"})
      EXPECT_TRUE(c["tensors"][t].contains(figure)) << t << " " << figure;
}

TEST(Trace, PageHoldsPlotsAndWords) {
  TraceRequest r = small();
  r.sigmas = {1, 5};
  r.inputs = {"gaussian"};
  r.lifts = {"dQ"};
  Results results = run(r);
  r.inputs = {"sink"}, r.sigmas = {1};
  for (TraceResult& hard : run(r)) results.push_back(std::move(hard));
  const nlohmann::json page = trace_page(results, {"T<1>", "sagebwd report", true});
  EXPECT_EQ(page["title"], "T<1>");
  EXPECT_NE(page["lead"].get<std::string>().find("Six of the seven"), std::string::npos);
  std::vector<std::string> cards;
  for (const nlohmann::json& item : page["items"])
    if (item["kind"] == "card") cards.push_back(item["title"]);
  EXPECT_EQ(cards, (std::vector<std::string>{
                       "Verdict", "Error against the spread of queries and keys: gaussian inputs",
                       "Hard inputs", "Which matmul makes the error", "How to read this page",
                       "Where the figures come from"}));
  const std::string text = page.dump();
  const auto has = [&](const char* part) { EXPECT_NE(text.find(part), std::string::npos) << part; };
  has("\"title\":\"dQ, relative L2 error\"");
  has("\"title\":\"sink σ=1\"");
  has("\"label\":\"published\"");
}

TEST(Words, SayWhatTheFiguresSay) {
  TraceRequest r = small("h1 n256 d64");
  r.sigmas = {1, 3};
  const Results results = run(r);
  const auto sweeps = sweeps_of(results);
  ASSERT_EQ(sweeps.size(), 1u);
  EXPECT_TRUE(sweeps[0].has_several());
  const std::string text = sweep_words(results, sweeps[0])[0];
  const TraceResult* paper = find(results, "gaussian σ=1", "paper");
  EXPECT_NE(text.find("`paper` misses dQ by " + percent((*paper)["dQ"].rel_l2)), std::string::npos)
      << text;
  const auto all = verdicts(results);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_FALSE(all[0].checks[0].passed);  // one scale per tile: dQ above 3%
  EXPECT_TRUE(all[1].checks[0].passed);
  EXPECT_NE(verdict_words(results).back().find("`vectorwise`"), std::string::npos);
}

TEST(Words, NoVerdictWithoutTheInputsItNeeds) {
  TraceRequest r = small();
  r.sigmas = {2};
  const Results results = run(r);
  EXPECT_TRUE(verdicts(results).empty());
  EXPECT_TRUE(verdict_words(results).empty());
}

}  // namespace
}  // namespace sagebwd::cli
