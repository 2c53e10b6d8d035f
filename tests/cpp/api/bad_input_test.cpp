// SPDX-License-Identifier: Apache-2.0
// Wrong arguments: the right kind of error, a message with what was expected and what came, and
// nothing written. Every case runs through the C++ and the C interface.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "api/small_problem.h"

namespace sagebwd {
namespace {

using testing::CBackward;
using testing::CForward;
using testing::SmallProblem;

template <typename Args>
struct BadCase {
  const char* name;
  std::function<void(Args&)> spoil;
  std::vector<const char*> words;  // that the message must hold
  ErrorKind kind = ErrorKind::invalid_argument;
};

template <typename Args>
void PrintTo(const BadCase<Args>& c, std::ostream* out) {
  *out << c.name;
}

constexpr auto case_name = [](const auto& info) { return std::string(info.param.name); };

void* shifted(void* p, int bytes) { return static_cast<std::byte*>(p) + bytes; }

// Offsets that are wrong for 5 queries or 7 keys, and right ones.
const int32_t kQueries[] = {0, 2, 5};
const int32_t kKeys[] = {0, 3, 7};
const int32_t kShort[] = {0, 2, 4};
const int32_t kLate[] = {1, 2, 5};
const int32_t kFalling[] = {0, 6, 5};

/// One document pair; batch size 1 as a packed batch needs.
void pack(AttentionArgs& a, const int32_t* cu_q, const int32_t* cu_k) {
  for (TensorView* t : {&a.q, &a.k, &a.v, &a.o}) t->shape[0] = 1;
  a.documents = {cu_q, cu_k, 2};
}
void pack(ForwardArgs& a, const int32_t* cu_q, const int32_t* cu_k) {
  pack(static_cast<AttentionArgs&>(a), cu_q, cu_k);
}
void pack(BackwardArgs& a, const int32_t* cu_q, const int32_t* cu_k) {
  pack(static_cast<AttentionArgs&>(a), cu_q, cu_k);
  for (TensorView* t : {&a.dout, &a.dq, &a.dk, &a.dv}) t->shape[0] = 1;
}

void set_head_dim(AttentionArgs& a, int64_t d) {
  for (TensorView* t : {&a.q, &a.k, &a.v, &a.o}) t->shape[3] = d;
}

void set_value_dim(AttentionArgs& a, int64_t d) {
  for (TensorView* t : {&a.v, &a.o}) t->shape[3] = d;
}

// Lists of 5 queries, one row, over 7 keys, one block.
const int32_t kFirst[] = {0, 0};
const int32_t kSecond[] = {1};
const int32_t kBefore[] = {-1};
const int32_t kOne[] = {1}, kThree[] = {3}, kMinusOne[] = {-1};
const int64_t kRow[] = {0, 1}, kRowFalling[] = {1, 0}, kRowBefore[] = {-1, 0};

/// One row of `width` places, shared by all heads and batch entries.
void list(AttentionArgs& a, const int32_t* index, int64_t width = 1,
          const int32_t* count = nullptr) {
  a.blocks = {};
  a.blocks.index = index, a.blocks.width = width, a.blocks.count = count;
  a.blocks.rows = 1;
}
void list(AttentionArgs& a, const int64_t* offset) {
  list(a, kFirst);
  a.blocks.offset = offset;
}

/// Mistakes that either call must refuse.
template <typename A>
std::vector<BadCase<A>> shared_cases() {
  constexpr int64_t kHuge = int64_t{1} << 40;
  return {
      {"k_batch", [](A& a) { a.k.shape[0] = 3; }, {"k", "[2, 2, 7, 16]", "[3, 2, 7, 16]"}},
      {"k_head_dim", [](A& a) { a.k.shape[3] = 24; }, {"k", "16]", "24]"}},
      {"v_length", [](A& a) { a.v.shape[2] = 6; }, {"v", "[2, 2, 7, 16]", "[2, 2, 6, 16]"}},
      {"v_head_dim_12", [](A& a) { set_value_dim(a, 12); }, {"head dim of v", "8 to 256", "12"}},
      {"v_head_dim_0", [](A& a) { set_value_dim(a, 0); }, {"head dim of v", "8 to 256", "got 0"}},
      {"v_head_dim_264", [](A& a) { set_value_dim(a, 264); }, {"head dim of v", "256", "264"}},
      {"o_of_qs_head_dim", [](A& a) { a.v.shape[3] = 8; }, {"o", "[2, 4, 5, 8]", "[2, 4, 5, 16]"}},
      {"o_length", [](A& a) { a.o.shape[2] = 4; }, {"o", "[2, 4, 5, 16]", "[2, 4, 4, 16]"}},
      {"heads", [](A& a) { a.k.shape[1] = a.v.shape[1] = 3; }, {"multiple", "4", "3"}},
      {"no_key_heads", [](A& a) { a.k.shape[1] = a.v.shape[1] = 0; }, {"multiple", "4", "0"}},
      {"negative_size", [](A& a) { a.q.shape[2] = -5; }, {"non-negative", "-5"}},
      {"huge", [](A& a) { a.q.shape[0] = a.k.shape[0] = kHuge; }, {"2^47", "1099511627776"}},
      {"head_dim_12", [](A& a) { set_head_dim(a, 12); }, {"head dim", "8 to 256", "12"}},
      {"head_dim_0", [](A& a) { set_head_dim(a, 0); }, {"head dim", "8 to 256", "got 0"}},
      {"head_dim_264", [](A& a) { set_head_dim(a, 264); }, {"head dim", "8 to 256", "264"}},
      {"dtype_of_k", [](A& a) { a.k.dtype = Dtype::f16; }, {"k", "f32", "f16"}},
      {"dtype_of_o", [](A& a) { a.o.dtype = Dtype::bf16; }, {"o", "f32", "bf16"}},
      {"dtype_unknown", [](A& a) { a.q.dtype = static_cast<Dtype>(7); }, {"q", "f32", "7"}},
      {"device", [](A& a) { a.device = static_cast<Device>(9); }, {"device", "cpu", "9"}},
      {"align", [](A& a) { a.mask.align = static_cast<Align>(2); }, {"align", "top_left", "2"}},
      {"window_left", [](A& a) { a.mask.window_left = -2; }, {"window", "-1", "-2"}},
      {"window_right", [](A& a) { a.mask.window_right = -7; }, {"window", "-1", "-7"}},
      {"scale_nan",
       [](A& a) { a.scale = std::numeric_limits<float>::quiet_NaN(); },
       {"scale", "finite", "nan"}},
      {"softcap_negative", [](A& a) { a.softcap = -30.0f; }, {"softcap", "2^-64", "-30"}},
      {"softcap_nan",
       [](A& a) { a.softcap = std::numeric_limits<float>::quiet_NaN(); },
       {"softcap", "2^64", "nan"}},
      {"softcap_inf",
       [](A& a) { a.softcap = std::numeric_limits<float>::infinity(); },
       {"softcap", "2^64", "inf"}},
      {"softcap_tiny", [](A& a) { a.softcap = 1e-30f; }, {"softcap", "2^-64", "1e-30"}},
      {"scale_inf",
       [](A& a) { a.scale = std::numeric_limits<float>::infinity(); },
       {"scale", "finite", "inf"}},
      {"q_null", [](A& a) { a.q.data = nullptr; }, {"q", "pointer", "null"}},
      {"v_null", [](A& a) { a.v.data = nullptr; }, {"v", "pointer", "null"}},
      {"o_null", [](A& a) { a.o.data = nullptr; }, {"o", "pointer", "null"}},
      {"lse_null", [](A& a) { a.lse.data = nullptr; }, {"lse", "pointer", "null"}},
      {"q_misaligned", [](A& a) { a.q.data = shifted(a.q.data, 2); }, {"q", "aligned to 4", "0x"}},
      {"k_misaligned", [](A& a) { a.k.data = shifted(a.k.data, 1); }, {"k", "aligned to 4", "0x"}},
      {"lse_misaligned",
       [](A& a) { a.lse.data = static_cast<float*>(shifted(a.lse.data, 2)); },
       {"lse", "aligned to 4", "0x"}},
      {"q_negative_stride", [](A& a) { a.q.stride[2] = -16; }, {"q", "non-negative", "-16"}},
      {"lse_negative_stride", [](A& a) { a.lse.stride[0] = -20; }, {"lse", "non-negative", "-20"}},
      {"q_stride_overflow",
       [](A& a) { a.q.stride[1] = int64_t{1} << 62; },
       {"q", "2^57 bytes", "4 steps", "4611686018427387904"}},
      {"v_strides_overflow_together",
       [](A& a) {
         a.v.stride = {int64_t{1} << 54, int64_t{1} << 54, int64_t{1} << 51, 1};
       },
       {"v", "2^57 bytes", "18014398509481984"}},
      {"k_behind_the_address_space",
       [](A& a) { a.k.data = reinterpret_cast<void*>(~uintptr_t{0} - 127); },
       {"k", "bytes of memory", "0xffff"}},
      {"workspace_behind_the_address_space",
       [](A& a) { a.workspace = reinterpret_cast<void*>(~uintptr_t{0} - 127); },
       {"workspace", "bytes", "0xffff"}},
      {"workspace_is_q", [](A& a) { a.workspace = a.q.data; }, {"workspace", "of its own"}},
      {"workspace_meets_lse",
       [](A& a) { a.workspace = shifted(a.lse.data, 8); },
       {"workspace", "of its own"}},
      {"workspace_holds_offsets",
       [](A& a) {
         pack(a, kQueries, kKeys);
         a.workspace = const_cast<int32_t*>(kKeys);
       },
       {"workspace", "of its own"}},
      {"k_channel_stride", [](A& a) { a.k.stride[3] = 2; }, {"k", "channel stride 1", "2]"}},
      {"workspace_small", [](A& a) { a.workspace_bytes -= 1; }, {"workspace", "at least", "bytes"}},
      {"workspace_null", [](A& a) { a.workspace = nullptr; }, {"workspace", "bytes", "null"}},
      {"packed_batch",
       [](A& a) {
         a.documents = {kQueries, kKeys, 2};
       },
       {"packed", "1", "2"}},
      {"documents_on_device",
       [](A& a) {
         pack(a, kQueries, kKeys);
         a.documents.on_device = true;  // of a CPU call
       },
       {"documents.on_device", "CUDA"}},
      {"documents_many",
       [](A& a) {
         pack(a, kQueries, kKeys);
         a.documents.count = std::numeric_limits<int64_t>::max();
       },
       {"documents.count", "2^31", "9223372036854775807"}},
      {"cu_k_misaligned",
       [](A& a) {
         pack(a, kQueries, static_cast<int32_t*>(shifted(const_cast<int32_t*>(kKeys), 2)));
       },
       {"cu_k", "aligned to 4", "0x"}},
      {"documents_negative", [](A& a) { a.documents.count = -1; }, {"documents.count", "0", "-1"}},
      {"cu_q_null", [](A& a) { pack(a, nullptr, kKeys); }, {"cu_q", "3", "null"}},
      {"cu_k_null", [](A& a) { pack(a, kQueries, nullptr); }, {"cu_k", "3", "null"}},
      {"cu_q_short", [](A& a) { pack(a, kShort, kKeys); }, {"cu_q", "5", "4"}},
      {"cu_k_short", [](A& a) { pack(a, kQueries, kQueries); }, {"cu_k", "7", "5"}},
      {"cu_q_late", [](A& a) { pack(a, kLate, kKeys); }, {"cu_q", "start at 0", "1"}},
      {"cu_q_falling",
       [](A& a) { pack(a, kFalling, kKeys); },
       {"cu_q", "non-decreasing", "6", "5"}},
      {"scheme",
       [](A& a) { a.recipe.scheme = static_cast<Scheme>(5); },
       {"scheme", "vectorwise", "5"}},
      {"rounding",
       [](A& a) { a.recipe.rounding = static_cast<Rounding>(-1); },
       {"rounding", "dither", "-1"}},
      {"tile_q", [](A& a) { a.recipe.tile_q = 96; }, {"tile", "multiple of 64", "96"}},
      {"tile_k", [](A& a) { a.recipe.tile_k = 320; }, {"tile", "multiple of 64", "320"}},
      {"high_precision",
       [](A& a) { a.recipe.high_precision = 0x80; },
       {"high_precision", "0x7f", "0x80"}},
      {"list_behind", [](A& a) { list(a, kSecond); }, {"blocks.index", "0 to 0", "got 1"}},
      {"list_before", [](A& a) { list(a, kBefore); }, {"blocks.index", "0 to 0", "got -1"}},
      {"list_twice", [](A& a) { list(a, kFirst, 2); }, {"blocks.index", "once", "got 0 again"}},
      {"list_null", [](A& a) { list(a, nullptr, 1); }, {"blocks.index", "null"}},
      {"list_misaligned",
       [](A& a) { list(a, static_cast<int32_t*>(shifted(const_cast<int32_t*>(kFirst), 2))); },
       {"blocks.index", "aligned to 4", "0x"}},
      {"list_count", [](A& a) { list(a, kFirst, 1, kThree); }, {"blocks.count", "width (1)", "3"}},
      {"list_count_negative",
       [](A& a) { list(a, kFirst, 1, kMinusOne); },
       {"blocks.count", "width (1)", "-1"}},
      {"list_rows",
       [](A& a) {
         list(a, kFirst);
         a.blocks.rows = 2;
       },
       {"blocks.rows", "expected 1", "got 2"}},
      {"list_without_rows",
       [](A& a) {
         list(a, kFirst);
         a.blocks.rows = 0;
       },
       {"blocks.rows", "expected 1", "got 0"}},
      {"list_width",
       [](A& a) {
         list(a, kFirst);
         a.blocks.width = -1;
       },
       {"blocks", "width", "-1"}},
      {"list_stride_huge",
       [](A& a) {
         list(a, kFirst);
         a.blocks.stride_head = int64_t{1} << 62;
       },
       {"blocks", "2^47", "4611686018427387904"}},
      {"list_block_q",
       [](A& a) {
         list(a, kFirst);
         a.blocks.block_q = 96;
       },
       {"blocks.block_q", "multiple of 64", "96"}},
      {"list_block_k",
       [](A& a) {
         list(a, kFirst);
         a.blocks.block_k = 0;
       },
       {"blocks.block_k", "multiple of 64", "0"}},
      {"list_tile",
       [](A& a) {
         list(a, kFirst);
         a.recipe.tile_k = 128;
       },
       {"blocks.block_k", "recipe.tile_k (128)", "64"}},
      {"list_lead",
       [](A& a) {
         list(a, kFirst);
         a.blocks.lead = -2;
       },
       {"blocks.lead", "-1", "-2"}},
      {"list_on_device",
       [](A& a) {
         list(a, kFirst);
         a.blocks.on_device = true;
       },
       {"blocks.on_device", "CUDA"}},
      {"list_count_and_offset",
       [](A& a) {
         list(a, kRow);
         a.blocks.count = kOne;
       },
       {"blocks", "count or offset", "both"}},
      {"list_offset_falling", [](A& a) { list(a, kRowFalling); }, {"blocks.offset", "1 then 0"}},
      {"list_offset_before", [](A& a) { list(a, kRowBefore); }, {"blocks.offset", "-1 then 0"}},
      {"workspace_holds_lists",
       [](A& a) {
         list(a, kFirst);
         a.workspace = const_cast<int32_t*>(kFirst);
       },
       {"workspace", "of its own"}},
  };
}

std::vector<BadCase<ForwardArgs>> forward_cases() {
  using A = ForwardArgs;
  auto all = shared_cases<A>();
  const std::vector<BadCase<A>> own = {
      {"o_head_stride_0", [](A& a) { a.o.stride[1] = 0; }, {"o", "apart", "[320, 0, 16, 1]"}},
      {"o_token_stride_0", [](A& a) { a.o.stride[2] = 0; }, {"o", "apart", "[320, 80, 0, 1]"}},
      {"o_heads_overlap", [](A& a) { a.o.stride[1] = 64; }, {"o", "apart", "[320, 64, 16, 1]"}},
      {"o_stride_overflow",
       [](A& a) {
         a.o.stride = {int64_t{1} << 62, int64_t{1} << 62, int64_t{1} << 61, 1};
       },
       {"o", "apart", "2305843009213693952"}},
      {"lse_stride_0",
       [](A& a) {
         a.lse.stride = {0, 0, 1};
       },
       {"lse", "apart", "[0, 0, 1]"}},
      {"o_is_q", [](A& a) { a.o.data = a.q.data; }, {"o", "of its own", "q"}},
      {"o_meets_the_last_row_of_v",
       [](A& a) { a.o.data = shifted(a.v.data, (2 * 2 * 7 - 1) * 16 * 4); },
       {"o", "of its own"}},
      {"lse_in_o",
       [](A& a) { a.lse.data = static_cast<float*>(shifted(a.o.data, 400)); },
       {"lse", "of its own", "o"}},
      {"max_logit_in_lse",
       [](A& a) { a.max_logit = a.lse.data + 39; },
       {"max_logit", "of its own"}},
      {"max_logit_misaligned",
       [](A& a) { a.max_logit = static_cast<float*>(shifted(a.max_logit, 1)); },
       {"max_logit", "aligned to 4", "0x"}},
  };
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

std::vector<BadCase<BackwardArgs>> backward_cases() {
  using A = BackwardArgs;
  auto all = shared_cases<A>();
  const std::vector<BadCase<A>> own = {
      {"dout_length",
       [](A& a) { a.dout.shape[2] = 6; },
       {"dout", "[2, 4, 5, 16]", "[2, 4, 6, 16]"}},
      {"dq_heads", [](A& a) { a.dq.shape[1] = 2; }, {"dq", "[2, 4, 5, 16]", "[2, 2, 5, 16]"}},
      {"dk_heads", [](A& a) { a.dk.shape[1] = 4; }, {"dk", "[2, 2, 7, 16]", "[2, 4, 7, 16]"}},
      {"dv_dtype", [](A& a) { a.dv.dtype = Dtype::bf16; }, {"dv", "f32", "bf16"}},
      {"dout_null", [](A& a) { a.dout.data = nullptr; }, {"dout", "pointer", "null"}},
      {"dq_null", [](A& a) { a.dq.data = nullptr; }, {"dq", "pointer", "null"}},
      {"dv_misaligned",
       [](A& a) { a.dv.data = shifted(a.dv.data, 3); },
       {"dv", "aligned to 4", "0x"}},
      {"dq_stride_0", [](A& a) { a.dq.stride[0] = 0; }, {"dq", "apart", "[0, 80, 16, 1]"}},
      {"dk_stride_0", [](A& a) { a.dk.stride[1] = 0; }, {"dk", "apart", "[224, 0, 16, 1]"}},
      {"dv_tokens_overlap", [](A& a) { a.dv.stride[2] = 8; }, {"dv", "apart", "[224, 112, 8, 1]"}},
      {"dk_channel_stride", [](A& a) { a.dk.stride[3] = 0; }, {"dk", "channel stride 1", "0]"}},
      {"dq_is_dout", [](A& a) { a.dq.data = a.dout.data; }, {"dq", "of its own", "dout"}},
      {"dk_is_dv", [](A& a) { a.dk = a.dv; }, {"dv", "of its own", "dk"}},
      {"dv_in_o", [](A& a) { a.dv.data = shifted(a.o.data, 64); }, {"dv", "of its own", "o"}},
      {"dq_in_dlse",
       [](A& a) {
         a.dlse = {static_cast<float*>(shifted(a.dq.data, 16)), {20, 5, 1}};
       },
       {"dq", "of its own", "dlse"}},
      {"dlse_stride_overflow",
       [](A& a) {
         a.dlse = {static_cast<float*>(a.dout.data), {20, int64_t{1} << 62, 1}};
       },
       {"dlse", "2^57 bytes", "4611686018427387904"}},
      {"dlse_misaligned",
       [](A& a) {
         a.dlse = {reinterpret_cast<float*>(shifted(a.dout.data, 1)), {20, 5, 1}};
       },
       {"dlse", "aligned to 4", "0x"}},
      {"dlse_negative_stride",
       [](A& a) {
         a.dlse = {static_cast<float*>(a.dout.data), {20, -5, 1}};
       },
       {"dlse", "non-negative", "-5"}},
  };
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

template <typename Args>
void expect_words(const BadCase<Args>& c, const std::string& message) {
  for (const char* word : c.words)
    EXPECT_NE(message.find(word), std::string::npos) << "no \"" << word << "\" in: " << message;
}

template <typename Args>
void expect_refused(const BadCase<Args>& c, const Args& args, void (*call)(const Args&),
                    const SmallProblem& problem) {
  try {
    call(args);
    ADD_FAILURE() << "the C++ call accepted it";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), c.kind) << e.what();
    expect_words(c, e.what());
  }
  EXPECT_TRUE(problem.untouched()) << "the C++ call wrote before it refused";
}

class BadForward : public ::testing::TestWithParam<BadCase<ForwardArgs>> {};

TEST_P(BadForward, IsRefused) {
  SmallProblem problem;
  ForwardArgs args = problem.forward_args();
  GetParam().spoil(args);
  expect_refused<ForwardArgs>(GetParam(), args, &forward, problem);
  CForward c(args);
  EXPECT_EQ(sagebwd_forward(&c.args), static_cast<int>(GetParam().kind));
  expect_words(GetParam(), sagebwd_last_error());
  EXPECT_TRUE(problem.untouched()) << "the C call wrote before it refused";
}

class BadBackward : public ::testing::TestWithParam<BadCase<BackwardArgs>> {};

TEST_P(BadBackward, IsRefused) {
  SmallProblem problem;
  BackwardArgs args = problem.backward_args();
  GetParam().spoil(args);
  expect_refused<BackwardArgs>(GetParam(), args, &backward, problem);
  CBackward c(args);
  EXPECT_EQ(sagebwd_backward(&c.args), static_cast<int>(GetParam().kind));
  expect_words(GetParam(), sagebwd_last_error());
  EXPECT_TRUE(problem.untouched()) << "the C call wrote before it refused";
}

INSTANTIATE_TEST_SUITE_P(Api, BadForward, ::testing::ValuesIn(forward_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Api, BadBackward, ::testing::ValuesIn(backward_cases()), case_name);

/// The table above proves nothing unless the unspoilt arguments are accepted.
TEST(BadInput, UnspoiltArgumentsAreAccepted) {
  SmallProblem problem;
  EXPECT_NO_THROW(forward(problem.forward_args()));
  EXPECT_NO_THROW(backward(problem.backward_args()));
  EXPECT_FALSE(problem.untouched());
}

TEST(BadInput, UnspoiltListsAreAccepted) {
  for (bool by_offset : {false, true}) {
    SmallProblem problem;
    ForwardArgs f = problem.forward_args();
    by_offset ? list(f, kRow) : list(f, kFirst, 2, kOne);
    EXPECT_NO_THROW(forward(f));
    BackwardArgs b = problem.backward_args();
    by_offset ? list(b, kRow) : list(b, kFirst, 2, kOne);
    std::vector<std::byte> workspace(workspace_size(b));
    b.workspace = workspace.data(), b.workspace_bytes = workspace.size();
    EXPECT_NO_THROW(backward(b));
    EXPECT_FALSE(problem.untouched());
  }
}

/// Read-only tensors may be broadcast, and dimensions of size one may have any stride.
TEST(BadInput, BroadcastInputsAreAccepted) {
  SmallProblem problem({.b = 1, .h = 4, .hk = 2, .nq = 5, .nk = 7, .d = 16});
  ForwardArgs args = problem.forward_args();
  args.k.stride = {0, 0, 16, 1};
  args.v.stride = {0, 112, 0, 1};
  args.o.stride[0] = int64_t{1} << 62;
  EXPECT_NO_THROW(forward(args));
}

/// Views of packed buffers interleave: their ranges overlap, but their elements do not. The results
/// equal those of separate buffers.
TEST(BadInput, InterleavedViewsAreAccepted) {
  const testing::Sizes s{.b = 2, .h = 4, .hk = 2, .nq = 7, .nk = 7, .d = 16};
  SmallProblem own(s), packed(s);
  std::vector<float> qkv(2 * 7 * 8 * 16), gradients(2 * 7 * 8 * 16), ol(2 * 7 * 4 * 17);
  // [b, s, h + hk + hk, d]: q, k and v side by side in every token
  const auto slice = [](std::vector<float>& buffer, int64_t head, int64_t heads) {
    return TensorView{buffer.data() + head * 16, Dtype::f32, {2, heads, 7, 16}, {896, 16, 128, 1}};
  };
  const auto copy = [&](const TensorView& from, const TensorView& to) {
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t h = 0; h < from.shape[1]; ++h)
        for (int64_t n = 0; n < 7; ++n)
          for (int64_t c = 0; c < 16; ++c) {
            const auto at = [&](const TensorView& t) {
              return static_cast<float*>(t.data) + b * t.stride[0] + h * t.stride[1] +
                     n * t.stride[2] + c;
            };
            *at(to) = *at(from);
          }
  };
  ForwardArgs f = own.forward_args(), pf = packed.forward_args();
  forward(f);
  const TensorView q = slice(qkv, 0, 4), k = slice(qkv, 4, 2), v = slice(qkv, 6, 2);
  copy(f.q, q), copy(f.k, k), copy(f.v, v);
  pf.q = q, pf.k = k, pf.v = v;
  // O and LSE side by side: sixteen channels, then the row's statistic
  pf.o = {ol.data(), Dtype::f32, {2, 4, 7, 16}, {4 * 7 * 17, 7 * 17, 17, 1}};
  pf.lse = {ol.data() + 16, {4 * 7 * 17, 7 * 17, 17}};
  ASSERT_NO_THROW(forward(pf));
  BackwardArgs b = own.backward_args(), pb = packed.backward_args();
  ASSERT_NO_THROW(backward(b));
  pb.q = q, pb.k = k, pb.v = v, pb.o = pf.o, pb.lse = pf.lse;
  pb.dq = slice(gradients, 0, 4), pb.dk = slice(gradients, 4, 2), pb.dv = slice(gradients, 6, 2);
  ASSERT_NO_THROW(backward(pb));
  for (const auto& [want, got] :
       {std::pair{b.o, pb.o}, {b.dq, pb.dq}, {b.dk, pb.dk}, {b.dv, pb.dv}}) {
    std::vector<float> flat(static_cast<size_t>(2 * want.shape[1] * 7 * 16));
    copy(got, contiguous(flat.data(), Dtype::f32, want.shape));
    EXPECT_EQ(own.values(want), flat);
  }
  pb.dk = slice(gradients, 3, 2);  // its first head is the last of dq
  EXPECT_THROW(backward(pb), Error);
}

/// The strides of a tensor without elements do not matter.
TEST(BadInput, EmptyTensorsMayHaveAnyStrides) {
  SmallProblem problem({.b = 2, .h = 4, .hk = 2, .nq = 5, .nk = 0, .d = 16});
  ForwardArgs args = problem.forward_args();
  args.k.stride = args.v.stride = {int64_t{1} << 62, int64_t{1} << 62, -1, 7};
  EXPECT_NO_THROW(forward(args));
}

TEST(BadInput, WorkspaceSizeChecksShapesButNotMemory) {
  SmallProblem problem;
  ForwardArgs args = problem.forward_args();
  const size_t bytes = workspace_size(args);
  args.workspace = nullptr;
  args.workspace_bytes = 0;
  args.lse.data = nullptr;
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.o}) t->data = nullptr;
  EXPECT_EQ(workspace_size(args), bytes);
  args.k.shape[3] = 24;
  EXPECT_THROW((void)workspace_size(args), Error);
}

/// A valid call that no implementation can serve is a different kind of error, and names every
/// implementation.
TEST(BadInput, UnservedCallListsRefusals) {
  SmallProblem problem;
  ForwardArgs args = problem.forward_args();
  args.device = Device::cuda;
  const std::vector<Candidate> candidates = explain(args);
  for (const Candidate& c : candidates)
    if (c.supported) GTEST_SKIP() << c.name << " serves CUDA calls in this build";
  try {
    forward(args);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::unsupported);
    for (const Candidate& c : candidates) {
      EXPECT_NE(std::string(e.what()).find(c.name), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find(c.reason), std::string::npos) << e.what();
    }
  }
  CForward c(args);
  EXPECT_EQ(sagebwd_forward(&c.args), SAGEBWD_UNSUPPORTED);
  EXPECT_TRUE(problem.untouched());
}

}  // namespace
}  // namespace sagebwd
