// SPDX-License-Identifier: Apache-2.0
#include "words.h"

#include <algorithm>
#include <cmath>

#include "table.h"
#include "trace/published.h"

namespace sagebwd::cli {
namespace {

std::string quoted(const std::string& recipe) { return "`" + recipe + "`"; }

std::string join(const std::vector<std::string>& parts) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i)
    out += (i == 0 ? "" : i + 1 < parts.size() ? ", " : " and ") + parts[i];
  return out;
}

/// "dQ by 5.9%, dK by 5.8% and dV by 4.8%"
std::string gradient_list(const TraceResult& r) {
  std::vector<std::string> parts;
  for (const char* t : kGradients) parts.push_back(std::string(t) + " by " + percent(r[t].rel_l2));
  return join(parts);
}

/// "2.9 to 3.5 times less than `paper`", from the ratios of the three gradients.
std::string ratio_words(const TraceResult& base, const TraceResult& other) {
  double low = 1e300, high = 0;
  for (const char* t : kGradients) {
    const double ratio = base[t].rel_l2 / other[t].rel_l2;
    low = std::min(low, ratio), high = std::max(high, ratio);
  }
  if (!std::isfinite(low) || !std::isfinite(high)) return "";
  const std::string name = quoted(base.variant.recipe);
  if (low > 1.05)
    return fixed(low, 1) == fixed(high, 1)
               ? ", " + fixed(low, 1) + " times less than " + name
               : ", " + fixed(low, 1) + " to " + fixed(high, 1) + " times less than " + name;
  if (high < 0.95) return ", more than " + name;
  return ", about as " + name;
}

/// "`paper` misses dQ by …; `vectorwise` misses dQ by …, 2.9 to 3.5 times less than `paper`."
std::string compare_recipes(const Results& results, const std::string& label) {
  const TraceResult* base = nullptr;
  std::string out;
  for (const std::string& recipe : recipes_of(results)) {
    const TraceResult* r = find(results, label, recipe);
    if (r == nullptr) continue;
    out += (out.empty() ? "" : "; ") + quoted(recipe) + " misses " + gradient_list(*r);
    if (base != nullptr) out += ratio_words(*base, *r);
    if (base == nullptr) base = r;
  }
  return out + ".";
}

/// The hollow marks: how `paper` compares with what was published.
std::string published_words(const Results& results, const Sweep& sweep) {
  double worst = 0, from = 0;
  std::string first;
  for (size_t i = 0; i < sweep.x.size(); ++i) {
    const TraceResult* r = find(results, sweep.labels[i], "paper");
    if (r == nullptr) continue;
    for (const char* t : {"dQ", "dK"}) {
      const auto published = trace::published_rel_l2(t, sweep.x[i]);
      if (!published) continue;
      if (sweep.x[i] >= 3) {
        from = from == 0 ? sweep.x[i] : std::min(from, sweep.x[i]);
        worst = std::max(worst, std::abs((*r)[t].rel_l2 / *published - 1));
      } else if (first.empty()) {
        const TraceResult* fine = find(results, sweep.labels[i], "vectorwise");
        first = " At σ = " + shortest(sweep.x[i]) + " the published " + t + " of " +
                significant(*published) + " is below the " + significant((*r)[t].rel_l2) +
                " that one scale per tile gives here" +
                (fine ? "; scales per query and key give " + significant((*fine)[t].rel_l2) : "") +
                ".";
        if ((*r)[t].rel_l2 < *published) first = "";
      }
    }
  }
  if (from == 0 && first.empty()) return "";
  std::string out =
      "The published figures of the method that `paper` follows (hollow marks in the plots) do not "
      "state their shape.";
  if (from > 0)
    out += " From σ = " + shortest(from) + " up, `paper` is within " + percent(worst) +
           " of them for dQ and dK.";
  return out + first;
}

