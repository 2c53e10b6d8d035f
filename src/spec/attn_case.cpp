// SPDX-License-Identifier: Apache-2.0
#include "spec/attn_case.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "base/suggest.h"
#include "spec/lists.h"
#include "spec/recipe_fields.h"
#include "spec/text.h"

namespace sagebwd::spec {
namespace {

constexpr int64_t kMaxSize = int64_t{1}
                             << 31;  // of one dimension: larger is a slip of the keyboard

/// The fewest digits that give the number back.
template <typename T>
std::string shortest(T value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

/// How errors about a token begin.
std::string where(std::string_view token) { return "case token \"" + std::string(token) + "\""; }

/// -1 for all.
int count_or_all(std::string_view value, std::string_view token) {
  return value == "all" ? -1 : number<int>(value, where(token), 0, std::numeric_limits<int>::max());
}

constexpr ListKind kListKinds[] = {ListKind::random, ListKind::mass, ListKind::diagonal,
                                   ListKind::skewed};

ListKind list_by_name(std::string_view name) {
  std::vector<std::string> names;
  for (ListKind kind : kListKinds) {
    if (name == list_name(kind)) return kind;
    names.push_back(list_name(kind));
  }
  SAGE_THROW(ErrorKind::invalid_argument, "lists: expected random, mass, diagonal or skewed, got \""
                                              << name << "\"" << did_you_mean(name, names));
}

/// Reads tokens into a case and remembers which properties were given.
class Parser {
 public:
  AttnCase parse(std::string_view text) {
    const std::vector<std::string_view> tokens = words(text);
    // The preset first: it would overwrite the switches that refine it.
    for (std::string_view t : tokens)
      if (is_scheme(t)) once("recipe", t), case_.recipe = parse_recipe(t);
    for (std::string_view t : tokens) {
      if (is_scheme(t)) continue;
      if (!word(t) && !assignment(t) && !size(t)) unknown(t);
    }
    if (!given_.contains("hk")) case_.hk = case_.h;
    if (case_.dv == case_.d) case_.dv = 0;
    SAGE_CHECK(case_.h % case_.hk == 0,
               "case: expected h to be a multiple of hk, got h" << case_.h << " hk" << case_.hk);
    for (const char* name : {"blocks", "lead", "lists"})
      SAGE_CHECK(case_.has_lists() || !given_.contains(name),
                 "case: expected keep=<share> beside " << name << "=");
    case_.recipe.seed = case_.seed;
    return case_;
  }

 private:
  /// Every known token, with the value or the digits of this one where it takes some.
  static std::vector<std::string> tokens_like(std::string_view token) {
    std::vector<std::string> known{"paper", "vectorwise", "causal", "full", "bhsd",
                                   "bshd",  "f32",        "bf16",   "f16"};
    const size_t equals = token.find('='), digits = token.find_first_of("0123456789");
    if (equals != std::string_view::npos) {
      std::vector<std::string> names = switch_names();
      names.insert(names.end(), {"dv", "align", "window", "scale", "softcap", "keep", "blocks",
                                 "lead", "lists"});
      for (const std::string& name : names)
        known.push_back(name + std::string(token.substr(equals)));
    } else if (digits != std::string_view::npos) {
      for (const char* name : {"b", "h", "hk", "n", "nq", "nk", "d", "seed"})
        known.push_back(name + std::string(token.substr(digits)));
    }
    return known;
  }

  [[noreturn]] static void unknown(std::string_view token) {
    SAGE_THROW(ErrorKind::invalid_argument,
               "case token \""
                   << token
                   << "\" is unknown; expected tokens such as \"b1 h8 hk2 n4096 d64 causal bf16 "
                   << "vectorwise bhsd seed1\"" << did_you_mean(token, tokens_like(token)));
  }

  void once(std::string_view property, std::string_view token) {
    SAGE_CHECK(given_.insert(std::string(property)).second,
               "case token \"" << token << "\": " << property << " is given twice");
  }

  bool word(std::string_view t) {
    if (t == "causal" || t == "full")
      return once("mask", t), case_.mask.causal = t == "causal", true;
    if (t == "bhsd" || t == "bshd")
      return once("layout", t), case_.layout = t == "bhsd" ? Layout::bhsd : Layout::bshd, true;
    for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16})
      if (t == dtype_name(dtype)) return once("dtype", t), case_.dtype = dtype, true;
    return false;
  }

