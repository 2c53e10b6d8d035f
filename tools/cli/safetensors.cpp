// SPDX-License-Identifier: Apache-2.0
#include "safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.h"
#include "base/dispatch_dtype.h"
#include "memory.h"

namespace sagebwd::cli {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;  // the bound of the reference implementation
constexpr size_t kMaxRank = 8;

struct DtypeName {
  const char* name;
  uint64_t size;
};
constexpr DtypeName kDtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
    {"U32", 4},  {"F32", 4}, {"F64", 8}, {"I64", 8},     {"U64", 8},
};

uint64_t size_of(const std::string& dtype, const std::string& where) {
  for (const DtypeName& d : kDtypes)
    if (dtype == d.name) return d.size;
  SAGE_THROW(ErrorKind::invalid_argument, where << ": unknown dtype \"" << dtype << "\"");
}

/// Parses the header and refuses names that occur twice, which the JSON library would merge
/// silently.
json parse_header(const std::string& text, const std::string& path) {
  std::set<std::string> names;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1)
      SAGE_CHECK(names.insert(parsed.get<std::string>()).second,
                 path << ": tensor " << parsed << " is listed twice");
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::exception&) {
    SAGE_THROW(ErrorKind::invalid_argument, path << ": the header is not valid JSON");
  }
}

uint64_t whole_number(const json& value, const std::string& where, const char* what) {
  SAGE_CHECK(value.is_number_unsigned(),
             where << ": expected " << what << " to be a whole number, got " << value);
  return value.get<uint64_t>();
}

TensorInfo parse_tensor(const json& entry, const std::string& where, uint64_t data_size) {
  SAGE_CHECK(entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string() &&
                 entry.contains("shape") && entry["shape"].is_array() &&
                 entry.contains("data_offsets") && entry["data_offsets"].is_array() &&
                 entry["data_offsets"].size() == 2,
             where << ": expected an object with dtype, shape and two data_offsets");
  TensorInfo t;
  t.dtype = entry["dtype"].get<std::string>();
  uint64_t bytes = size_of(t.dtype, where);
  SAGE_CHECK(entry["shape"].size() <= kMaxRank, where << ": expected at most " << kMaxRank
                                                      << " dimensions, got "
                                                      << entry["shape"].size());
  for (const json& n : entry["shape"]) {
    const uint64_t size = whole_number(n, where, "a size of the shape");
    SAGE_CHECK(size == 0 || bytes <= std::numeric_limits<int64_t>::max() / size,
               where << ": the shape is too large");
    bytes *= size;
    t.shape.push_back(static_cast<int64_t>(size));
  }
  t.begin = whole_number(entry["data_offsets"][0], where, "an offset");
  t.end = whole_number(entry["data_offsets"][1], where, "an offset");
  SAGE_CHECK(t.begin <= t.end && t.end <= data_size, where << ": offsets " << t.begin << " to "
                                                           << t.end << " lie outside the "
                                                           << data_size << " bytes of data");
  SAGE_CHECK(t.end - t.begin == bytes, where << ": " << t.show() << " takes " << bytes
                                             << " bytes, but its offsets span " << t.end - t.begin);
  return t;
}

std::map<std::string, std::string> parse_metadata(const json& entry, const std::string& path) {
  SAGE_CHECK(entry.is_object(), path << ": expected the metadata to be a JSON object");
  std::map<std::string, std::string> metadata;
  for (const auto& [name, text] : entry.items()) {
    SAGE_CHECK(text.is_string(), path << ": expected the metadata \"" << name << "\" to be text");
    metadata[name] = text.get<std::string>();
  }
  return metadata;
}

void check_coverage(const std::map<std::string, TensorInfo>& tensors, uint64_t data_size,
                    const std::string& path) {
  std::vector<std::pair<const TensorInfo*, const std::string*>> order;
  for (const auto& [name, t] : tensors) order.push_back({&t, &name});
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
  });
  uint64_t at = 0;
  for (const auto& [t, name] : order) {
    SAGE_CHECK(t->begin == at,
               path << ": tensor \"" << *name << "\" starts at byte " << t->begin
                    << (t->begin < at ? " and overlaps the one before it, which ends at "
                                      : " and leaves a gap after the one before it, which ends at ")
                    << at);
    at = t->end;
  }
  SAGE_CHECK(at == data_size,
             path << ": " << data_size - at << " bytes after the last tensor belong to none");
}

}  // namespace

