// SPDX-License-Identifier: Apache-2.0
// The operands of cuda-sm90 by themselves: codes that its forward saves, against those of the
// recipe oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "codes_parity.h"
#include "cuda/host/arena.h"
#include "cuda/sm90/quantize/codes.h"
#include "cuda/sm90/run.h"
#include "cuda/sm90/workspace.h"
#include "cuda/tuned/call.h"
#include "device_case.h"
#include "spec/codes.h"

namespace sagebwd::cuda::sm90 {
namespace {

using gpu::CaseInputs;
using gpu::DeviceCase;

/// 16-bit copies of the inputs, [b, h, n, d].
struct Tensors {
  std::vector<uint16_t> q, k, v, o;
  std::vector<float> lse;
  ForwardArgs args;

  Tensors(const DeviceCase& dc, const CaseInputs& in) {
    const spec::AttnCase& c = dc.c;
    const auto view = [&](std::vector<uint16_t>& to, const std::vector<float>& x, int64_t heads,
                          int64_t n) {
      to.resize(static_cast<size_t>(c.b * heads * n * c.d));
      for (size_t i = 0; i < x.size(); ++i)
        to[i] = c.dtype == Dtype::bf16 ? from_float<bf16>(x[i]).bits : from_float<f16>(x[i]).bits;
      return contiguous(to.data(), c.dtype, {c.b, heads, n, c.d});
    };
    args.device = Device::cuda;
    args.q = view(q, in.x.q, c.h, c.nq), args.k = view(k, in.x.k, c.hk, c.nk);
    args.v = view(v, in.x.v, c.hk, c.nk), args.o = view(o, {}, c.h, c.nq);
    lse.resize(static_cast<size_t>(c.b * c.h * c.nq));
    args.lse = contiguous_stats(lse.data(), c.h, c.nq);
    args.mask = c.mask, args.recipe = c.recipe;
    if (!dc.cu_q.empty())
      args.documents = {dc.cu_q.data(), dc.cu_k.data(), static_cast<int64_t>(dc.cu_q.size()) - 1};
  }
};

/// A call that saves codes, before its first kernel.
template <typename Space>
struct SavingCall {
  SavingCall(const DeviceCase& dc, const CaseInputs& in)
      : x(dc, in),
        codes(codes_size(x.args), std::byte{0x7f}),
        p(resolve(x.args, codes)),
        call(p, x.args),
        memory(size_of(p, call.plan), std::byte{0x7f}),
        arena(aligned(memory.data())),
        ws(p, call.plan, arena) {}

  static spec::Problem resolve(ForwardArgs& args, std::vector<std::byte>& codes) {
    args.codes = codes.data(), args.codes_bytes = codes.size();
    return spec::resolve(args, true);
  }
  static size_t size_of(const spec::Problem& p, const tuned::Plan& plan) {
    Arena sizes(nullptr);
    Space(p, plan, sizes);
    return sizes.used() + kDeviceAlign;
  }
  void expect_oracle_codes(const DeviceCase& dc, const CaseInputs& in) const {
    const std::vector<std::byte> want = gpu::oracle_codes(dc, in);
    const CodesLayout at = spec::codes_layout(p);
    gpu::expect_codes(codes, want, at, gpu::CodesAre::rounded);
    // Tensor cores have no part in centres.
    EXPECT_TRUE(std::equal(codes.begin() + at.centre8, codes.end(), want.begin() + at.centre8));
  }

