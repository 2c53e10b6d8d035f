// SPDX-License-Identifier: Apache-2.0
// sagebwd trace: the error of every named tensor, on synthetic or captured inputs.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/suggest.h"
#include "commands.h"
#include "memory.h"
#include "options.h"
#include "page.h"
#include "page_maker.h"
#include "trace_output.h"
#include "words.h"

namespace sagebwd::cli {
namespace {

const std::vector<std::pair<std::string, Dtype>> kDtypes{
    {"f32", Dtype::f32}, {"bf16", Dtype::bf16}, {"f16", Dtype::f16}};

/// Printed below the options by --help.
constexpr const char* kHelp =
    R"(O, dQ, dK and dV come from the implementation that a call would get; P, dS and D come from the
recipe oracle with the same tiles. All are compared with exact attention in FP64 on the same inputs,
so the time grows with heads × n². The table shows relative L2 errors. "bias" is the projection of
the error on the exact gradient: the part that does not average out over a batch.

Inputs:
  gaussian       independent normal values
  outlier        a few channels of Q, K, V and dO are 20 to 100 times larger than the rest
  sink           the first key takes about 65% of every row and carries little value
  sink_127       the same with key 127, the last of a block
  sink_128       the same with key 128, the first of the second block
  sink_middle    the same with a key a third of the way
  sink_last      the same with the last key
  sinks          four keys share 65% of every row and carry little value
  strong_sink    one key, three quarters of the way, takes about 95% of every row
  long           nearly uniform rows, where one query in eight puts 30% on a single key
  offset         every channel of K has a large mean that all tokens share
  channels       a channel of Q is 6 times and one of K 12 times larger, without a mean
  value_channel  a channel of V is 20 times larger, without a mean
  heavy          Q and K have the heavy tails of a t distribution with 3 degrees of freedom
  previous       every query looks at the token before it, with a logit of 10
  one_hot        every query looks at one key of its own, with a logit of 14
  dominant       every 128 queries look at one key of their own, with a logit of 10
  delimiters6    every 100th key has a logit of 6, a long key and little value; the others add up
  delimiters7    the same with a logit of 7
  delimiters8    the same with a logit of 8

Block lists are part of --case: keep=0.03 lists 3% of the key blocks for each block of queries,
blocks=128x64 gives the sizes of both, lists=random|mass|diagonal|skewed says which, and lead=1 how
many leading entries keep P unquantised. Both sides then see the listed keys only.

Captured tensors have the names q, k, v and dout, or layer.<N>.q and so on for several layers, and
the shape [h, n, d] or [b, h, n, d]; k and v may have fewer heads. sagebwd.diagnose(save_to=) writes
the mask, the scale of the logits and the documents with them. If a file does not have these, give
--causal or --full.

Matmuls are S, O, S' (or S2), dV, dP, dQ and dK. S+S2 lifts two at once, "each" stands for all seven
one by one, "all" lifts everything.

Examples:
  sagebwd trace --sigma 1,3,5,8,10 --n 4096 --heads 8 --html trace.html
  sagebwd trace --inputs sink --recipe vectorwise --lift each
  sagebwd trace --recipe "vectorwise,vectorwise smooth_k=off,vectorwise rounding=dither:O,dQ"
  sagebwd trace --inputs sink --case "h2 n4096 keep=0.03 lists=mass"
  sagebwd trace --from captured.safetensors --json trace.json)";

struct TraceOptions {
  TraceRequest request;
  std::string base_case;
  std::optional<int64_t> n, d, heads;
  std::optional<uint64_t> seed;
  bool causal = false;
  std::string json_path, html_path;
  RunOptions run;
};

/// Fills in the request from the options that need more than one value.
void resolve(TraceOptions& o) {
  TraceRequest& r = o.request;
  spec::AttnCase& c = r.base;
  c = parse_base_case(o.base_case.empty() ? "h2 n1024" : o.base_case);
  if (o.n) c.nq = c.nk = *o.n;
  if (o.d) c.d = *o.d;
  if (o.heads) c.h = c.hk = *o.heads;
  if (o.seed) c.seed = *o.seed;
  if (o.causal) c.mask.causal = true;
  if (r.dtype) c.dtype = *r.dtype;
  check_memory(c);
}

void run(TraceOptions o, const std::string& command_line) {
  o.run.apply();
  check_apart({{"--from", o.request.from}}, {{"--json", o.json_path}, {"--html", o.html_path}});
  if (!o.html_path.empty()) need_page_maker("--html");
  resolve(o);
  std::unique_ptr<SafeTensors> file;
  if (!o.request.from.empty()) file = std::make_unique<SafeTensors>(o.request.from);
  const TracePlan plan = plan_trace(o.request, file.get());
  const Results results = run_trace(plan, file.get(), o.run.talk());

  std::fputs(trace_table(results).c_str(), stdout);
  if (has_lifts(results)) {
    std::fputs("\n", stdout);
    for (const std::string& line : lift_words(results)) std::puts(line.c_str());
  }
  nlohmann::json record = trace_json(results, command_line);
  record["page"] = trace_page(results, {"Trace of INT8 attention", command_line, false});
  if (!o.json_path.empty()) write_file(o.json_path, json_text(record));
  if (!o.html_path.empty()) make_page(record, o.html_path);
}

/// A choice by name. The parser's own descriptions are left out, because the type's name is
/// clearer.
template <typename T, typename Choices>
CLI::Option* add_choice(CLI::App& command, const char* option, T& to, const Choices& choices,
                        const char* what) {
  std::vector<std::string> names;
  std::string shown;
  for (const auto& [name, value] : choices) {
    names.push_back(name);
    shown += (shown.empty() ? "" : "|") + name;
  }
  const auto refusal = [names, shown](const std::string& given) -> std::string {
    if (std::find(names.begin(), names.end(), given) != names.end()) return "";
    return "expected " + shown + ", got \"" + given + "\"" + did_you_mean(given, names);
  };
  // The transform added last runs first: membership is checked on the name.
  return command.add_option(option, to, what)
      ->transform(CLI::Transformer(choices).description(""))
      ->transform(CLI::Validator([refusal](std::string& given) { return refusal(given); }, ""))
      ->type_name(shown);
}

template <typename T>
CLI::Option* add_size(CLI::App& command, const char* option, T& to, int64_t most,
                      const char* what) {
  return command.add_option(option, to, what)
      ->check(CLI::Range(int64_t{1}, most).description(""))
      ->type_name("N");
}

template <typename T>
CLI::Option* add_list(CLI::App& command, const char* option, std::vector<T>& to, const char* type,
                      const char* what) {
  return command.add_option(option, to, what)
      ->delimiter(',')
      ->type_name(type)
      ->capture_default_str();
}

void add_inputs(CLI::App& command, TraceOptions& o) {
  TraceRequest& r = o.request;
  for (CLI::Option* option :
       {add_list(command, "--inputs", r.inputs, "KIND,..", "Kinds of synthetic inputs, see below"),
        add_list(command, "--sigma", r.sigmas, "X,..", "Deviations of Q and K; V and dO have 1"),
        add_size(command, "--n", o.n, 1 << 24, "Tokens (default 1024)"),
        add_size(command, "--d", o.d, 4096, "Head dim (default 64)"),
        add_size(command, "--heads", o.heads, 1 << 16, "Heads (default 2)"),
        command.add_flag("--causal", o.causal, "Causal mask"),
        command.add_flag("--full", r.full, "No mask, the default but for captured tensors"),
        add_choice(command, "--dtype", r.dtype, kDtypes,
                   "Element type; default bf16, or the file's"),
        command.add_option("--seed", o.seed, "Seed of inputs and dither (default 1)")
            ->type_name("N"),
        command
            .add_option("--case", o.base_case,
                        "Start from a case string, such as \"h8 hk2 nq512 nk4096 d128\"")
            ->type_name("CASE"),
        command.add_option("--from", r.from, "Captured tensors q, k, v, dout instead; see below")
            ->type_name("FILE.safetensors")})
    option->group("Inputs");
  command.get_option("--full")->excludes(command.get_option("--causal"));
  for (const char* name : {"--inputs", "--sigma", "--n", "--d", "--heads", "--case"})
    command.get_option("--from")->excludes(command.get_option(name));
}

void add_recipes(CLI::App& command, TraceOptions& o) {
  TraceRequest& r = o.request;
  for (CLI::Option* option :
       {command
            .add_option(
                "--recipe",
                [&r](const CLI::results_t& texts) {
                  r.recipes.clear();
                  for (const std::string& text : texts)
                    for (std::string& one : split_recipes(text))
                      r.recipes.push_back(std::move(one));
                  return true;
                },
                "Recipes, each with the switches that differ from it; see sagebwd recipe")
            ->type_name("RECIPE,..")
            ->default_str("paper,vectorwise"),
        add_list(command, "--lift", r.lifts, "MATMUL,..",
                 "Matmuls to lift out of INT8, each a case of its own; see below")})
    option->group("Recipe");
}

}  // namespace

void add_trace(CLI::App& app, const std::string& command_line) {
  auto* command =
      app.add_subcommand("trace", "Error of every tensor, on synthetic or captured inputs");
  auto o = std::make_shared<TraceOptions>();
  add_inputs(*command, *o);
  add_recipes(*command, *o);
  command->add_option("--json", o->json_path, "Write all figures to this file")->type_name("FILE");
  command
      ->add_option("--html", o->html_path,
                   "Write a page with plots to this file (the Python package makes it)")
      ->type_name("FILE");
  add_run_options(*command, o->run);
  command->footer(kHelp);
  command->callback([o, command_line] { run(*o, command_line); });
}

}  // namespace sagebwd::cli