std::string large_sigma_words(const Results& results, const std::string& label) {
  std::vector<std::string> p, dq;
  for (const std::string& recipe : recipes_of(results))
    if (const TraceResult* r = find(results, label, recipe)) {
      p.push_back(percent((*r)["P unquantised"].rel_l2) + " under " + quoted(recipe));
      dq.push_back(percent((*r)["dQ"].rel_l2));
    }
  return "The larger σ, the sharper the softmax, and the more the rounding of Q and K weighs. "
         "For " +
         label + " P is off by " + join(p) + " before it is itself quantised, and dQ by " +
         join(dq) +
         ". What helps there is finer scales of Q and K, or S in 16 bit for the heads concerned.";
}

std::string worst_layer_words(const Results& results, const Sweep& sweep) {
  std::string out;
  for (const std::string& recipe : recipes_of(results)) {
    const TraceResult* worst = nullptr;
    for (const std::string& label : sweep.labels)
      if (const TraceResult* r = find(results, label, recipe))
        if (worst == nullptr || worst_gradient(*r) > worst_gradient(*worst)) worst = r;
    if (worst == nullptr) continue;
    out += (out.empty() ? "" : " ") + quoted(recipe) + " is worst in " + worst->source.label() +
           ", where it misses " + gradient_list(*worst) + ".";
  }
  return out;
}

Check at_most(const char* what, const char* inputs, double limit, double value) {
  return {what, inputs, "≤ " + percent(limit), percent(value), std::abs(value) <= limit};
}

double largest_bias(const TraceResult& r) {
  double worst = 0;
  for (const char* t : kGradients)
    if (!(std::abs(r[t].projection) <= std::abs(worst))) worst = r[t].projection;
  return worst;
}

/// Largest gradient error over the inputs that are not Gaussian; -1 without such inputs.
double worst_hard(const Results& results, const std::string& recipe) {
  double worst = -1;
  for (const TraceResult& r : results)
    if (r.variant.recipe == recipe && r.variant.lift.empty() && r.source.name != "gaussian" &&
        !r.source.layer)
      worst = std::max(worst, worst_gradient(r));
  return worst;
}

/// What is left when nothing is quantised: rounding of O and of the results to the element type.
std::string yardstick_words(const Results& results, const std::string& label) {
  for (const Shown& v : shown_variants(results))
    if (v.lift == "all")
      if (const TraceResult* r = find(results, label, v.recipe, v.lift))
        return " With nothing in INT8 the figures are " + percent((*r)["dQ"].rel_l2) + ", " +
               percent((*r)["dK"].rel_l2) + " and " + percent((*r)["dV"].rel_l2) +
               ", the cost of " + dtype_name(r->source.shape.dtype) + " outputs alone.";
  return "";
}

constexpr const char* kUnitGaussian = "gaussian σ=1";
constexpr const char* kUnitSink = "sink σ=1";

}  // namespace

std::string percent(double x) {
  if (!std::isfinite(x)) return significant(x);
  return fixed(100 * x, std::abs(x) >= 0.0995 ? 0 : std::abs(x) >= 0.00995 ? 1 : 2) + "%";
}

Paragraphs sweep_words(const Results& results, const Sweep& sweep) {
  if (sweep.captured) return {worst_layer_words(results, sweep)};
  const auto first = std::min_element(sweep.x.begin(), sweep.x.end()) - sweep.x.begin();
  const auto last = std::max_element(sweep.x.begin(), sweep.x.end()) - sweep.x.begin();
  Paragraphs out{"At σ = " + shortest(sweep.x[first]) +
                 (sweep.x[first] == 1 ? ", about what query-key normalisation leaves, " : ", ") +
                 compare_recipes(results, sweep.labels[first]) +
                 yardstick_words(results, sweep.labels[first])};
  out.push_back(large_sigma_words(results, sweep.labels[last]));
  if (sweep.name == "gaussian")
    if (std::string text = published_words(results, sweep); !text.empty()) out.push_back(text);
  return out;
}

Paragraphs single_words(const Results& results, const Sweep& sweep) {
  std::string what = sweep.captured
                         ? "The captured tensors"
                         : std::string(trace::input_description(trace::input_by_name(sweep.name)));
  what[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(what[0])));
  return {"`" + sweep.labels[0] + "`: " + what + ". Here " +
          compare_recipes(results, sweep.labels[0]) + yardstick_words(results, sweep.labels[0])};
}

