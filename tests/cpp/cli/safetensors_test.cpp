// SPDX-License-Identifier: Apache-2.0
// The file is not trusted: every malformed one must end in an Error that says what is wrong.
#include "safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "captured.h"
#include "sagebwd/error.h"

namespace sagebwd::cli {
namespace {

class SanitizeSafeTensors : public ::testing::Test {
 protected:
  ~SanitizeSafeTensors() override { std::filesystem::remove(path_); }

  /// A file with this header text, `data` zero bytes, and a header length that may lie.
  const std::string& file(const std::string& header, size_t data, int64_t length = -1) {
    std::ofstream out(path_, std::ios::binary);
    const uint64_t n = length < 0 ? header.size() : static_cast<uint64_t>(length);
    for (int i = 0; i < 8; ++i) out.put(static_cast<char>(n >> (8 * i) & 0xff));
    out << header << std::string(data, '\0');
    return path_;
  }
  const std::string& raw(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    return path_;
  }

  std::string error_of(const std::string& path) {
    try {
      SafeTensors opened(path);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::invalid_argument);
      EXPECT_EQ(std::string(e.what()).rfind(path, 0), 0u) << "must name the file: " << e.what();
      return e.what();
    }
    return "";
  }
  void expect_error(const std::string& path, const std::string& part) {
    EXPECT_NE(error_of(path).find(part), std::string::npos) << error_of(path);
  }

  std::string path_ = (std::filesystem::temp_directory_path() /
                       ("sagebwd_test_" + std::to_string(getpid()) + ".safetensors"))
                          .string();
};

TEST_F(SanitizeSafeTensors, ReadsTensorsOfThreeTypes) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                             R"("b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]},)"
                             R"("c":{"dtype":"F16","shape":[],"data_offsets":[12,14]},)"
                             R"("__metadata__":{"who":"test"}})";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size() & 0xff),
  bytes[1] = static_cast<char>(header.size() >> 8);
  const float a[2] = {1.5f, -2.0f};
  const uint16_t b[2] = {0x3f80, 0xc000}, c = 0x3800;  // bf16 1, -2; f16 0.5
  std::string data(14, '\0');
  std::memcpy(data.data(), a, 8), std::memcpy(data.data() + 8, b, 4),
      std::memcpy(data.data() + 12, &c, 2);
  const SafeTensors opened(raw(bytes + header + data));
  EXPECT_EQ(opened.tensors().size(), 3u);
  EXPECT_EQ(opened.read("a"), (std::vector<float>{1.5f, -2.0f}));
  EXPECT_EQ(opened.read("b"), (std::vector<float>{1.0f, -2.0f}));
  EXPECT_EQ(opened.read("c"), std::vector<float>{0.5f});
  EXPECT_THROW(opened.read("d"), Error);
}

TEST_F(SanitizeSafeTensors, RefusesWhatIsNoFile) {
  expect_error("/nonexistent/x.safetensors", "cannot be opened");
  expect_error(std::filesystem::temp_directory_path().string(), "cannot be read");
  expect_error(raw(""), "only 0 bytes");
  expect_error(raw("1234567"), "only 7 bytes");
}

TEST_F(SanitizeSafeTensors, RefusesBadHeaderLengths) {
  expect_error(file("{}", 0, 1000), "truncated");
  expect_error(file("{}", 0, 100'000'001), "above the limit");
  expect_error(raw(std::string(8, '\xff') + "{}"), "above the limit");
}

TEST_F(SanitizeSafeTensors, RefusesBadHeaders) {
  expect_error(file("", 0), "not valid JSON");
  expect_error(file("{\"a\":", 0), "not valid JSON");
  expect_error(file("[1,2]", 0), "JSON object");
  expect_error(file(R"({"a":7})", 0), "expected an object");
  expect_error(file(R"({"a":{"dtype":"F32","shape":[1]}})", 4), "expected an object");
  expect_error(file(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4),
               "whole number");
  expect_error(file(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4),
               "whole number");
  expect_error(file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", 4),
               "whole number");
  expect_error(file(R"({"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})", 4),
               "unknown dtype");
  expect_error(file(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                    R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                    2),
               "listed twice");
  expect_error(file(std::string(100000, '['), 0), "not valid JSON");
}

