// SPDX-License-Identifier: Apache-2.0
// Packed batches whose offsets are on the device: the same bits as with offsets on the host, and
// nothing out of bounds whatever the offsets say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "device_case.h"

namespace sagebwd::gpu {
namespace {

DeviceCase packed(const std::string& text, std::vector<int32_t> cu_q, std::vector<int32_t> cu_k) {
  DeviceCase dc(text);
  dc.cu_q = std::move(cu_q), dc.cu_k = std::move(cu_k);
  return dc;
}

/// Offsets as the device takes them.
std::vector<int32_t> in_order(std::vector<int32_t> cu, int64_t total) {
  int32_t last = 0;
  for (int32_t& x : cu) last = x = std::max(last, std::clamp(x, 0, static_cast<int32_t>(total)));
  return cu;
}

/// The same documents in a form that passes the host's checks: tokens of no document become
/// documents without keys or without queries.
DeviceCase covered(DeviceCase dc) {
  std::vector<int32_t> q = in_order(dc.cu_q, dc.c.nq), k = in_order(dc.cu_k, dc.c.nk);
  // 0 … q[0] without keys, 0 … k[0] without queries, the documents, and the same behind them.
  const auto nq = static_cast<int32_t>(dc.c.nq), nk = static_cast<int32_t>(dc.c.nk);
  q.insert(q.begin(), {0, q[0]}), k.insert(k.begin(), {0, 0});
  q.push_back(nq), k.push_back(k.back());
  q.push_back(nq), k.push_back(nk);
  dc.cu_q = q, dc.cu_k = k;
  return dc;
}

void expect_same_as_host(DeviceCase dc) {
  SCOPED_TRACE(dc.c.to_string());
  const CaseInputs in = make_case_inputs(dc);
  for (bool deterministic : {true, false}) {
    dc.deterministic = deterministic, dc.cu_on_device = true;
    Results got = run_on_device(dc, in);
    dc.cu_on_device = false;
    Results want = run_on_device(covered(dc), in);
    // Largest logits of the documents alone.
    want.max_logit.erase(want.max_logit.begin(), want.max_logit.begin() + 2 * dc.c.h);
    want.max_logit.resize(got.max_logit.size());
    EXPECT_LE(relative_error(got.dq, want.dq), deterministic ? 0.0 : 1e-3);
    got.dq.clear(), want.dq.clear();
    EXPECT_TRUE(got == want) << relative_error(got.o, want.o) << " "
                             << relative_error(got.dk, want.dk) << " "
                             << relative_error(got.dv, want.dv);
  }
}

TEST(GpuDocuments, OffsetsOnTheDevice) {
  NEED_DEVICE();
  for (const char* text : {"h2 nq700 nk650 d64 causal", "h4 hk2 nq700 nk650 d128",
                           "h2 nq700 nk650 d128 paper f16", "h2 nq700 nk650 d40 bshd"})
    expect_same_as_host(
        packed(text, {0, 0, 130, 131, 131, 400, 700}, {0, 5, 200, 200, 207, 500, 650}));
}

TEST(GpuSanitized, OffsetsOnTheDevice) {
  NEED_DEVICE();
  for (const char* text : {"h2 nq150 nk140 d64 causal", "h2 nq150 nk140 d128"})
    expect_same_as_host(packed(text, {0, 9, 70, 120}, {0, 0, 99, 130}));
}

TEST(GpuDocuments, MoreThanATableHoldsAtATime) {
  NEED_DEVICE();
  std::vector<int32_t> cu;
  for (int i = 0; i <= 2500; ++i) cu.push_back(i < 1000 ? 2 * i : i < 1100 ? 2000 : i + 900);
  expect_same_as_host(packed("h1 n3400 d64 causal", cu, cu));
}

TEST(GpuDocuments, AnyOffsetsAreHarmless) {
  NEED_DEVICE();
  using Offsets = std::vector<int32_t>;
  for (const char* text : {"h2 nq300 nk280 d64 causal", "h2 nq300 nk280 d128",
                           "h2 nq300 nk280 d64 paper", "h2 nq300 nk280 d64"}) {
    expect_same_as_host(packed(text, Offsets{0, 100, 250}, Offsets{0, 100, 200}));   // a rest
    expect_same_as_host(packed(text, Offsets{40, 100, 250}, Offsets{7, 100, 200}));  // a beginning
    expect_same_as_host(packed(text, Offsets{0, 200, 100}, Offsets{0, 250, 3}));     // falling
    expect_same_as_host(packed(text, Offsets{-5, 1 << 30, 20}, Offsets{0, -(1 << 30), 1 << 30}));
    expect_same_as_host(packed(text, Offsets{300, 300}, Offsets{280, 280}));  // nothing at all
  }
}

}  // namespace
}  // namespace sagebwd::gpu
