// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <ctime>
#include <fstream>

namespace sagebwd::cli {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) {
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  return "unknown";
}

std::vector<Feature> cpu_features() {
#if defined(SAGEBWD_CLI_X86)
  const auto has = [](int supported) { return supported != 0; };
  return {
      {"avx2", has(__builtin_cpu_supports("avx2"))},
      {"fma", has(__builtin_cpu_supports("fma"))},
      {"f16c", has(__builtin_cpu_supports("f16c"))},
      {"avx512f", has(__builtin_cpu_supports("avx512f"))},
      {"avx512bw", has(__builtin_cpu_supports("avx512bw"))},
      {"avx512vl", has(__builtin_cpu_supports("avx512vl"))},
      {"avx512vnni", has(__builtin_cpu_supports("avx512vnni"))},
      {"avx512bf16", has(__builtin_cpu_supports("avx512bf16"))},
      {"avxvnni", has(__builtin_cpu_supports("avxvnni"))},
      {"amx-int8", has(__builtin_cpu_supports("amx-int8"))},
  };
#else
  return {};
#endif
}

bool has_feature(const std::string& name) {
  for (const Feature& f : cpu_features())
    if (name == f.name) return f.present;
  return false;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", &utc);
  return text;
}

}  // namespace sagebwd::cli