  bool assignment(std::string_view t) {
    const size_t equals = t.find('=');
    if (equals == std::string_view::npos) return false;
    const std::string_view name = t.substr(0, equals), value = t.substr(equals + 1);
    if (name == "align") {
      SAGE_CHECK(
          value == "top_left" || value == "bottom_right",
          "case token \"" << t << "\": expected top_left or bottom_right, got \"" << value << "\"");
      case_.mask.align = value == "top_left" ? Align::top_left : Align::bottom_right;
    } else if (name == "dv") {
      case_.dv = number<int64_t>(value, where(t), 1, kMaxSize);
    } else if (name == "window") {
      const auto sides = split(value, ",");
      SAGE_CHECK(sides.size() == 2, "case token \"" << t << "\": expected window=<left>,<right>");
      case_.mask.window_left = number<int64_t>(sides[0], where(t), -1, kMaxSize);
      case_.mask.window_right = number<int64_t>(sides[1], where(t), -1, kMaxSize);
    } else if (name == "scale") {
      const auto [end, error] =
          std::from_chars(value.data(), value.data() + value.size(), case_.scale);
      SAGE_CHECK(error == std::errc{} && end == value.data() + value.size() &&
                     std::isfinite(case_.scale) && case_.scale != 0.0f,
                 "case token \"" << t << "\": expected a number other than 0");
    } else if (name == "softcap") {
      const auto [end, error] =
          std::from_chars(value.data(), value.data() + value.size(), case_.softcap);
      SAGE_CHECK(error == std::errc{} && end == value.data() + value.size() &&
                     std::isfinite(case_.softcap) && case_.softcap >= 0.0f,
                 "case token \"" << t << "\": expected 0 (off) or a positive number");
    } else if (name == "keep") {
      const auto [end, error] =
          std::from_chars(value.data(), value.data() + value.size(), case_.keep);
      SAGE_CHECK(error == std::errc{} && end == value.data() + value.size() && case_.keep > 0 &&
                     case_.keep <= 1,
                 "case token \"" << t << "\": expected a share above 0 and up to 1");
    } else if (name == "blocks") {
      const auto sides = split(value, "x");
      SAGE_CHECK(sides.size() == 2, "case token \"" << t << "\": expected blocks=<queries>x<keys>");
      case_.block_q = number<int>(sides[0], where(t), 64, 1 << 20);
      case_.block_k = number<int>(sides[1], where(t), 64, 1 << 20);
    } else if (name == "lead") {
      case_.lead = count_or_all(value, t);
    } else if (name == "lists") {
      case_.lists = list_by_name(value);
    } else if (!set_switch(case_.recipe, name, value, where(t))) {
      return false;
    }
    return once(name, t), true;
  }

  bool size(std::string_view t) {
    const size_t digits = t.find_first_of("-0123456789");
    if (digits == 0 || digits == std::string_view::npos) return false;
    const std::string_view name = t.substr(0, digits), value = t.substr(digits);
    const auto read = [&](int64_t low) { return number<int64_t>(value, where(t), low, kMaxSize); };
    if (name == "n") {
      once("nq", t), once("nk", t);
      case_.nq = case_.nk = read(0);
      return true;
    }
    if (name == "b")
      case_.b = read(0);
    else if (name == "h")
      case_.h = read(1);
    else if (name == "hk")
      case_.hk = read(1);
    else if (name == "nq")
      case_.nq = read(0);
    else if (name == "nk")
      case_.nk = read(0);
    else if (name == "d")
      case_.d = read(1);
    else if (name == "seed")
      case_.seed = number<uint64_t>(value, where(t), 0, std::numeric_limits<uint64_t>::max());
    else
      return false;
    return once(name, t), true;
  }

  AttnCase case_;
  std::set<std::string> given_;
};

}  // namespace

AttnCase AttnCase::parse(std::string_view text) { return Parser().parse(text); }

std::string AttnCase::to_string() const {
  std::ostringstream s;
  s << "b" << b << " h" << h << " hk" << hk << " nq" << nq << " nk" << nk << " d" << d;
  if (value_dim() != d) s << " dv=" << dv;
  s << (mask.causal ? " causal" : " full");
  if (mask.align == Align::top_left) s << " align=top_left";
  if (mask.window_left >= 0 || mask.window_right >= 0)
    s << " window=" << mask.window_left << "," << mask.window_right;
  if (scale != 0.0f) s << " scale=" << shortest(scale);
  if (softcap != 0.0f) s << " softcap=" << shortest(softcap);
  s << " " << dtype_name(dtype) << " " << scheme_name(recipe.scheme)
    << (layout == Layout::bhsd ? " bhsd" : " bshd") << " seed" << seed;

  s << switches_text(recipe);
  if (has_lists())
    s << " keep=" << shortest(keep) << " blocks=" << block_q << "x" << block_k
      << " lists=" << list_name(lists);
  if (has_lists() && lead != 1) s << " lead=" << (lead < 0 ? "all" : std::to_string(lead));
  return s.str();
}

TensorView AttnCase::view(void* data, int64_t heads, int64_t n, int64_t channels) const {
  if (layout == Layout::bhsd) return contiguous(data, dtype, {b, heads, n, channels});
  return {
      data, dtype, {b, heads, n, channels}, {n * heads * channels, channels, heads * channels, 1}};
}

float AttnCase::logit_scale() const {
  return scale != 0.0f ? scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(d)));
}

