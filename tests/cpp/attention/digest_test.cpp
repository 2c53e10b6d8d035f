// SPDX-License-Identifier: Apache-2.0
#include "support/digest.h"

#include <gtest/gtest.h>

#include "support/attention_problem.h"
#include "support/implementations.h"

namespace sagebwd::testing {
namespace {

TEST(Digest, Bits) {
  DigestFile file;
  if (!file.wanted()) GTEST_SKIP() << "SAGEBWD_DIGEST names no file";
  for (int64_t number = 0; number < file.count(); ++number) {
    const DigestCase c = digest_case(number);
    AttentionProblem p = make_problem(c.text);
    p.cu_q = c.cu_q, p.cu_k = c.cu_k;
    if (c.dlse) p.dlse = random_rows(p, static_cast<uint64_t>(number));
    if (p.c.has_lists()) p.make_lists();
    for (const std::string& name : all_implementations()) {
      const dispatch::Implementation& impl = implementation(name);
      if (unavailable(impl).empty()) file.write(name, c, run(impl, p));
    }
  }
}

}  // namespace
}  // namespace sagebwd::testing
