// SPDX-License-Identifier: Apache-2.0
// Codes of cuda-plain: what each kernel makes of a tensor against the recipe oracle, and what a
// forward saves for a backward.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "backend/implementation.h"
#include "base/math.h"
#include "codes_parity.h"
#include "cuda/plain/centres.h"
#include "cuda/plain/prepare.h"
#include "device_array.h"
#include "numerics/octaves.h"
#include "plain_case.h"
#include "ref/recipe_inputs.h"
#include "sagebwd/codes.h"

namespace sagebwd::gpu {
namespace {

/// What the kernels make of one tensor of n tokens, alone in its call.
struct QuantizedTokens {
  QuantizedTokens(const std::vector<float>& x, int d_)
      : d(d_),
        pitch(static_cast<int>(round_up(d_, 16))),
        n(static_cast<int64_t>(x.size()) / d_),
        blocks(static_cast<size_t>(ceil_div(n, 64))),
        in(x),
        scale(static_cast<size_t>(n)),
        run_mean(blocks * static_cast<size_t>(d)),
        turned_mean(blocks * static_cast<size_t>(d)),
        codes(static_cast<size_t>(n * pitch)),
        poisoned(blocks) {
    job.batch.seq.count = 1, job.batch.seq.nq = job.batch.seq.nk = n;
    job.batch.seq.q_blocks = job.batch.seq.k_blocks = static_cast<int>(blocks);
    job.batch.q_blocks = job.batch.k_blocks = static_cast<int64_t>(blocks);
    job.batch.dtype = Dtype::f32;
    job.heads = 1, job.d = d, job.pitch = pitch, job.tokens = n, job.run = 64;
    job.x = {in.data, n * d, n * d, d, false};
    job.to = {codes.data, scale.data, nullptr, poisoned.data};
  }
  void expect(const std::vector<int8_t>& want, const std::vector<float>& want_scale) {
    cuda::plain::launch_tokens(job, nullptr);
    const std::vector<int8_t> got = codes.read();
    const std::vector<float> got_scale = scale.read();
    for (int64_t i = 0; i < n; ++i) {
      const size_t row = static_cast<size_t>(i);
      ASSERT_TRUE(got_scale[row] == want_scale[row] ||
                  (std::isnan(got_scale[row]) && std::isnan(want_scale[row])))
          << "token " << i;
      for (int c = 0; c < pitch; ++c)
        ASSERT_EQ(got[static_cast<size_t>(i * pitch + c)],
                  c < d ? want[static_cast<size_t>(i * d + c)] : 0)
            << "token " << i << " channel " << c;
    }
  }
  /// `want`: a mean per run.
  void expect_means(const Array<float>& means, const std::vector<float>& want) const {
    const std::vector<float> got = means.read();
    const size_t dim = static_cast<size_t>(d);
    for (size_t b = 0; b < blocks; ++b)
      for (size_t c = 0; c < dim; ++c)
        ASSERT_EQ(got[b * dim + c], want[b * 64 / static_cast<size_t>(job.run) * dim + c]);
  }

