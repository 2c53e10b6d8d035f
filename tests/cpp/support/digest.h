// SPDX-License-Identifier: Apache-2.0
// Bits of results, one line a problem, for changes that must not alter numbers: write a file before
// the change and one after it, and compare them (`diff`).
//
//   SAGEBWD_DIGEST=before.txt sagebwd_tests --gtest_filter='Digest*'      # on the CPU
//   SAGEBWD_DIGEST=before.txt gpu_tests --gtest_filter='GpuDigest*'       # on a GPU, or
//   emulated_tests
//
// SAGEBWD_DIGEST_CASES sets how many problems (200). A problem is a pure function of its number.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <type_traits>
#include <vector>

#include "support/random.h"

namespace sagebwd::testing {

struct DigestCase {
  std::string text;                 // the case string
  std::vector<int32_t> cu_q, cu_k;  // documents; empty: not packed
  bool dlse = false;
};

inline DigestCase digest_case(int64_t number) {
  Random r(0xd16e57 + static_cast<uint64_t>(number));
  const auto length = [&] {
    return r.chance(0.5) ? 64 * r.integer(1, 6) + r.integer(-2, 2) : r.integer(1, 400);
  };
  const auto word = [](const char* name, int64_t value) {
    return " " + std::string(name) + std::to_string(value);
  };
  const bool packed = r.chance(0.2);
  const int64_t hk = r.integer(1, 2), nq = length(), nk = r.chance(0.5) ? nq : length(),
                d = r.chance(0.7) ? (r.chance(0.5) ? 64 : 128) : 8 * r.integer(1, 20);
  const bool lists = !packed && r.chance(0.15);
  DigestCase out;
  out.text = "b" + std::to_string(packed ? 1 : r.integer(1, 2)) + word("h", hk * r.integer(1, 2)) +
             word("hk", hk) + word("nq", nq) + word("nk", nk) + word("d", d);
  if (r.chance(0.1)) out.text += word("dv=", 8 * r.integer(1, 16));
  out.text += r.chance(0.5) ? " causal" : " full";
  if (r.chance(0.15)) out.text += word("window=", r.integer(0, 150)) + ",-1";
  out.text += r.chance(0.7) ? " bf16" : r.chance(0.7) ? " f16" : " f32";
  out.text += r.chance(0.3) ? (r.chance(0.25) ? " paper smooth_q=on" : " paper") : " vectorwise";
  out.text += r.chance(0.5) ? " bshd" : " bhsd";
  out.text += word("seed", number);
  if (r.chance(0.1)) out.text += " softcap=10";
  if (r.chance(0.1)) out.text += r.chance(0.5) ? " rounding=dither:dQ" : " rounding=dither";
  if (r.chance(0.1)) out.text += " smooth_k=off";
  if (r.chance(0.08))
    out.text += r.pick(std::vector<std::string>{" lift=dK", " lift=O", " lift=dQ,dK", " lift=S"});
  if (lists) out.text += " keep=1 blocks=128x64 lists=random";
  if (packed) {
    const auto cuts = [&](int64_t n) {
      const auto first = static_cast<int32_t>(r.integer(0, n));
      return std::vector<int32_t>{0, first, static_cast<int32_t>(r.integer(first, n)),
                                  static_cast<int32_t>(n)};
    };
    out.cu_q = cuts(nq), out.cu_k = cuts(nk);
  }
  out.dlse = r.chance(0.2);
  return out;
}

/// The bits of some numbers as one.
template <typename T>
uint64_t digest_of(const std::vector<T>& numbers) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint8_t>>;
  uint64_t h = 0;
  for (T value : numbers) h = mix64(h ^ static_cast<uint64_t>(std::bit_cast<Bits>(value)));
  return h;
}

/// The file of SAGEBWD_DIGEST, one line a problem. All tests of a run write to one file.
class DigestFile {
 public:
  bool wanted() const { return path() != nullptr && *path() != '\0'; }
  int64_t count() const {
    const char* text = std::getenv("SAGEBWD_DIGEST_CASES");
    return text != nullptr ? std::strtoll(text, nullptr, 10) : 200;
  }
  template <typename... Numbers>
  void line(const std::string& text, const Numbers&... results) {
    std::ofstream& file = stream();
    file << text << " |" << std::hex;
    ((file << ' ' << digest_of(results)), ...);
    file << std::dec << std::endl;
  }
  /// `results` has o, lse, max_logit, dq, dk and dv.
  template <typename Results>
  void write(const std::string& implementation, const DigestCase& c, const Results& results) {
    line(implementation + " | " + c.text + (c.cu_q.empty() ? "" : " packed") +
             (c.dlse ? " dlse" : ""),
         results.o, results.lse, results.max_logit, results.dq, results.dk, results.dv);
  }

 private:
  static std::ofstream& stream() {
    static std::ofstream file(path());
    return file;
  }
  static const char* path() { return std::getenv("SAGEBWD_DIGEST"); }
};

}  // namespace sagebwd::testing