Problem AttnCase::problem() const {
  Problem p{};
  p.dtype = dtype;
  p.b = b, p.h = h, p.hk = hk, p.nq = nq, p.nk = nk, p.d = d, p.dv = value_dim();
  p.scale = logit_scale();
  p.softcap = softcap;
  p.align = mask.align;
  p.left = mask.window_left;
  p.right = mask.causal ? 0 : mask.window_right;
  p.recipe = recipe;
  p.blocks = list_shape();
  return p;
}

KeyRange AttnCase::visible(int64_t i) const {
  Problem p{};
  p.align = mask.align;
  p.left = mask.window_left;
  p.right = mask.causal ? 0 : mask.window_right;
  return p.visible({0, 0, nq, 0, nk}, i);
}

const char* list_name(ListKind kind) {
  switch (kind) {
    case ListKind::random:
      return "random";
    case ListKind::mass:
      return "mass";
    case ListKind::diagonal:
      return "diagonal";
    case ListKind::skewed:
      return "skewed";
  }
  return "unknown";
}

int64_t AttnCase::listed(int64_t key_blocks) const {
  return std::clamp<int64_t>(std::llround(keep * static_cast<double>(key_blocks)), 1,
                             std::max<int64_t>(key_blocks, 1));
}

BlockLists AttnCase::list_shape() const {
  if (!has_lists()) return {};
  const int64_t rows = ceil_div(nq, block_q), key_blocks = ceil_div(nk, block_k);
  SAGE_CHECK(
      nk == 0 || keep * static_cast<double>(key_blocks) > 1 - 1e-9,
      "keep: expected at least one of " << key_blocks << " key blocks, got a share of " << keep);
  BlockLists l;
  l.width = key_blocks == 0 ? 0 : listed(key_blocks);
  l.rows = rows, l.stride_head = rows, l.stride_batch = h * rows;
  l.block_q = block_q, l.block_k = block_k, l.lead = lead;
  return l;
}

int64_t AttnCase::visible_pairs() const {
  int64_t pairs = 0;
  for (int64_t i = 0; i < nq; ++i) {
    const KeyRange r = visible(i);
    pairs += r.end - r.begin;
  }
  return pairs;
}

int64_t MacCounts::int8() const {
  int64_t sum = 0;
  for (const MatmulMacs& m : matmuls) sum += m.int8;
  return sum;
}

int64_t MacCounts::floating() const {
  int64_t sum = 0;
  for (const MatmulMacs& m : matmuls) sum += m.floating;
  return sum;
}

MatmulMacs MacCounts::of(uint32_t matmul) const {
  for (const MatmulMacs& m : matmuls)
    if (m.matmul == matmul) return m;
  return {matmul, 0, 0};
}

Pairs count_pairs(const AttnCase& c) { return {c.visible_pairs() * c.b * c.h, 0}; }

Pairs count_listed_pairs(const Problem& p) {
  const ListSets sets(p);
  const int64_t block_q = p.blocks.block_q, block_k = p.blocks.block_k;
  const int64_t lead = p.lead();
  Pairs pairs;
  for (int64_t t = 0; t < p.num_sequences(); ++t) {
    const Sequence s = p.sequence(t);
    const int64_t first = first_list_row(p, t);
    for (int64_t h = 0; h < p.h; ++h)
      for (int64_t i = 0; i < s.nq; ++i) {
        const KeyRange seen = p.visible(s, i);
        const BlockList list = sets.row(sets.of(s.batch, h), first + i / block_q);
        for (int64_t e = 0; e < list.count; ++e) {
          const int64_t begin = std::max(seen.begin, list.index[e] * block_k);
          const int64_t end = std::min(seen.end, (list.index[e] + 1) * block_k);
          const int64_t keys = std::max<int64_t>(end - begin, 0);
          pairs.all += keys;
          if (lead < 0 || e < lead) pairs.leading += keys;
        }
      }
  }
  return pairs;
}

MacCounts count_macs(const AttnCase& c, Direction direction) {
  return count_macs(c, direction, count_pairs(c));
}

MacCounts count_macs(const AttnCase& c, Direction direction, const Pairs& pairs) {
  // `floating`: the pairs whose product is not INT8.
  MacCounts counts;
  const auto add = [&](uint32_t matmul, int64_t channels, int64_t floating) {
    if (c.recipe.high_precision & matmul) floating = pairs.all;
    counts.matmuls[counts.count++] = {matmul, (pairs.all - floating) * channels,
                                      floating * channels};
  };
  if (direction == Direction::forward) {
    add(kMatmulS, c.d, 0);
    add(kMatmulO, c.value_dim(), pairs.leading);
  } else {
    add(kMatmulSRecompute, c.d, 0);
    add(kMatmulDV, c.value_dim(), 0);
    add(kMatmulDP, c.value_dim(), pairs.all);
    add(kMatmulDQ, c.d, 0);
    add(kMatmulDK, c.d, 0);
  }
  return counts;
}

}  // namespace sagebwd::spec