std::string TensorInfo::show() const {
  std::string s = dtype + " [";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

SafeTensors::SafeTensors(const std::string& path) : path_(path), file_(path, std::ios::binary) {
  SAGE_CHECK(file_.is_open(), path << ": cannot be opened");
  file_.seekg(0, std::ios::end);
  const std::streamoff length = file_.tellg();
  SAGE_CHECK(file_.good() && length >= 0, path << ": cannot be read");
  const auto file_size = static_cast<uint64_t>(length);
  SAGE_CHECK(file_size >= 8,
             path << ": not a safetensors file, only " << file_size << " bytes long");

  unsigned char prefix[8];
  file_.seekg(0);
  file_.read(reinterpret_cast<char*>(prefix), sizeof(prefix));
  SAGE_CHECK(file_.good(), path << ": cannot be read");
  uint64_t header_size = 0;
  for (int i = 7; i >= 0; --i) header_size = header_size << 8 | prefix[i];
  SAGE_CHECK(header_size <= kMaxHeader, path << ": a header of " << header_size
                                             << " bytes is above the limit of " << kMaxHeader
                                             << "; not a safetensors file?");
  SAGE_CHECK(header_size <= file_size - 8, path << ": truncated, the header needs " << header_size
                                                << " bytes and " << file_size - 8 << " are left");
  std::string text(header_size, '\0');
  file_.read(text.data(), static_cast<std::streamsize>(header_size));
  SAGE_CHECK(file_.good(), path << ": cannot be read");

  data_begin_ = 8 + header_size;
  const uint64_t data_size = file_size - data_begin_;
  const json header = parse_header(text, path);
  SAGE_CHECK(header.is_object(), path << ": expected the header to be a JSON object");
  for (const auto& [name, entry] : header.items())
    if (name == "__metadata__")
      metadata_ = parse_metadata(entry, path);
    else
      tensors_[name] = parse_tensor(entry, path + ": tensor \"" + name + "\"", data_size);
  check_coverage(tensors_, data_size, path);
}

const TensorInfo& SafeTensors::find(const std::string& name) const {
  const auto it = tensors_.find(name);
  SAGE_CHECK(it != tensors_.end(), path_ << ": tensor \"" << name << "\" is missing");
  return it->second;
}

Dtype SafeTensors::dtype(const std::string& name) const {
  const std::string& dtype = find(name).dtype;
  if (dtype == "F32") return Dtype::f32;
  if (dtype == "BF16") return Dtype::bf16;
  if (dtype == "F16") return Dtype::f16;
  SAGE_THROW(ErrorKind::invalid_argument, path_ << ": tensor \"" << name
                                                << "\": expected dtype F32, BF16 or F16, got "
                                                << dtype);
}

std::vector<float> SafeTensors::read(const std::string& name) const {
  const TensorInfo& t = find(name);
  const Dtype type = dtype(name);
  check_memory(
      path_ + ": tensor \"" + name + "\"",
      static_cast<double>(t.end - t.begin) * (1.0 + 4.0 / static_cast<double>(dtype_size(type))));
  std::vector<char> bytes(t.end - t.begin);
  file_.clear();
  file_.seekg(static_cast<std::streamoff>(data_begin_ + t.begin));
  file_.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  SAGE_CHECK(file_.good(), path_ << ": tensor \"" << name << "\" cannot be read");
  std::vector<float> values(bytes.size() / static_cast<size_t>(dtype_size(type)));
  with_dtype(type, [&](auto tag) {
    using T = decltype(tag);
    for (size_t i = 0; i < values.size(); ++i) {
      T x;
      std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
      values[i] = to_float(x);
    }
  });
  return values;
}

}  // namespace sagebwd::cli