  Tensors x;
  std::vector<std::byte> codes;
  spec::Problem p;
  tuned::Call call;
  std::vector<std::byte> memory;
  Arena arena;
  Space ws;
};

void make_operands(const SavingCall<ForwardSpace>& c) {
  c.call.start(c.ws);
  CodesJob job = codes_job(c.call, c.ws, c.ws.centre_rows, c.ws.items);
  job.v8t = c.ws.v8t, job.numbers = c.ws.numbers, job.logit_factor = c.ws.logit_factor;
  launch_codes(job, c.p.dtype, nullptr);
}

void expect_parity(const DeviceCase& dc, const CaseInputs& in) {
  SCOPED_TRACE(dc.c.to_string());
  const SavingCall<ForwardSpace> c(dc, in);
  make_operands(c);
  c.expect_oracle_codes(dc, in);
}

class HopperCodes : public testing::TestWithParam<const char*> {};

TEST_P(HopperCodes, AreTheOracles) {
  DeviceCase dc(GetParam());
  dc.kind = trace::InputKind::offset;  // centres that matter
  expect_parity(dc, gpu::make_case_inputs(dc));
}

INSTANTIATE_TEST_SUITE_P(Every, HopperCodes,
                         testing::Values("b2 h4 hk2 n256 d64 bf16", "b2 h2 hk1 n256 d128 f16",
                                         "h2 hk1 nq140 nk300 d128 bf16", "h1 nq300 nk140 d64 f16",
                                         "b3 h1 nq64 nk300 d128 bf16", "h1 nq140 nk1300 d128 bf16",
                                         "b2 h1 nq64 nk600 d64 f16", "h2 n256 d128 bf16 rotate=off",
                                         "h2 n300 d64 f16 smooth_k=off"));

// A backward without saved codes makes them, and nothing else.
TEST(HopperOperands, CodesAlone) {
  for (const char* text : {"b2 h4 hk2 nq130 nk300 d64 bf16", "h2 n256 d128 f16 rotate=off"}) {
    SCOPED_TRACE(text);
    const DeviceCase dc(text);
    const CaseInputs in = gpu::make_case_inputs(dc);
    const SavingCall<CodesSpace> c(dc, in);
    c.call.start(c.ws);
    CodesJob job = codes_job(c.call, c.ws, c.ws.centre_rows, c.ws.items);
    job.k8 = job.q8 = nullptr;
    launch_codes(job, c.p.dtype, nullptr);
    c.expect_oracle_codes(dc, in);
  }
}

// The forward looks for poison of V in the scales, also where all other tokens are zero.
TEST(HopperOperands, PoisonAmongZeros) {
  const DeviceCase dc("h1 nq64 nk300 d64 bf16");
  CaseInputs in = gpu::make_case_inputs(dc);
  std::fill(in.x.v.begin(), in.x.v.end(), 0.0f);
  const size_t bad = 150;
  in.x.v[bad * 64 + 5] = NAN;
  std::fill(in.x.v.begin() + 256 * 64, in.x.v.end(), NAN);  // the last block
  const SavingCall<ForwardSpace> c(dc, in);
  make_operands(c);
  // Within 16 tokens scales have an order of their own.
  for (size_t first = 0; first < 288; first += 16) {
    const float* scale = c.ws.numbers[first / 128].v + first % 128;
    const auto poisoned = std::count(scale, scale + 16, 0.0f);
    EXPECT_EQ(poisoned, first >= 256 ? 16 : first == bad / 16 * 16 ? 1 : 0) << first;
  }
  for (size_t block = 0; block < 3; ++block)
    EXPECT_EQ(c.ws.numbers[block].block.v_poisoned != 0, block > 0) << block;
}

TEST(HopperOperands, CodesOfDocuments) {
  for (const char* text : {"h2 hk1 nq700 nk650 d64 bf16", "h1 nq700 nk650 d128 f16"}) {
    DeviceCase dc(text);
    dc.cu_q = {0, 0, 130, 131, 131, 400, 700}, dc.cu_k = {0, 5, 200, 200, 207, 500, 650};
    expect_parity(dc, gpu::make_case_inputs(dc));
  }
}

TEST(HopperOperands, CodesOfNanAndInf) {
  for (int tensor = 0; tensor < 3; ++tensor) {
    SCOPED_TRACE(tensor);
    const DeviceCase dc("h1 n384 d128 bf16");
    CaseInputs in = gpu::make_case_inputs(dc);
    std::vector<float>& x = gpu::tensor_of(in, tensor);
    x[static_cast<size_t>(150 * dc.c.d + 5)] = NAN;
    for (int64_t i = 256; i < dc.c.nk; ++i)  // a block
      x[static_cast<size_t>(i * dc.c.d)] = INFINITY;
    expect_parity(dc, in);
  }
}

}  // namespace
}  // namespace sagebwd::cuda::sm90
