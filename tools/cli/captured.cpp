// SPDX-License-Identifier: Apache-2.0
#include "captured.h"

#include <array>
#include <charconv>
#include <map>

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

}  // namespace

std::vector<CapturedLayer> find_layers(const SafeTensors& file, std::optional<Dtype> dtype) {
  std::vector<CapturedLayer> layers;
  for (const auto& [number, prefix] : prefixes(file)) {
    const auto q = shape4(file, prefix + "q"), k = shape4(file, prefix + "k");
    SAGE_CHECK(k[0] == q[0] && k[3] == q[3] && q[1] % k[1] == 0,
               file.path() << ": \"" << prefix << "q\" is "
                           << file.tensors().at(prefix + "q").show() << " and \"" << prefix
                           << "k\" is " << file.tensors().at(prefix + "k").show()
                           << "; expected the same b and d, and q heads a multiple of k heads");
    expect_shape(file, prefix + "v", k);
    expect_shape(file, prefix + "dout", q);
    CapturedLayer layer{prefix, {}};
    spec::AttnCase& c = layer.shape;
    c.b = q[0], c.h = q[1], c.hk = k[1], c.nq = q[2], c.nk = k[2], c.d = q[3];
    c.dtype = file.dtype(prefix + "q");
    for (const char* t : kTensors) {
      const Dtype found = file.dtype(prefix + t);
      SAGE_CHECK(dtype || found == c.dtype,
                 file.path() << ": \"" << prefix << t << "\" is " << dtype_name(found)
                             << " but q is " << dtype_name(c.dtype) << "; choose one with --dtype");
    }
    if (dtype) c.dtype = *dtype;
    layers.push_back(std::move(layer));
  }
  SAGE_CHECK(!layers.empty(),
             file.path() << ": expected tensors q, k, v and dout, or layer.<N>.q and so on; found "
                         << (file.tensors().empty() ? "none"
                                                    : "only others, such as \"" +
                                                          file.tensors().begin()->first + "\""));
  return layers;
}

trace::Inputs read_layer(const SafeTensors& file, const CapturedLayer& layer) {
  trace::Inputs in{file.read(layer.prefix + "q"), file.read(layer.prefix + "dout"),
                   file.read(layer.prefix + "k"), file.read(layer.prefix + "v")};
  with_dtype(layer.shape.dtype, [&](auto tag) {
    for (auto* x : {&in.q, &in.dout, &in.k, &in.v})
      for (float& value : *x) value = to_float(from_float<decltype(tag)>(value));
  });
  return in;
}

}  // namespace sagebwd::cli
