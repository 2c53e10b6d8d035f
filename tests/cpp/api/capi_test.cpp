// SPDX-License-Identifier: Apache-2.0
// The C interface: defaults, struct growth, and the same results as the C++ calls.
#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "api/small_problem.h"
#include "sagebwd/version.h"

namespace sagebwd {
namespace {

using testing::CBackward;
using testing::CForward;
using testing::SmallProblem;

// Structs grow by their size alone. This works only if they have no padding, whose bytes nobody
// sets.
static_assert(sizeof(sagebwd_tensor) == 8 + 2 * 32 + 2 * 4);
static_assert(sizeof(sagebwd_stats) == 8 + 24);
static_assert(sizeof(sagebwd_recipe) == 8 + 8 * 4 + 8 + 6 * 4);
static_assert(offsetof(sagebwd_forward_args, recipe) ==
              16 + 4 * sizeof(sagebwd_tensor) + sizeof(sagebwd_stats));
static_assert(sizeof(sagebwd_forward_args) == offsetof(sagebwd_forward_args, recipe) + 8 + 16 + 16 +
                                                  24 + 16 + 24 + 8 + 8 + 16 + 8 + 8);
static_assert(offsetof(sagebwd_backward_args, recipe) ==
              16 + 8 * sizeof(sagebwd_tensor) + sizeof(sagebwd_stats));
static_assert(sizeof(sagebwd_backward_args) == offsetof(sagebwd_backward_args, recipe) + 8 + 16 +
                                                   16 + 24 + 16 + 24 + sizeof(sagebwd_stats) + 16 +
                                                   16 + 8 + 8);
static_assert(sizeof(sagebwd_block_lists) == 16 + 3 * 8 + 4 * 8 + 4 * 4);

// The C constants are the C++ enums.
static_assert(SAGEBWD_F32 == static_cast<int>(Dtype::f32) &&
              SAGEBWD_BF16 == static_cast<int>(Dtype::bf16) &&
              SAGEBWD_F16 == static_cast<int>(Dtype::f16));
static_assert(SAGEBWD_CPU == static_cast<int>(Device::cpu) &&
              SAGEBWD_CUDA == static_cast<int>(Device::cuda));
static_assert(SAGEBWD_BOTTOM_RIGHT == static_cast<int>(Align::bottom_right) &&
              SAGEBWD_TOP_LEFT == static_cast<int>(Align::top_left));
static_assert(SAGEBWD_SCHEME_PAPER == static_cast<int>(Scheme::paper) &&
              SAGEBWD_SCHEME_VECTORWISE == static_cast<int>(Scheme::vectorwise));
static_assert(SAGEBWD_ROUND_NEAREST == static_cast<int>(Rounding::nearest) &&
              SAGEBWD_ROUND_DITHER == static_cast<int>(Rounding::dither));
constexpr bool same(int c, uint32_t cpp) { return static_cast<uint32_t>(c) == cpp; }
static_assert(same(SAGEBWD_MATMUL_S, kMatmulS) && same(SAGEBWD_MATMUL_O, kMatmulO) &&
              same(SAGEBWD_MATMUL_S_RECOMPUTE, kMatmulSRecompute) &&
              same(SAGEBWD_MATMUL_DV, kMatmulDV) && same(SAGEBWD_MATMUL_DP, kMatmulDP) &&
              same(SAGEBWD_MATMUL_DQ, kMatmulDQ) && same(SAGEBWD_MATMUL_DK, kMatmulDK));

::testing::AssertionResult has(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& w : words)
    if (text.find(w) == std::string::npos)
      return ::testing::AssertionFailure() << "no \"" << w << "\" in: " << text;
  return ::testing::AssertionSuccess();
}

TEST(CApi, VersionIsTheHeaders) { EXPECT_STREQ(sagebwd_version(), SAGEBWD_VERSION_STRING); }

TEST(CApi, RecipeInitFillsThePresets) {
  for (const char* name : {"paper", "vectorwise"}) {
    sagebwd_recipe c;
    ASSERT_EQ(sagebwd_recipe_init(&c, sizeof c, name), SAGEBWD_OK);
    const Recipe r = parse_recipe(name);
    EXPECT_EQ(c.size, sizeof c);
    EXPECT_EQ(c.version, static_cast<uint32_t>(SAGEBWD_STRUCT_VERSION));
    EXPECT_EQ(c.scheme, static_cast<int>(r.scheme));
    EXPECT_EQ(c.tile_q, r.tile_q);
    EXPECT_EQ(c.tile_k, r.tile_k);
    EXPECT_EQ(c.smooth_k, r.smooth_k);
    EXPECT_EQ(c.smooth_q, r.smooth_q);
    EXPECT_EQ(c.reserved_4, 0);
    EXPECT_EQ(c.rounding, static_cast<int>(r.rounding));
    EXPECT_EQ(c.seed, r.seed);
    EXPECT_EQ(c.reserved, 0);
    EXPECT_EQ(c.high_precision, r.high_precision);
    EXPECT_EQ(c.reserved_2, 0);
    EXPECT_EQ(c.dithered, r.dithered);
    EXPECT_EQ(c.rotate, r.rotate);
    EXPECT_EQ(c.reserved_3, 0);
  }
  sagebwd_recipe c;
  EXPECT_EQ(sagebwd_recipe_init(&c, sizeof c, "papper"), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_TRUE(has(sagebwd_last_error(), {"vectorwise or paper", "papper"}));
  EXPECT_EQ(sagebwd_recipe_init(&c, sizeof c, nullptr), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_EQ(sagebwd_recipe_init(nullptr, sizeof c, "paper"), SAGEBWD_INVALID_ARGUMENT);
}

TEST(CApi, InitFillsTheDefaults) {
  sagebwd_backward_args c;
  std::memset(static_cast<void*>(&c), 0xA5, sizeof c);
  ASSERT_EQ(sagebwd_backward_args_init(&c, sizeof c), SAGEBWD_OK);
  const BackwardArgs a;
  EXPECT_EQ(c.size, sizeof c);
  EXPECT_EQ(c.device, SAGEBWD_CPU);
  EXPECT_EQ(c.recipe, nullptr);
  EXPECT_EQ(c.scale, a.scale);
  EXPECT_EQ(c.softcap, a.softcap);
  EXPECT_EQ(c.causal, 0);
  EXPECT_EQ(c.align, SAGEBWD_BOTTOM_RIGHT);
  EXPECT_EQ(c.window_left, a.mask.window_left);
  EXPECT_EQ(c.window_right, a.mask.window_right);
  EXPECT_EQ(c.num_documents, 0);
  EXPECT_EQ(c.parallel_for, nullptr);
  EXPECT_EQ(c.dlse.data, nullptr);
  EXPECT_EQ(c.partial_kv, 0);
  EXPECT_EQ(c.deterministic, 0);
  EXPECT_EQ(c.q.data, nullptr);
}

TEST(CApi, BlockListsInitFillsTheDefaults) {
  sagebwd_block_lists c;
  std::memset(static_cast<void*>(&c), 0xA5, sizeof c);
  ASSERT_EQ(sagebwd_block_lists_init(&c, sizeof c), SAGEBWD_OK);
  const BlockLists l;
  EXPECT_EQ(c.size, sizeof c);
  EXPECT_EQ(c.lead, l.lead);
  EXPECT_EQ(c.block_q, l.block_q);
  EXPECT_EQ(c.block_k, l.block_k);
  EXPECT_EQ(c.rows, 0);
  EXPECT_EQ(c.on_device, 0);
  EXPECT_EQ(c.index, nullptr);
  EXPECT_EQ(sagebwd_block_lists_init(nullptr, sizeof c), SAGEBWD_INVALID_ARGUMENT);
}

/// Every field that changes results, set away from its default, gives bit-equal outputs in both
/// interfaces.
TEST(CApi, SameBitsAsTheCppCalls) {
  for (const bool packed : {false, true}) {
    const testing::Sizes sizes{.b = packed ? 1 : 2, .h = 4, .hk = 2, .nq = 130, .nk = 150, .d = 16};
    const int32_t cu_q[] = {0, 70, 70, 130};
    const int32_t cu_k[] = {0, 80, 90, 150};
    // Two batch entries, four heads, three rows of lists with two places.
    std::vector<int32_t> index, count;
    for (int32_t row = 0; row < 24; ++row) {
      index.insert(index.end(), {row % 3, (row + 2) % 3});
      count.push_back(row % 5 == 0 ? 1 : 2);
    }
    const auto configure = [&](AttentionArgs& a) {
      if (!packed) {
        a.blocks.index = index.data(), a.blocks.count = count.data();
        a.blocks.width = 2, a.blocks.rows = 3;
        a.blocks.stride_batch = 12, a.blocks.stride_head = 3;
        a.blocks.block_q = a.blocks.block_k = 64;
        a.blocks.lead = 0;
      }
      a.scale = 0.4f, a.softcap = 0.5f;
      a.mask = {.causal = true, .align = Align::top_left, .window_left = 40, .window_right = -1};
      if (packed) a.documents = {cu_q, cu_k, 3};
      a.recipe = Recipe::paper();
      a.recipe.tile_q = 64;
      a.recipe.smooth_q = true;
      a.recipe.rounding = Rounding::dither;
      a.recipe.dithered = kMatmulDV | kMatmulDK;
      a.recipe.rotate = true;
      a.recipe.seed = 77;
      a.recipe.high_precision = kMatmulDQ;
    };
    std::vector<float> max_logit(12, 0.0f), dlse(4 * 2 * 150, 0.25f);
    const auto run = [&](SmallProblem& p, bool through_c) {
      ForwardArgs f = p.forward_args();
      configure(f);
      f.max_logit = max_logit.data();
      std::vector<std::byte> workspace(workspace_size(f));
      f.workspace = workspace.data(), f.workspace_bytes = workspace.size();
      BackwardArgs b = p.backward_args();
      configure(b);
      b.dlse = contiguous_stats(dlse.data(), sizes.h, sizes.nq);
      b.partial_kv = true;
      b.deterministic = true;
      std::vector<std::byte> workspace_b(workspace_size(b));
      b.workspace = workspace_b.data(), b.workspace_bytes = workspace_b.size();
      if (!through_c) {
        forward(f);
        backward(b);
        return;
      }
      CForward cf(f);
      CBackward cb(b);
      size_t bytes = 0;
      EXPECT_EQ(sagebwd_forward_workspace_size(&cf.args, &bytes), SAGEBWD_OK);
      EXPECT_EQ(bytes, workspace.size());
      EXPECT_EQ(sagebwd_backward_workspace_size(&cb.args, &bytes), SAGEBWD_OK);
      EXPECT_EQ(bytes, workspace_b.size());
      EXPECT_EQ(sagebwd_forward(&cf.args), SAGEBWD_OK) << sagebwd_last_error();
      EXPECT_EQ(sagebwd_backward(&cb.args), SAGEBWD_OK) << sagebwd_last_error();
    };
    SmallProblem cpp(sizes, Dtype::bf16), c(sizes, Dtype::bf16);
    run(cpp, false);
    const std::vector<float> max_logit_cpp = max_logit;
    std::fill(max_logit.begin(), max_logit.end(), 0.0f);
    run(c, true);
    EXPECT_EQ(cpp.outputs(), c.outputs()) << (packed ? "packed" : "dense");
    EXPECT_EQ(max_logit_cpp, max_logit);
    EXPECT_FALSE(cpp.untouched());
  }
}

/// A NULL recipe is vectorwise.
TEST(CApi, NullRecipeIsTheDefault) {
  SmallProblem given, defaulted;
  CForward a(given.forward_args()), b(defaulted.forward_args());
  ASSERT_EQ(sagebwd_recipe_init(&a.recipe, sizeof a.recipe, "vectorwise"), SAGEBWD_OK);
  b.args.recipe = nullptr;
  ASSERT_EQ(sagebwd_forward(&a.args), SAGEBWD_OK) << sagebwd_last_error();
  ASSERT_EQ(sagebwd_forward(&b.args), SAGEBWD_OK) << sagebwd_last_error();
  EXPECT_EQ(given.outputs(), defaulted.outputs());
}

/// An older caller's struct ends before newer fields: they take their defaults, whatever lies
/// behind it in memory.
TEST(CApi, ShorterStructTakesDefaults) {
  SmallProblem whole, cut;
  CForward a(whole.forward_args()), b(cut.forward_args());
  a.args.max_logit = nullptr;
  std::memset(&b.args.max_logit, 0xFF, sizeof b.args.max_logit);
  b.args.size = offsetof(sagebwd_forward_args, max_logit);
  b.recipe.high_precision = 0xFFFFFFFFu;
  b.recipe.size = offsetof(sagebwd_recipe, reserved);
  ASSERT_EQ(sagebwd_forward(&a.args), SAGEBWD_OK) << sagebwd_last_error();
  ASSERT_EQ(sagebwd_forward(&b.args), SAGEBWD_OK) << sagebwd_last_error();
  EXPECT_EQ(whole.outputs(), cut.outputs());
}

/// Switches of the previews that no longer exist: whoever sets one is told.
TEST(CApi, ReservedFieldsOfARecipeStayZero) {
  for (int32_t sagebwd_recipe::*field :
       {&sagebwd_recipe::reserved, &sagebwd_recipe::reserved_2, &sagebwd_recipe::reserved_3,
        &sagebwd_recipe::reserved_4}) {
    SmallProblem p;
    CForward a(p.forward_args());
    a.recipe.*field = -1;
    EXPECT_EQ(sagebwd_forward(&a.args), SAGEBWD_INVALID_ARGUMENT);
    EXPECT_TRUE(has(sagebwd_last_error(), {"recipe.reserved", "-1"}));
  }
}

/// So is whoever asks for the scheme of the previews that `vectorwise` has taken the place of.
TEST(CApi, SchemeTwoIsRefused) {
  SmallProblem p;
  CForward a(p.forward_args());
  a.recipe.scheme = 2;
  EXPECT_EQ(sagebwd_forward(&a.args), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_TRUE(has(sagebwd_last_error(), {"recipe.scheme", "0 (paper) or 1 (vectorwise)", "2"}));
}

/// The recipe of a caller who was compiled before rotation existed: it takes the default of its
/// scheme, and the last field, reserved then, says nothing about dither.
TEST(CApi, RecipeOfTheFirstVersionKeepsItsScheme) {
  const size_t first_version = offsetof(sagebwd_recipe, rotate);
  static_assert(first_version == 64);
  for (const char* scheme : {"paper", "vectorwise"})
    for (const int rounding : {SAGEBWD_ROUND_NEAREST, SAGEBWD_ROUND_DITHER}) {
      sagebwd_recipe recipe;
      ASSERT_EQ(sagebwd_recipe_init(&recipe, sizeof recipe, scheme), SAGEBWD_OK);
      recipe.rounding = rounding;
      const auto outputs = [](const sagebwd_recipe& r) {
        SmallProblem problem;
        CForward c(problem.forward_args());
        c.recipe = r;
        size_t bytes = 0;
        EXPECT_EQ(sagebwd_forward_workspace_size(&c.args, &bytes), SAGEBWD_OK);
        std::vector<std::byte> workspace(bytes);
        c.args.workspace = workspace.data(), c.args.workspace_bytes = bytes;
        EXPECT_EQ(sagebwd_forward(&c.args), SAGEBWD_OK) << sagebwd_last_error();
        return problem.outputs();
      };
      sagebwd_recipe old = recipe;
      std::memset(&old.rotate, 0xFF, sizeof old - first_version);
      old.size = first_version;
      old.dithered = 0;
      EXPECT_EQ(outputs(recipe), outputs(old)) << scheme << " " << rounding;
      // The switches have an effect here, so a wrong default would show.
      sagebwd_recipe other = recipe;
      other.rotate = 1 - other.rotate;
      EXPECT_NE(outputs(recipe), outputs(other)) << scheme;
    }
}

TEST(CApi, InitStaysInsideAShorterStruct) {
  sagebwd_forward_args c;
  std::memset(static_cast<void*>(&c), 0xA5, sizeof c);
  const size_t size = offsetof(sagebwd_forward_args, stream);
  ASSERT_EQ(sagebwd_forward_args_init(&c, size), SAGEBWD_OK);
  EXPECT_EQ(c.size, size);
  EXPECT_EQ(c.window_left, -1);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&c);
  for (size_t i = size; i < sizeof c; ++i) ASSERT_EQ(bytes[i], 0xA5) << "byte " << i;
}

/// A newer caller's struct is longer: fine while the fields we do not know are zero.
TEST(CApi, LongerStructMustEndInZeros) {
  struct Newer {
    sagebwd_forward_args known;
    int64_t unknown[2];
  } c;
  std::memset(static_cast<void*>(&c), 0xA5, sizeof c);
  ASSERT_EQ(sagebwd_forward_args_init(&c.known, sizeof c), SAGEBWD_OK);
  EXPECT_EQ(c.unknown[0], 0);
  EXPECT_EQ(c.unknown[1], 0);
  SmallProblem problem;
  CForward valid(problem.forward_args());
  c.known = valid.args;
  c.known.size = sizeof c;
  c.unknown[1] = 1;
  EXPECT_EQ(sagebwd_forward(&c.known), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_TRUE(has(sagebwd_last_error(), {"zeros", std::to_string(sizeof valid.args), "got 1",
                                         "newer version", std::to_string(sizeof c.known + 8)}));
  EXPECT_TRUE(problem.untouched());
  c.unknown[1] = 0;
  EXPECT_EQ(sagebwd_forward(&c.known), SAGEBWD_OK) << sagebwd_last_error();
}

TEST(CApi, WrongSizeOrVersionIsRefused) {
  SmallProblem problem;
  const ForwardArgs args = problem.forward_args();
  const auto refused = [&](auto&& spoil, const std::vector<std::string>& words) {
    CForward c(args);
    spoil(c);
    EXPECT_EQ(sagebwd_forward(&c.args), SAGEBWD_INVALID_ARGUMENT);
    EXPECT_TRUE(has(sagebwd_last_error(), words));
    EXPECT_TRUE(problem.untouched());
  };
  const std::string whole = std::to_string(sizeof(sagebwd_forward_args));
  refused([](CForward& c) { c.args.size = 0; }, {"forward args.size", whole, "got 0"});
  refused([](CForward& c) { c.args.size = offsetof(sagebwd_forward_args, lse); },
          {"forward args.size", whole});
  refused([](CForward& c) { c.args.size = ~size_t{0}; },
          {"forward args.size", whole, "18446744073709551615"});
  refused([](CForward& c) { c.args.size = offsetof(sagebwd_forward_args, recipe) + 5; },
          {"forward args.size", whole, "a multiple of 8"});
  refused([](CForward& c) { c.args.version = 0; }, {"forward args.version", "expected 1", "got 0"});
  refused([](CForward& c) { c.args.version = 2; }, {"forward args.version", "expected 1", "got 2"});
  refused([](CForward& c) { c.recipe.size = 4; }, {"recipe.size", "got 4"});
  refused([](CForward& c) { c.recipe.version = 9; }, {"recipe.version", "expected 1", "got 9"});
  refused([](CForward& c) { c.recipe.smooth_k = 2; }, {"smooth_k", "0 or 1", "got 2"});
  refused([](CForward& c) { c.args.causal = -1; }, {"causal", "0 or 1", "got -1"});
  refused([](CForward& c) { c.args.reserved = 1; },
          {"forward args.reserved", "expected 0", "got 1"});
  refused([](CForward& c) { c.args.reserved_2 = 1; },
          {"forward args.reserved", "expected 0", "got 1"});
  refused([](CForward& c) { c.args.cu_on_device = 5; }, {"cu_on_device", "0 or 1", "got 5"});
  refused([](CForward& c) { c.args.v.reserved = 3; }, {"v.reserved", "expected 0", "got 3"});
  sagebwd_forward_args tiny;
  EXPECT_EQ(sagebwd_forward_args_init(&tiny, 8), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_TRUE(has(sagebwd_last_error(), {"forward args.size", whole, "got 8"}));
}

TEST(CApi, BackwardFlagsAreChecked) {
  SmallProblem problem;
  const BackwardArgs args = problem.backward_args();
  for (int32_t sagebwd_backward_args::*field :
       {&sagebwd_backward_args::partial_kv, &sagebwd_backward_args::deterministic,
        &sagebwd_backward_args::reserved, &sagebwd_backward_args::cu_on_device,
        &sagebwd_backward_args::reserved_2}) {
    CBackward c(args);
    c.args.*field = 4;
    EXPECT_EQ(sagebwd_backward(&c.args), SAGEBWD_INVALID_ARGUMENT);
    EXPECT_TRUE(has(sagebwd_last_error(), {"expected 0", "got 4"}));
  }
  EXPECT_TRUE(problem.untouched());
}

TEST(CApi, NullPointersAreRefused) {
  size_t bytes = 0;
  SmallProblem problem;
  CForward c(problem.forward_args());
  EXPECT_EQ(sagebwd_forward(nullptr), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_TRUE(has(sagebwd_last_error(), {"forward args", "null"}));
  EXPECT_EQ(sagebwd_backward(nullptr), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_TRUE(has(sagebwd_last_error(), {"backward args", "null"}));
  EXPECT_EQ(sagebwd_forward_args_init(nullptr, sizeof c.args), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_EQ(sagebwd_forward_workspace_size(nullptr, &bytes), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_EQ(sagebwd_backward_workspace_size(nullptr, &bytes), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_EQ(sagebwd_forward_workspace_size(&c.args, nullptr), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_EQ(sagebwd_explain_forward(&c.args, nullptr, 10, nullptr), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_EQ(sagebwd_explain_backward(nullptr, nullptr, 0, nullptr), SAGEBWD_INVALID_ARGUMENT);
}

TEST(CApi, ExplainWritesLikeSnprintf) {
  SmallProblem problem;
  CForward c(problem.forward_args());
  size_t length = 0;
  ASSERT_EQ(sagebwd_explain_forward(&c.args, nullptr, 0, &length), SAGEBWD_OK)
      << sagebwd_last_error();
  ASSERT_GT(length, 0u);
  std::string whole(length + 1, '#');
  ASSERT_EQ(sagebwd_explain_forward(&c.args, whole.data(), whole.size(), nullptr), SAGEBWD_OK);
  EXPECT_EQ(whole[length], '\0');
  whole.resize(length);
  EXPECT_EQ(whole.find('\0'), std::string::npos);
  for (const Candidate& candidate : explain(problem.forward_args())) {
    EXPECT_TRUE(has(whole, {candidate.name + ": ", candidate.reason}));
    if (candidate.chosen) {
      EXPECT_TRUE(has(whole, {candidate.name + ": chosen, tiles " + candidate.tiles() + "\n"}));
    }
  }
  char part[8] = "#######";
  ASSERT_EQ(sagebwd_explain_forward(&c.args, part, 5, &length), SAGEBWD_OK);
  EXPECT_EQ(length, whole.size());
  EXPECT_EQ(std::string(part), whole.substr(0, 4));
  EXPECT_EQ(part[5], '#');
  CBackward b(problem.backward_args());
  EXPECT_EQ(sagebwd_explain_backward(&b.args, nullptr, 0, &length), SAGEBWD_OK);
  EXPECT_GT(length, 0u);
}

TEST(CApi, LastErrorBelongsToTheThread) {
  EXPECT_EQ(sagebwd_forward(nullptr), SAGEBWD_INVALID_ARGUMENT);
  const std::string here = sagebwd_last_error();
  std::thread other([] {
    EXPECT_STREQ(sagebwd_last_error(), "");
    sagebwd_recipe r;
    EXPECT_EQ(sagebwd_recipe_init(&r, sizeof r, "other"), SAGEBWD_INVALID_ARGUMENT);
    EXPECT_TRUE(has(sagebwd_last_error(), {"other"}));
  });
  other.join();
  EXPECT_EQ(here, sagebwd_last_error());
}

TEST(CApi, ALongMessageIsCutNotOverrun) {
  sagebwd_recipe r;
  const std::string name(10000, 'x');
  EXPECT_EQ(sagebwd_recipe_init(&r, sizeof r, name.c_str()), SAGEBWD_INVALID_ARGUMENT);
  EXPECT_LT(std::strlen(sagebwd_last_error()), 2048u);
  EXPECT_TRUE(has(sagebwd_last_error(), {"vectorwise or paper", "xxxx"}));
}

/// The caller's threads are the ones that run, for every item exactly once.
TEST(CApi, CallersParallelForIsUsed) {
  struct Pool {
    int64_t calls = 0, items = 0;
  } pool;
  const auto backwards = [](void* context, int64_t count, void (*body)(void*, int64_t),
                            void* user) {
    auto* p = static_cast<Pool*>(context);
    ++p->calls;
    for (int64_t i = count - 1; i >= 0; --i, ++p->items) body(user, i);
  };
  SmallProblem own, given;
  CForward a(own.forward_args()), b(given.forward_args());
  b.args.parallel_for = backwards;
  b.args.parallel_context = &pool;
  ASSERT_EQ(sagebwd_forward(&a.args), SAGEBWD_OK) << sagebwd_last_error();
  ASSERT_EQ(sagebwd_forward(&b.args), SAGEBWD_OK) << sagebwd_last_error();
  EXPECT_GT(pool.calls, 0);
  EXPECT_GT(pool.items, 0);
  EXPECT_EQ(own.outputs(), given.outputs());
}

/// Whatever a callback throws stops at the C boundary.
TEST(CApi, NoExceptionLeaves) {
  SmallProblem problem;
  CForward c(problem.forward_args());
  c.args.parallel_for = [](void*, int64_t, void (*)(void*, int64_t), void*) {
    throw std::runtime_error("pool is gone");
  };
  EXPECT_EQ(sagebwd_forward(&c.args), SAGEBWD_INTERNAL);
  EXPECT_STREQ(sagebwd_last_error(), "pool is gone");
  c.args.parallel_for = [](void*, int64_t, void (*)(void*, int64_t), void*) {
    throw std::bad_alloc();
  };
  EXPECT_EQ(sagebwd_forward(&c.args), SAGEBWD_OUT_OF_MEMORY);
  c.args.parallel_for = [](void*, int64_t, void (*)(void*, int64_t), void*) { throw 7; };
  EXPECT_EQ(sagebwd_forward(&c.args), SAGEBWD_INTERNAL);
}

}  // namespace
}  // namespace sagebwd