TEST_F(SanitizeSafeTensors, RefusesBadOffsets) {
  const auto one = [](const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  expect_error(file(one("[2]", "[0,8]"), 4), "outside the 4 bytes");
  expect_error(file(one("[1]", "[4,0]"), 4), "outside");
  expect_error(file(one("[2]", "[0,4]"), 4), "takes 8 bytes");
  expect_error(file(one("[4294967296,4294967296,4294967296]", "[0,4]"), 4), "too large");
  expect_error(file(one("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4), "at most 8 dimensions");
  expect_error(file(one("[1]", "[4,8]"), 8), "gap");
  expect_error(file(one("[1]", "[0,4]"), 6), "belong to none");
  expect_error(file(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                    R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                    8),
               "overlaps");
}

/// Header of a layer with four tensors of these shapes and types, and the bytes it needs.
std::pair<std::string, size_t> layer_header(
    const std::vector<std::array<std::string, 3>>& tensors) {
  std::string header;
  size_t at = 0;
  for (const auto& [name, dtype, shape] : tensors) {
    size_t bytes = dtype == "F32" ? 4 : 2, number = 0;
    for (char c : shape) {
      if (c >= '0' && c <= '9')
        number = number * 10 + static_cast<size_t>(c - '0');
      else if (number > 0)
        bytes *= number, number = 0;
    }
    header += (header.empty() ? "{\"" : ",\"") + name + R"(":{"dtype":")" + dtype +
              R"(","shape":)" + shape + R"(,"data_offsets":[)" + std::to_string(at) + "," +
              std::to_string(at + bytes) + "]}";
    at += bytes;
  }
  return {header + "}", at};
}

TEST_F(SanitizeSafeTensors, FindsLayersInOrder) {
  std::vector<std::array<std::string, 3>> tensors;
  for (const char* n : {"10", "2"})
    for (const char* t : {"q", "dout", "k", "v"})
      tensors.push_back({std::string("layer.") + n + "." + t, "BF16",
                         *t == 'q' || *t == 'd' ? "[1,4,8,16]" : "[1,2,8,16]"});
  tensors.push_back({"layer.2.o", "F32", "[3]"});  // others are left alone
  const auto [header, bytes] = layer_header(tensors);
  const SafeTensors opened(file(header, bytes));
  const auto layers = find_layers(opened, std::nullopt);
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[0].label(), "layer.2");
  EXPECT_EQ(layers[1].label(), "layer.10");
  EXPECT_EQ(layers[0].shape.to_string(), "b1 h4 hk2 nq8 nk8 d16 full bf16 vectorwise bhsd seed1");
  EXPECT_EQ(read_layer(opened, layers[0]).k.size(), 2u * 8 * 16);
}

TEST_F(SanitizeSafeTensors, ValuesMayHaveTheirOwnHeadDim) {
  const auto [header, bytes] = layer_header({{"q", "F32", "[4,8,16]"},
                                             {"k", "F32", "[2,9,16]"},
                                             {"v", "F32", "[2,9,24]"},
                                             {"dout", "F32", "[4,8,24]"}});
  const SafeTensors opened(file(header, bytes));
  const auto layers = find_layers(opened, std::nullopt);
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_EQ(layers[0].shape.value_dim(), 24);
  const trace::Inputs in = read_layer(opened, layers[0]);
  EXPECT_EQ(in.k.size(), 2u * 9 * 16);
  EXPECT_EQ(in.v.size(), 2u * 9 * 24);
  EXPECT_EQ(in.dout.size(), 4u * 8 * 24);
}

/// Four tensors [2, 6, 8] in FP16 and what the metadata says about them.
std::string described(const std::string& about) {
  std::string header = R"({"__metadata__":{"attention":")";
  for (char c : about) header += (c == '"' ? "\\" : "") + std::string(1, c);
  header += "\"}";
  int at = 0;
  for (const char* name : {"q", "k", "v", "dout"}) {
    header += ",\"" + std::string(name) + R"(":{"dtype":"F16","shape":[2,6,8],"data_offsets":[)" +
              std::to_string(at) + "," + std::to_string(at + 192) + "]}";
    at += 192;
  }
  return header + "}";
}

TEST_F(SanitizeSafeTensors, ReadsWhatWasComputed) {
  const SafeTensors opened(
      file(described(R"({"causal":true,"align":"top_left","window":[3,-1],"softmax_scale":0.25,)"
                     R"("cu_seqlens_q":[0,2,2,6],"cu_seqlens_k":[0,3,3,6]})"),
           768));
  const auto layers = find_layers(opened, std::nullopt);
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[1].label(), "captured document 2");
  EXPECT_EQ(layers[1].first_q, 2);
  EXPECT_EQ(layers[1].first_k, 3);
  const spec::AttnCase& c = layers[1].shape;
  EXPECT_TRUE(layers[1].described);
  EXPECT_EQ(c.nq, 4);
  EXPECT_EQ(c.nk, 3);
  EXPECT_TRUE(c.mask.causal);
  EXPECT_EQ(c.mask.align, Align::top_left);
  EXPECT_EQ(c.mask.window_left, 3);
  EXPECT_EQ(c.mask.window_right, -1);
  EXPECT_EQ(c.scale, 0.25f);
  const trace::Inputs in = read_layer(opened, layers[1]);
  EXPECT_EQ(in.q.size(), 2u * 4 * 8);
  EXPECT_EQ(in.k.size(), 2u * 3 * 8);
}

TEST_F(SanitizeSafeTensors, RefusesWrongDescriptions) {
  const std::string good = R"("causal":true,"align":"top_left","window":[3,-1],"softmax_scale":1)";
  const auto offsets = [](const char* q, const char* k) {
    return std::string(R"("causal":true,"align":"top_left","window":[3,-1],"softmax_scale":1,)") +
           "\"cu_seqlens_q\":" + q + ",\"cu_seqlens_k\":" + k;
  };
  for (
      const auto& [about, part] : std::vector<std::pair<std::string, std::string>>{
          {"oh", "JSON object"},
          {"[]", "JSON object"},
          {"{" + good + R"(,"bias":1})", "\"bias\" is unknown"},
          {R"({"causal":true,"align":"top_left","window":[3,-1]})", "\"softmax_scale\" is missing"},
          {R"({"causal":1,"align":"top_left","window":[3,-1],"softmax_scale":1})", "causal"},
          {R"({"causal":true,"align":"middle","window":[3,-1],"softmax_scale":1})", "align"},
          {R"({"causal":true,"align":"top_left","window":[3.5,-1],"softmax_scale":1})", "window"},
          {R"({"causal":true,"align":"top_left","window":[-2,-1],"softmax_scale":1})", "window"},
          {R"({"causal":true,"align":"top_left","window":[18446744073709551615,-1],"softmax_scale":1})",
           "window"},
          {R"({"causal":true,"align":"top_left","window":3,"softmax_scale":1})", "window"},
          {R"({"causal":true,"align":"top_left","window":[3,-1],"softmax_scale":1e-60})", "scale"},
          {R"({"causal":true,"align":"top_left","window":[3,-1],"softmax_scale":"1"})", "scale"},
          {"{" + offsets("[0,6]", "[0,7]") + "}", "end at the 6 tokens"},
          {"{" + offsets("[1,6]", "[0,6]") + "}", "from 0"},
          {"{" + offsets("[0,4,3,6]", "[0,4,3,6]") + "}", "do not decrease"},
          {"{" + offsets("[0,6]", "[0,3,6]") + "}", "as many offsets"},
          {"{" + offsets("[]", "[]") + "}", "array of offsets"},
          {"{" + good + R"(,"cu_seqlens_q":[0,6]})", "or neither"}}) {
    const SafeTensors opened(file(described(about), 768));
    try {
      find_layers(opened, std::nullopt);
      ADD_FAILURE() << "accepted " << about;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
      EXPECT_EQ(std::string(e.what()).rfind(path_, 0), 0u) << "must name the file: " << e.what();
    }
  }
  expect_error(file(R"({"__metadata__":{"a":1}})", 0), "to be text");
  expect_error(file(R"({"__metadata__":3})", 0), "metadata");
}

TEST_F(SanitizeSafeTensors, RefusesLayersThatDoNotFit) {
  const auto complaint =
      [&](const std::vector<std::array<std::string, 3>>& tensors) -> std::string {
    const auto [header, bytes] = layer_header(tensors);
    try {
      find_layers(SafeTensors(file(header, bytes)), std::nullopt);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const std::string s = "[2,8,16]";
  EXPECT_EQ(complaint({{"q", "F32", s}, {"k", "F32", s}, {"v", "F32", s}, {"dout", "F32", s}}), "");
  expect(complaint({{"q", "F32", s}, {"k", "F32", s}, {"v", "F32", s}}), "\"dout\" is missing");
  expect(complaint({{"weight", "F32", s}}), "expected tensors q, k, v and dout");
  expect(complaint({{"q", "I16", s}, {"k", "F32", s}, {"v", "F32", s}, {"dout", "F32", s}}),
         "expected dtype F32, BF16 or F16, got I16");
  expect(complaint({{"q", "F32", s}, {"k", "F16", s}, {"v", "F32", s}, {"dout", "F32", s}}),
         "choose one with --dtype");
  expect(complaint({{"q", "F32", "[8,16]"}, {"k", "F32", s}, {"v", "F32", s}, {"dout", "F32", s}}),
         "expected shape [h, n, d]");
  expect(complaint({{"q", "F32", s}, {"k", "F32", "[2,8,8]"}, {"v", "F32", s}, {"dout", "F32", s}}),
         "same b and d");
  expect(
      complaint({{"q", "F32", s}, {"k", "F32", s}, {"v", "F32", "[2,4,16]"}, {"dout", "F32", s}}),
      "to match the others");
  expect(complaint({{"q", "F32", s}, {"k", "F32", s}, {"v", "F32", "[2,8,8]"}, {"dout", "F32", s}}),
         "expected [1, 2, 8, 8] to match the others");
  expect(complaint({{"layer.x.q", "F32", s}}), "expected a layer number");
}

}  // namespace
}  // namespace sagebwd::cli