Paragraphs lift_words(const Results& results) {
  Paragraphs out;
  for (const TraceResult& base : results) {
    if (!base.variant.lift.empty()) continue;
    const auto worst = *std::max_element(
        kGradients.begin(), kGradients.end(),
        [&](const char* a, const char* b) { return base[a].rel_l2 < base[b].rel_l2; });
    const TraceResult* best = nullptr;
    for (const TraceResult& r : results)
      if (!r.variant.lift.empty() && r.variant.lift != "all" &&
          r.variant.recipe == base.variant.recipe && r.source.label() == base.source.label() &&
          (best == nullptr || r[worst].rel_l2 < (*best)[worst].rel_l2))
        best = &r;
    if (best == nullptr) continue;
    const bool helps = (*best)[worst].rel_l2 < 0.9 * base[worst].rel_l2;
    out.push_back(base.source.label() + ", " + quoted(base.variant.recipe) + ": " + worst +
                  " is off by " + percent(base[worst].rel_l2) +
                  (helps
                       ? "; lifting " + best->variant.lift + " out of INT8 helps most and leaves " +
                             percent((*best)[worst].rel_l2) + "."
                       : "; lifting no single matmul lowers that by a tenth."));
  }
  return out;
}

int RecipeVerdict::passed() const {
  return static_cast<int>(
      std::count_if(checks.begin(), checks.end(), [](const Check& c) { return c.passed; }));
}

std::vector<RecipeVerdict> verdicts(const Results& results) {
  std::vector<RecipeVerdict> out;
  for (const std::string& recipe : recipes_of(results)) {
    const TraceResult* r = find(results, kUnitGaussian, recipe);
    if (r == nullptr) continue;
    RecipeVerdict v{recipe, {}};
    double cosine = 1;
    for (const char* t : kOutputs)
      if (!((*r)[t].cosine >= cosine)) cosine = (*r)[t].cosine;
    v.checks = {
        at_most("error of dQ", kUnitGaussian, 0.03, (*r)["dQ"].rel_l2),
        at_most("error of dK", kUnitGaussian, 0.04, (*r)["dK"].rel_l2),
        at_most("error of dV", kUnitGaussian, 0.03, (*r)["dV"].rel_l2),
        {"smallest cosine of O, dQ, dK, dV", kUnitGaussian, "≥ 0.999", fixed(cosine, 5),
         cosine >= 0.999},
        at_most("rows of dQ off by more than half", kUnitGaussian, 0.005, (*r)["dQ"].bad_rows),
        at_most("largest bias of a gradient", kUnitGaussian, 0.002, largest_bias(*r))};
    if (const TraceResult* sink = find(results, kUnitSink, recipe))
      v.checks.push_back(
          at_most("largest bias of a gradient", kUnitSink, 0.01, largest_bias(*sink)));
    out.push_back(std::move(v));
  }
  return out;
}

Paragraphs verdict_words(const Results& results) {
  Paragraphs out;
  const auto all = verdicts(results);
  for (const RecipeVerdict& v : all) {
    const double hard = worst_hard(results, v.recipe);
    out.push_back(quoted(v.recipe) + " is off by at most " +
                  percent(worst_gradient(*find(results, kUnitGaussian, v.recipe))) +
                  " in any gradient of Gaussian inputs with σ = 1" +
                  (hard < 0 ? "" : " and by at most " + percent(hard) + " on the hard ones") +
                  ". It meets " + std::to_string(v.passed()) + " of " +
                  std::to_string(v.checks.size()) + " gates.");
  }
  const auto fewer = [](const RecipeVerdict& a, const RecipeVerdict& b) {
    return a.passed() < b.passed();
  };
  const auto best = std::max_element(all.begin(), all.end(), fewer);
  if (best == all.end()) return out;
  const bool clean = best->passed() == static_cast<int>(best->checks.size());
  out.push_back(clean ? "Train with " + quoted(best->recipe) + ": it meets every gate."
                      : quoted(best->recipe) +
                            " comes closest, but no recipe meets every gate on these inputs.");
  return out;
}

}  // namespace sagebwd::cli
