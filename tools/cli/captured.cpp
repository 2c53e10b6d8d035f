// SPDX-License-Identifier: Apache-2.0
#include "captured.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/dispatch_dtype.h"

namespace sagebwd::cli {
namespace {

constexpr std::array<const char*, 4> kTensors{"q", "k", "v", "dout"};
constexpr std::string_view kLayer = "layer.";

bool is_input(std::string_view name) {
  for (const char* t : kTensors)
    if (name == t) return true;
  return false;
}

/// Prefixes that hold at least one of the four tensors, by layer number; -1 for tensors without a
/// prefix.
std::map<int64_t, std::string> prefixes(const SafeTensors& file) {
  std::map<int64_t, std::string> found;
  for (const auto& [name, info] : file.tensors()) {
    const size_t dot = name.rfind('.');
    const std::string prefix = dot == std::string::npos ? "" : name.substr(0, dot + 1);
    if (!is_input(std::string_view(name).substr(prefix.size()))) continue;
    if (prefix.empty()) {
      found[-1] = prefix;
    } else if (prefix.starts_with(kLayer)) {
      int64_t number = 0;
      const char* begin = prefix.data() + kLayer.size();
      const char* end = prefix.data() + prefix.size() - 1;
      const auto [stop, error] = std::from_chars(begin, end, number);
      SAGE_CHECK(
          error == std::errc{} && stop == end && number >= 0,
          file.path() << ": tensor \"" << name << "\": expected a layer number after \"layer.\"");
      const auto at = found.emplace(number, prefix).first;
      SAGE_CHECK(at->second == prefix, file.path() << ": \"" << at->second << "\" and \"" << prefix
                                                   << "\" are the same layer");
    }
  }
  return found;
}

std::array<int64_t, 4> shape4(const SafeTensors& file, const std::string& name) {
  const auto it = file.tensors().find(name);
  SAGE_CHECK(it != file.tensors().end(), file.path() << ": tensor \"" << name << "\" is missing");
  const std::vector<int64_t>& s = it->second.shape;
  SAGE_CHECK(s.size() == 3 || s.size() == 4,
             file.path() << ": tensor \"" << name
                         << "\": expected shape [h, n, d] or [b, h, n, d], got "
                         << it->second.show());
  for (int64_t size : s)
    SAGE_CHECK(size > 0, file.path()
                             << ": tensor \"" << name << "\" is empty: " << it->second.show());
  return s.size() == 3 ? std::array<int64_t, 4>{1, s[0], s[1], s[2]}
                       : std::array<int64_t, 4>{s[0], s[1], s[2], s[3]};
}

void expect_shape(const SafeTensors& file, const std::string& name,
                  const std::array<int64_t, 4>& wanted) {
  const auto got = shape4(file, name);
  SAGE_CHECK(got == wanted, file.path() << ": tensor \"" << name << "\" is "
                                        << file.tensors().at(name).show() << ", expected ["
                                        << wanted[0] << ", " << wanted[1] << ", " << wanted[2]
                                        << ", " << wanted[3] << "] to match the others");
}

// --- what the file says about a layer

using nlohmann::json;

bool is_whole(const json& n) {
  return n.is_number_integer() &&
         (!n.is_number_unsigned() || n.get<uint64_t>() <= std::numeric_limits<int64_t>::max());
}

std::vector<int64_t> offsets_of(const json& value, int64_t tokens, const std::string& where) {
  std::vector<int64_t> offsets;
  SAGE_CHECK(value.is_array() && !value.empty(), where << ": expected an array of offsets");
  for (const json& n : value) {
    SAGE_CHECK(is_whole(n), where << ": expected whole numbers, got " << n);
    offsets.push_back(n.get<int64_t>());
    SAGE_CHECK(offsets.size() == 1 ? offsets[0] == 0 : offsets.back() >= *(offsets.end() - 2),
               where << ": expected offsets from 0 that do not decrease, got " << value);
  }
  SAGE_CHECK(offsets.back() == tokens,
             where << ": expected to end at the " << tokens << " tokens, got " << offsets.back());
  return offsets;
}

/// Reads the mask and the scale of a layer, and splits a packed one into its documents.
std::vector<CapturedLayer> described(CapturedLayer layer, const std::string& text,
                                     const std::string& where) {
  const json about = json::parse(text, nullptr, false);
  SAGE_CHECK(about.is_object(), where << ": expected a JSON object, got " << text);
  for (const auto& [key, value] : about.items())
    SAGE_CHECK(key == "causal" || key == "align" || key == "window" || key == "softmax_scale" ||
                   key == "cu_seqlens_q" || key == "cu_seqlens_k",
               where << ": \"" << key << "\" is unknown");
  for (const char* key : {"causal", "align", "window", "softmax_scale"})
    SAGE_CHECK(about.contains(key), where << ": \"" << key << "\" is missing");
  layer.described = true;
  spec::AttnCase& c = layer.shape;
  SAGE_CHECK(about["causal"].is_boolean(), where << ": expected causal to be true or false");
  c.mask.causal = about["causal"].get<bool>();
  SAGE_CHECK(
      about["align"] == "top_left" || about["align"] == "bottom_right",
      where << ": expected align to be \"top_left\" or \"bottom_right\", got " << about["align"]);
  c.mask.align = about["align"] == "top_left" ? Align::top_left : Align::bottom_right;
  const json& window = about["window"];
  constexpr int64_t kFar = int64_t{1} << 40;
  const auto is_side = [](const json& n) {
    return is_whole(n) && n.get<int64_t>() >= -1 && n.get<int64_t>() < kFar;
  };
  SAGE_CHECK(window.is_array() && window.size() == 2 && is_side(window[0]) && is_side(window[1]),
             where << ": expected window to be two whole numbers from -1 on, got " << window);
  c.mask.window_left = window[0].get<int64_t>(), c.mask.window_right = window[1].get<int64_t>();
  const json& scale = about["softmax_scale"];
  c.scale = scale.is_number() ? scale.get<float>() : 0.0f;
  SAGE_CHECK(std::isfinite(c.scale) && c.scale != 0.0f,
             where << ": expected softmax_scale to be a number other than 0, got " << scale);

  SAGE_CHECK(about.contains("cu_seqlens_q") == about.contains("cu_seqlens_k"),
             where << ": expected cu_seqlens_q and cu_seqlens_k, or neither");
  if (!about.contains("cu_seqlens_q")) return {layer};
  SAGE_CHECK(c.b == 1, where << ": expected documents in a batch of 1, got " << c.b);
  const auto q = offsets_of(about["cu_seqlens_q"], c.nq, where + ": cu_seqlens_q"),
             k = offsets_of(about["cu_seqlens_k"], c.nk, where + ": cu_seqlens_k");
  SAGE_CHECK(q.size() == k.size(), where << ": expected as many offsets of queries as of keys, got "
                                         << q.size() << " and " << k.size());
  std::vector<CapturedLayer> documents;
  for (size_t i = 0; i + 1 < q.size(); ++i) {
    layer.document = static_cast<int64_t>(i);
    layer.first_q = q[i], layer.first_k = k[i];
    c.nq = q[i + 1] - q[i], c.nk = k[i + 1] - k[i];
    if (c.nq > 0 && c.nk > 0) documents.push_back(layer);
  }
  return documents;
}

/// Tokens `first` to `first + n` of every head of a tensor [.., tokens, d].
std::vector<float> tokens_of(const SafeTensors& file, const std::string& name, int64_t first,
                             int64_t n, int64_t d) {
  std::vector<float> all = file.read(name);
  const std::vector<int64_t>& shape = file.tensors().at(name).shape;
  const int64_t tokens = shape[shape.size() - 2];
  if (n == tokens) return all;
  std::vector<float> part;
  for (size_t head = 0; head < all.size(); head += static_cast<size_t>(tokens * d)) {
    const auto begin = all.begin() + static_cast<int64_t>(head) + first * d;
    part.insert(part.end(), begin, begin + n * d);
  }
  return part;
}

}  // namespace

std::vector<CapturedLayer> find_layers(const SafeTensors& file, std::optional<Dtype> dtype) {
  std::vector<CapturedLayer> layers;
  for (const auto& [number, prefix] : prefixes(file)) {
    const auto q = shape4(file, prefix + "q"), k = shape4(file, prefix + "k"),
               v = shape4(file, prefix + "v");
    SAGE_CHECK(k[0] == q[0] && k[3] == q[3] && q[1] % k[1] == 0,
               file.path() << ": \"" << prefix << "q\" is "
                           << file.tensors().at(prefix + "q").show() << " and \"" << prefix
                           << "k\" is " << file.tensors().at(prefix + "k").show()
                           << "; expected the same b and d, and q heads a multiple of k heads");
    expect_shape(file, prefix + "v", {k[0], k[1], k[2], v[3]});
    expect_shape(file, prefix + "dout", {q[0], q[1], q[2], v[3]});
    CapturedLayer layer;
    layer.prefix = prefix;
    spec::AttnCase& c = layer.shape;
    c.b = q[0], c.h = q[1], c.hk = k[1], c.nq = q[2], c.nk = k[2], c.d = q[3];
    c.dv = v[3] == q[3] ? 0 : v[3];
    c.dtype = file.dtype(prefix + "q");
    for (const char* t : kTensors) {
      const Dtype found = file.dtype(prefix + t);
      SAGE_CHECK(dtype || found == c.dtype,
                 file.path() << ": \"" << prefix << t << "\" is " << dtype_name(found)
                             << " but q is " << dtype_name(c.dtype) << "; choose one with --dtype");
    }
    if (dtype) c.dtype = *dtype;
    const auto about = file.metadata().find(prefix + "attention");
    if (about == file.metadata().end()) {
      layers.push_back(std::move(layer));
      continue;
    }
    const std::string where = file.path() + ": metadata \"" + about->first + "\"";
    for (CapturedLayer& part : described(std::move(layer), about->second, where))
      layers.push_back(std::move(part));
  }
  SAGE_CHECK(!layers.empty(),
             file.path() << ": expected tensors q, k, v and dout, or layer.<N>.q and so on; found "
                         << (file.tensors().empty() ? "none"
                                                    : "only others, such as \"" +
                                                          file.tensors().begin()->first + "\""));
  return layers;
}

trace::Inputs read_layer(const SafeTensors& file, const CapturedLayer& layer) {
  const auto read = [&](const char* name, int64_t first, int64_t n, int64_t d) {
    return tokens_of(file, layer.prefix + name, first, n, d);
  };
  const spec::AttnCase& c = layer.shape;
  trace::Inputs in{
      read("q", layer.first_q, c.nq, c.d), read("dout", layer.first_q, c.nq, c.value_dim()),
      read("k", layer.first_k, c.nk, c.d), read("v", layer.first_k, c.nk, c.value_dim())};
  with_dtype(layer.shape.dtype, [&](auto tag) {
    for (auto* x : {&in.q, &in.dout, &in.k, &in.v})
      for (float& value : *x) value = to_float(from_float<decltype(tag)>(value));
  });
  return in;
}

}  // namespace sagebwd::cli
