// SPDX-License-Identifier: Apache-2.0
#include "page.h"

#include <set>

#include "base/parallel.h"
#include "charts.h"
#include "document.h"
#include "machine.h"
#include "peak.h"
#include "sagebwd/attention.h"
#include "table.h"
#include "words.h"

namespace sagebwd::cli {
namespace {

json paragraphs(const Paragraphs& all) {
  json items = json::array();
  for (const std::string& p : all) items.push_back(paragraph(p));
  return items;
}

void append(json& items, const json& more) { items.insert(items.end(), more.begin(), more.end()); }

/// "2048 tokens, head dim 64, 4 heads, causal, bf16"; "several shapes" where sources differ.
std::string shape_words(const Results& results) {
  std::set<std::string> shapes;
  for (const TraceResult& r : results) {
    const spec::AttnCase& c = r.source.shape;
    const std::string tokens =
        c.nq == c.nk ? std::to_string(c.nq) + " tokens"
                     : std::to_string(c.nq) + " queries, " + std::to_string(c.nk) + " keys";
    const std::string of_v =
        c.value_dim() == c.d ? "" : " (of V " + std::to_string(c.value_dim()) + ")";
    shapes.insert(tokens + ", head dim " + std::to_string(c.d) + of_v + ", " +
                  std::to_string(c.b * c.h) + " head" + (c.b * c.h == 1 ? "" : "s") + ", " +
                  (c.mask.causal ? "causal" : "no mask") + ", " + dtype_name(c.dtype) + " inputs");
  }
  return shapes.size() == 1 ? *shapes.begin() : "several shapes";
}

std::string lead(const Results& results) {
  return "Six of the seven matmuls of attention and its gradient in INT8, compared with exact "
         "attention in FP64 on the same inputs: " +
         shape_words(results) + ".";
}

/// One tile per input with both recipes: the largest gradient error of the default, beside the
/// other's.
json key_figures(const Results& results) {
  json tiles = json::array();
  for (const Sweep& s : sweeps_of(results)) {
    const TraceResult* ours = find(results, s.labels[0], "vectorwise");
    const TraceResult* paper = find(results, s.labels[0], "paper");
    if (ours == nullptr || paper == nullptr) continue;
    tiles.push_back({{"name", "worst gradient, " + s.labels[0]},
                     {"value", percent(worst_gradient(*ours))},
                     {"note", "`vectorwise`; `paper` " + percent(worst_gradient(*paper))}});
  }
  return {{"kind", "tiles"}, {"tiles", tiles}};
}

/// An array of one card, or of none where there is no verdict.
json verdict_card(const Results& results) {
  const auto all = verdicts(results);
  if (all.empty()) return json::array();
  std::vector<Cell> titles{"gate", {"inputs", "words"}, "limit"};
  for (const RecipeVerdict& v : all) titles.push_back({"`" + v.recipe + "`"});
  TableItem table(titles);
  for (size_t i = 0; i < all[0].checks.size(); ++i) {
    const Check& gate = all[0].checks[i];
    std::vector<Cell> row{{gate.what, "words"}, {gate.inputs, "words"}, {gate.limit}};
    for (const RecipeVerdict& v : all)
      row.push_back({v.checks[i].value + (v.checks[i].passed ? " ✓" : " ✗"),
                     v.checks[i].passed ? "good" : "bad"});
    table.row(row);
  }
  Paragraphs words = verdict_words(results);
  const std::string last = words.back();
  words.pop_back();
  json items = json::array({paragraph(last, "verdict")});
  append(items, paragraphs(words));
  items.push_back(table.item());
  return json::array({card("Verdict", items)});
}

/// Words, charts, and the figures that they are drawn from.
json figures_card(const Results& results, const std::string& title, const Paragraphs& words,
                  const json& charts, const std::vector<Sweep>& sweeps) {
  json items = paragraphs(words);
  append(items, charts);
  items.push_back(details("Figures: relative L2 of outputs and intermediates",
                          json::array({error_table(results, sweeps)})));
  items.push_back(
      details("Cosine, bias and worst rows", json::array({detail_table(results, sweeps)})));
  return card(title, items);
}

json sweep_card(const Results& results, const Sweep& sweep) {
  const std::string title =
      sweep.captured ? "Captured layers"
                     : "Error against the spread of queries and keys: " + sweep.name + " inputs";
  return figures_card(results, title, sweep_words(results, sweep), sweep_charts(results, sweep),
                      {sweep});
}

json single_card(const Results& results, const std::vector<Sweep>& sweeps,
                 const std::string& title) {
  Paragraphs words;
  for (const Sweep& s : sweeps)
    for (std::string& p : single_words(results, s)) words.push_back(std::move(p));
  return figures_card(results, title, words, bar_charts(results, sweeps), sweeps);
}

json speed_card(const Benchmark& b) {
  TableItem table({"case",
                   {"pass", "name"},
                   "time",
                   "GMAC/s",
                   "INT8 GMAC/s",
                   "share of INT8 peak",
                   "INT8 part alone"});
  for (const Measured& m : b.cases) {
    const std::optional<Peak>& peak = m.peak;
    for (const Pass& p : m.passes) {
      const bool first = &p == &m.passes.front();
      const std::string css = first ? "section" : "";
      table.row({{first ? m.c.to_string() : "", css + " wrap"},
                 {p.name, css + " name"},
                 {fixed(p.median() * 1e3, 1) + " ms", css},
                 {fixed(p.macs_per_second() / 1e9, 1), css},
                 {fixed(p.int8_per_second() / 1e9, 1), css},
                 {peak ? percent(p.share(*peak)) : "–", css},
                 {peak ? percent(p.share_of_int8_part(*peak)) : "–", css}});
    }
  }
  const std::string words =
      "Median wall time of whole calls through the public API with " + std::to_string(b.threads) +
      (b.threads == 1 ? " thread" : " threads") +
      ": quantisation, softmax and the floating-point dP are inside. " +
      "Shares are of a peak measured between the runs by loops that touch registers only. "
      "The last column takes the floating-point multiply-adds out of the time at FP32 peak.";
  return card("Speed on this machine", json::array({paragraph(words), table.item()}));
}

json reading_card() {
  TableItem table({"term", "meaning"}, "words");
  const auto row = [&](const char* term, const char* meaning) {
    table.row({{term}, {meaning, "words"}});
  };
  row("relative L2", "‖x − exact‖ / ‖exact‖ over all heads; 0.02 means off by 2%");
  row("bias",
      "⟨x − exact, exact⟩ / ⟨exact, exact⟩: the part of the error that does not average out over a "
      "batch; "
      "negative when x is too small");
  row("worst row",
      "largest relative error of a single row; rows whose exact gradient nearly vanishes can be "
      "off "
      "by many times their size");
  row("cosine", "⟨x, exact⟩ / (‖x‖ ‖exact‖)");
  row("no INT8",
      "all seven matmuls in floating point, inputs and outputs as they are: the yardstick");
  row("O dQ dK dV", "from the implementation a call gets on this machine");
  row("P dS D",
      "from the recipe oracle with the same tiles, as the matmuls use them: quantised, scales "
      "undone");
  row("`paper`",
      "one scale per block of Q, K, V, dO and one per tile of P and dS (arXiv 2603.02170)");
  row("`vectorwise`",
      "one scale per token of Q, K, V, dO; P and dS scaled per key for dV and dK, dS per query for "
      "dQ; K without a mean of earlier keys");
  return card("How to read this page", json::array({table.item()}));
}

json provenance_card(const Results& results, const PageText& text) {
  std::set<std::string> implementations, seeds;
  for (const TraceResult& r : results) {
    implementations.insert(r.implementation);
    seeds.insert(std::to_string(r.source.shape.seed));
  }
  const auto joined = [](const std::set<std::string>& all) {
    std::string out;
    for (const std::string& s : all) out += (out.empty() ? "" : ", ") + s;
    return out;
  };
  json facts = json::array();
  const auto fact = [&](const char* name, const std::string& value) {
    facts.push_back({name, value});
  };
  fact("command", "`" + text.command_line + "`");
  fact("version", std::string("sagebwd ") + version());
  fact("implementation", joined(implementations));
  fact("machine", cpu_model() + ", " + std::to_string(default_threads()) + " threads");
  fact("seed", joined(seeds));
  fact("date", today());
  return card("Where the figures come from",
              json::array({json{{"kind", "facts"}, {"facts", facts}}}));
}

}  // namespace

json trace_page(const Results& results, const PageText& text) {
  json items = json::array();
  if (text.verdict) {
    items.push_back(key_figures(results));
    append(items, verdict_card(results));
  }
  std::vector<Sweep> singles;
  for (const Sweep& s : sweeps_of(results)) {
    if (s.has_several())
      items.push_back(sweep_card(results, s));
    else
      singles.push_back(s);
  }
  if (!singles.empty())
    items.push_back(single_card(results, singles, text.verdict ? "Hard inputs" : "Error by input"));
  if (has_lifts(results)) {
    json lifts = paragraphs(lift_words(results));
    lifts.push_back(lift_table(results));
    items.push_back(card("Which matmul makes the error", lifts));
  }
  if (text.speed != nullptr) items.push_back(speed_card(*text.speed));
  items.push_back(reading_card());
  items.push_back(provenance_card(results, text));
  return {{"title", text.title}, {"lead", lead(results)}, {"items", items}};
}

}  // namespace sagebwd::cli