  int d, pitch;
  int64_t n;
  size_t blocks;
  Array<float> in, scale, run_mean, turned_mean;
  Array<int8_t> codes;
  Array<int> poisoned;
  cuda::plain::TokenJob job{};
};

/// Large and small tokens, zero ones, and one with NaN.
std::vector<float> uneven_tokens(int64_t n, int d) {
  std::vector<float> x(static_cast<size_t>(n * d));
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t token = i / static_cast<size_t>(d);
    const float size = token % 17 == 3   ? 0.0f
                       : token % 31 == 4 ? 1e5f
                                         : 1.0f + static_cast<float>(i % 13);
    x[i] = std::sin(0.37f * static_cast<float>(i * i % 9973)) * size;
    if (token >= 256 && token < 384) x[i] = 0.0f;  // a block of zeros
  }
  x[static_cast<size_t>(77 * d + 3)] = NAN;
  return x;
}

/// A recipe head that has one tensor for q, k and v.
ref::RecipeHead head_of(const std::vector<float>& x, int d, const char* text) {
  ref::RecipeHead head;
  head.nq = head.nk = static_cast<int64_t>(x.size()) / d, head.d = d;
  head.q = head.k = head.v = x.data();
  head.recipe = spec::AttnCase::parse(text).recipe;
  spec::Problem problem{};
  problem.recipe = head.recipe;
  const backend::Tiles tiles = backend::any_tiles(problem, 255);
  head.recipe.tile_q = tiles.q, head.recipe.tile_k = tiles.k;
  return head;
}

TEST(Plain, CodesEqualTheOracles) {
  NEED_DEVICE();
  using cuda::plain::ScaleOf;
  for (int d : {8, 40, 72, 80, 96, 136, 256})
    for (const char* text : {"vectorwise", "vectorwise rotate=off", "paper", "paper smooth_k=off",
                             "paper tile=192x256 rotate=on smooth_q=on"}) {
      SCOPED_TRACE(testing::Message() << text << " d" << d);
      const std::vector<float> x = uneven_tokens(500, d);
      const ref::RecipeHead head = head_of(x, d, text);
      const ref::RecipeOperands oracle = ref::make_operands(head);
      const ref::RecipeInputs& want = oracle.inputs;
      const Recipe& r = head.recipe;
      const bool paper = r.scheme == Scheme::paper;
      QuantizedTokens t(x, d);
      Array<float> k_mean(want.mu_k);
      if (paper) {  // keys and values of vectorwise have centres: the next test
        t.job.rotate = r.rotate;
        t.job.mean = r.smooth_k ? k_mean.data : nullptr;
        t.job.run = r.tile_k, t.job.scale_of = ScaleOf::run;
        t.expect(want.k8, want.k_scale);
      }
      t.job.rotate = false, t.job.mean = nullptr;
      if (paper) t.expect(want.v8, want.v_scale);

      t.job.rotate = r.rotate, t.job.queries = true;
      t.job.run = paper ? r.tile_q : 64, t.job.scale_of = paper ? ScaleOf::run : ScaleOf::token;
      if (r.smooth_q) {
        t.job.run_mean = t.run_mean.data;
        t.job.turned_mean = r.rotate ? t.turned_mean.data : nullptr;
      }
      t.expect(want.q8, want.q_scale);
      if (r.smooth_q) t.expect_means(t.run_mean, want.mu_q);
      if (r.smooth_q && r.rotate) t.expect_means(t.turned_mean, oracle.mu_q);
    }
}

TEST(Plain, KeyAndValueCodesEqualTheOracles) {
  NEED_DEVICE();
  using cuda::plain::ScaleOf;
  for (int d : {8, 40, 72, 96, 256})
    for (const char* text :
         {"vectorwise", "vectorwise tile=64x64 rotate=off", "vectorwise smooth_k=off"}) {
      SCOPED_TRACE(testing::Message() << text << " d" << d);
      std::vector<float> x = uneven_tokens(700, d);
      for (float& value : x) value += 2.0f;  // so that there is something to centre
      const ref::RecipeHead head = head_of(x, d, text);
      const ref::RecipeOperands oracle = ref::make_operands(head);
      const ref::RecipeInputs& want = oracle.inputs;
      const size_t dim = static_cast<size_t>(d), key_blocks = 6, octaves = 4;
      QuantizedTokens t(x, d);
      t.job.rotate = head.recipe.rotate;

      Array<int8_t> centre8(key_blocks * dim);
      Array<float> centre_scale(key_blocks);
      cuda::plain::Centres centres{.codes = centre8.data,
                                   .scale = centre_scale.data,
                                   .key_blocks = static_cast<int64_t>(key_blocks),
                                   .blocks = t.job.batch.seq};
      centres.blocks.q_blocks = centres.blocks.k_blocks = static_cast<int>(key_blocks);
      const auto expect_centres = [&](bool of_values, const std::vector<int8_t>& codes,
                                      const std::vector<float>& scales) {
        centre8.write(std::vector<int8_t>(key_blocks * dim, 0x5a), 0);
        cuda::plain::launch_centres({.batch = t.job.batch,
                                     .heads = 1,
                                     .d = d,
                                     .x = t.job.x,
                                     .of_values = of_values,
                                     .smooth = head.recipe.smooth_k,
                                     .rotate = t.job.rotate,
                                     .blocks = static_cast<int64_t>(key_blocks),
                                     .to = centres},
                                    nullptr);
        const std::vector<int8_t> got8 = centre8.read();
        const std::vector<float> got_scale = centre_scale.read();
        for (size_t octave = 0; octave < octaves; ++octave) {
          const size_t row = octave == 0 ? 0 : size_t{1} << (octave - 1);
          EXPECT_EQ(got_scale[row], scales[octave]) << octave;
          for (size_t c = 0; c < dim; ++c)
            ASSERT_EQ(got8[row * dim + c], codes[octave * dim + c]) << octave << " " << c;
        }
        for (size_t c = 0; c < dim; ++c) ASSERT_EQ(got8[3 * dim + c], 0x5a);  // no octave starts
      };
      t.job.centres = centres, t.job.scale_of = ScaleOf::value, t.job.rotate = false;
      expect_centres(true, want.v_centre8, want.v_centre_scale);
      t.expect(want.v8, want.v_scale);

      t.job.scale_of = ScaleOf::key, t.job.rotate = head.recipe.rotate;
      expect_centres(false, want.centre8, want.centre_scale);
      t.expect(want.k8, want.k_scale);

      // K of dQ, from what was just made.
      Array<float> turned_mean(dim), mean(dim), scale(static_cast<size_t>(t.n));
      Array<int8_t> codes(static_cast<size_t>(t.n * t.pitch));
      cuda::plain::launch_dq_keys({.batch = t.job.batch,
                                   .heads = 1,
                                   .d = d,
                                   .pitch = t.pitch,
                                   .tokens = t.n,
                                   .tile = head.recipe.tile_k,
                                   .rotated = head.recipe.rotate,
                                   .k = t.job.to,
                                   .centres = centres,
                                   .turned_mean = turned_mean.data,
                                   .mean = mean.data,
                                   .to = {codes.data, scale.data, nullptr, nullptr}},
                                  nullptr);
      EXPECT_EQ(mean.read(), oracle.dq_mean);
      EXPECT_EQ(scale.read(), oracle.dq_fold);
      const std::vector<int8_t> got = codes.read();
      for (size_t i = 0; i < static_cast<size_t>(t.n); ++i)
        for (size_t c = 0; c < dim; ++c)
          ASSERT_EQ(got[i * static_cast<size_t>(t.pitch) + c], oracle.dq_keys[i * dim + c])
              << "key " << i << " channel " << c;
    }
}

/// Array on the host.
template <typename T>
struct HostArray {
  explicit HostArray(size_t n) : HostArray(std::vector<T>(n)) {}
  explicit HostArray(const std::vector<T>& x) : memory(x), data(memory.data()), count(x.size()) {}
  HostArray(const HostArray&) = delete;
  void write(const std::vector<T>& x, int64_t at) {
    std::copy(x.begin(), x.end(), memory.begin() + at);
  }
  const std::vector<T>& read() const { return memory; }
  std::vector<T> memory;
  T* data;
  size_t count;
};

/// A forward that saves codes, or one that does not, and its backward.
struct SavedRun {
  Results r;
  std::vector<std::byte> codes;
};

/// Runs an f32 case on `impl`. With codes the backward gets no q, k and v. `given`: the backward
/// takes codes, o and lse of that run.
template <template <typename> class Memory>
SavedRun run_saved(const DeviceCase& dc, const CaseInputs& in, const char* impl, bool with_codes,
                   const SavedRun* given = nullptr) {
  const spec::AttnCase& c = dc.c;
  setenv("SAGEBWD_IMPL", impl, 1);
  const Memory<float> q(in.x.q), k(in.x.k), v(in.x.v), dout(in.x.dout);
  const auto floats = [](int64_t n) { return std::vector<float>(static_cast<size_t>(n), NAN); };
  const int64_t sequences = dc.cu_q.empty() ? c.b : static_cast<int64_t>(dc.cu_q.size()) - 1;
  Memory<float> o(floats(c.o_elements())), lse(floats(c.b * c.h * c.nq)),
      top(floats(sequences * c.h)), dq(floats(c.q_elements())), dk(floats(c.k_elements())),
      dv(floats(c.v_elements()));
  ForwardArgs f;
  f.device = std::string(impl) == "cuda-plain" ? Device::cuda : Device::cpu;
  f.q = c.q_view(q.data), f.k = c.k_view(k.data), f.v = c.v_view(v.data), f.o = c.o_view(o.data);
  f.lse = contiguous_stats(lse.data, c.h, c.nq), f.max_logit = top.data;
  f.mask = c.mask, f.recipe = c.recipe;
  if (!dc.cu_q.empty()) f.documents = {dc.cu_q.data(), dc.cu_k.data(), sequences};
  Memory<std::byte> codes(std::vector<std::byte>(codes_size(f), std::byte{0x5a}));
  if (with_codes) f.codes = codes.data, f.codes_bytes = codes.count;
  const Memory<std::byte> forward_space(std::vector<std::byte>(workspace_size(f), std::byte{0x7f}));
  f.workspace = forward_space.data, f.workspace_bytes = forward_space.count;
  forward(f);
  SavedRun run{{o.read(), lse.read(), top.read(), {}, {}, {}}, codes.read()};
  if (given != nullptr) {
    codes.write(given->codes, 0);
    o.write(given->r.o, 0), lse.write(given->r.lse, 0);
  }

  BackwardArgs g;
  static_cast<AttentionArgs&>(g) = f;
  if (with_codes) g.q.data = g.k.data = g.v.data = nullptr;
  g.dout = c.o_view(dout.data), g.dq = c.q_view(dq.data);
  g.dk = c.k_view(dk.data), g.dv = c.v_view(dv.data);
  const Memory<std::byte> backward_space(
      std::vector<std::byte>(workspace_size(g), std::byte{0x7f}));
  g.workspace = backward_space.data, g.workspace_bytes = backward_space.count;
  backward(g);
  run.r.dq = dq.read(), run.r.dk = dk.read(), run.r.dv = dv.read();
  unsetenv("SAGEBWD_IMPL");
  return run;
}

/// Whether two pieces of memory hold the same codes; a NaN is as good as another.
void expect_same_codes(const DeviceCase& dc, const SavedRun& a, const SavedRun& b) {
  const spec::AttnCase& c = dc.c;
  const CodesLayout at(
      {.h = c.h,
       .hk = c.hk,
       .d = c.d,
       .dv = c.value_dim(),
       .queries = c.b * c.nq,
       .keys = c.b * c.nk,
       .sequences = dc.cu_q.empty() ? c.b : static_cast<int64_t>(dc.cu_q.size()) - 1,
       .packed = !dc.cu_q.empty()});
  ASSERT_EQ(static_cast<int64_t>(a.codes.size()), at.bytes);
  for (const CodesPart& part : codes_parts(at)) {
    SCOPED_TRACE(part.name);
    if (part.codes)
      EXPECT_EQ(std::memcmp(a.codes.data() + part.at, b.codes.data() + part.at,
                            static_cast<size_t>(part.end - part.at)),
                0);
    else
      EXPECT_TRUE(same_bits(floats_of(a.codes, part), floats_of(b.codes, part)));
  }
}

void expect_saved_codes(const DeviceCase& dc, const CaseInputs& in) {
  SCOPED_TRACE(dc.c.to_string());
  const SavedRun plain = run_saved<Array>(dc, in, "cuda-plain", true),
                 without = run_saved<Array>(dc, in, "cuda-plain", false),
                 cpu = run_saved<HostArray>(dc, in, "", true),
                 oracle = run_saved<HostArray>(dc, in, "ref", true, &cpu),
                 from_cpu = run_saved<Array>(dc, in, "cuda-plain", true, &cpu);
  for (auto tensor :
       {&Results::o, &Results::lse, &Results::max_logit, &Results::dq, &Results::dk, &Results::dv})
    EXPECT_TRUE(same_bits(plain.r.*tensor, without.r.*tensor));
  expect_same_codes(dc, plain, oracle);
  expect_same_codes(dc, plain, cpu);
  EXPECT_LE(relative_error(from_cpu.r.dq, oracle.r.dq), plain_budget(dc));
  EXPECT_LE(relative_error(from_cpu.r.dk, oracle.r.dk), plain_budget(dc));
  EXPECT_LE(relative_error(from_cpu.r.dv, oracle.r.dv), plain_budget(dc));
}

TEST(Plain, SavedCodes) {
  NEED_DEVICE();
  for (const char* text : {"b2 h2 hk1 n140 d40 f32 causal", "b2 h2 hk1 nq70 nk600 d40 f32 causal",
                           "h2 n300 d64 f32 smooth_k=off rounding=dither lift=dV tile=64x64",
                           "h1 n150 d256 f32 rotate=off", "h2 hk1 n150 d192 dv=128 f32 causal",
                           "b2 h1 nq70 nk150 d24 dv=40 f32"}) {
    const DeviceCase dc = plain_case(text);
    expect_saved_codes(dc, make_case_inputs(dc));
  }
}

TEST(Plain, SavedCodesOfDocuments) {
  NEED_DEVICE();
  for (const char* text :
       {"h4 hk2 nq700 nk650 d40 f32 causal", "h4 hk2 nq700 nk650 d40 dv=24 f32"}) {
    DeviceCase dc = plain_case(text);
    dc.cu_q = {0, 0, 130, 131, 131, 400, 700};
    dc.cu_k = {0, 5, 200, 200, 207, 500, 650};
    expect_saved_codes(dc, make_case_inputs(dc));
  }
}

TEST(Plain, SavedCodesOfNanAndInf) {
  NEED_DEVICE();
  for (int tensor = 0; tensor < 3; ++tensor) {
    const DeviceCase dc = plain_case("h1 n300 d40 f32 causal");
    SCOPED_TRACE(tensor);
    CaseInputs in = make_case_inputs(dc);
    std::vector<float>& x = tensor_of(in, tensor);
    x[static_cast<size_t>(150 * dc.c.d + 5)] = NAN;
    for (int64_t i = 256; i < 300; ++i)  // a block
      x[static_cast<size_t>(i * dc.c.d)] = INFINITY;
    expect_saved_codes(dc, in);
  }
}

}  // namespace
}  // namespace sagebwd::gpu
