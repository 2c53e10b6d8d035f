// SPDX-License-Identifier: Apache-2.0
#include "spec/attn_case.h"

#include <gtest/gtest.h>

#include "sagebwd/error.h"

namespace sagebwd::spec {
namespace {

std::string error_of(const std::string& text) {
  try {
    AttnCase::parse(text);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::invalid_argument);
    return e.what();
  }
  return "";
}

TEST(AttnCase, ReadsTheDocumentedLine) {
  const auto c = AttnCase::parse("b1 h8 hk2 nq4096 nk2048 d128 causal f16 paper bshd seed7");
  EXPECT_EQ(c.b, 1);
  EXPECT_EQ(c.h, 8);
  EXPECT_EQ(c.hk, 2);
  EXPECT_EQ(c.nq, 4096);
  EXPECT_EQ(c.nk, 2048);
  EXPECT_EQ(c.d, 128);
  EXPECT_TRUE(c.mask.causal);
  EXPECT_EQ(c.dtype, Dtype::f16);
  EXPECT_EQ(c.recipe.scheme, Scheme::paper);
  EXPECT_EQ(c.layout, Layout::bshd);
  EXPECT_EQ(c.seed, 7u);
  EXPECT_EQ(c.recipe.seed, 7u);
  EXPECT_EQ(c.to_string(), "b1 h8 hk2 nq4096 nk2048 d128 causal f16 paper bshd seed7");
}

TEST(AttnCase, LeavesDefaultsAndLetsHkFollowH) {
  const auto c = AttnCase::parse("h6 n100");
  EXPECT_EQ(c.to_string(), "b1 h6 hk6 nq100 nk100 d64 full bf16 vectorwise bhsd seed1");
  EXPECT_EQ(AttnCase{}.to_string(), AttnCase::parse("").to_string());
}

TEST(AttnCase, OrderDoesNotMatter) {
  // Switches refine the preset even when they stand before it.
  const auto a = AttnCase::parse("lift=O smooth_q=on paper d32 h4 bf16");
  const auto b = AttnCase::parse("  h4\td32 paper bf16 smooth_q=on\nlift=O ");
  EXPECT_EQ(a.to_string(), b.to_string());
  EXPECT_EQ(a.recipe.high_precision, kMatmulO);
  EXPECT_TRUE(a.recipe.smooth_q);
}

TEST(AttnCase, RoundTrips) {
  for (const char* text : {
           "b1 h8 hk2 nq4096 nk4096 d64 causal bf16 vectorwise bhsd seed1",
           "b1 h2 hk2 nq64 nk64 d192 dv=128 causal bf16 vectorwise bhsd seed1",
           "b3 h5 hk1 nq17 nk129 d256 full align=top_left window=64,-1 f32 paper bshd "
           "seed18446744073709551615",
           "b2 h2 hk2 nq64 nk64 d64 full bf16 vectorwise bhsd seed0 tile=128x64 smooth_k=off "
           "rotate=off rounding=dither lift=S,S',dK",
           "b1 h1 hk1 nq64 nk64 d64 full bf16 paper bhsd seed1 tile=64x64 smooth_k=off "
           "smooth_q=on lift=O,dP",
           "b0 h1 hk1 nq0 nk0 d8 causal window=0,5 f16 vectorwise bhsd seed1",
           "b1 h1 hk1 nq64 nk64 d64 full scale=-0.1 f16 vectorwise bhsd seed1",
           "b1 h1 hk1 nq64 nk64 d64 full scale=-0.1 softcap=0.5 f16 vectorwise bhsd seed1",
           "b1 h1 hk1 nq64 nk64 d64 full bf16 vectorwise bhsd seed1 rotate=off "
           "rounding=dither:dQ",
           "b1 h1 hk1 nq64 nk64 d64 full bf16 paper bhsd seed1 rotate=on rounding=dither:O,dV,dK",
           "b1 h1 hk1 nq640 nk64 d64 full bf16 vectorwise bhsd seed1 keep=0.05 blocks=64x192 "
           "lists=mass lead=all",
           "b1 h1 hk1 nq640 nk64 d64 full bf16 vectorwise bhsd seed1 keep=1 blocks=128x64 "
           "lists=random",
       })
    EXPECT_EQ(AttnCase::parse(text).to_string(), text);
}

TEST(AttnCase, ListsHaveAShareOfTheKeyBlocks) {
  const AttnCase c = AttnCase::parse("b2 h3 nq300 nk2000 keep=0.1 blocks=64x128");
  const BlockLists l = c.list_shape();
  EXPECT_EQ(l.rows, 5);
  EXPECT_EQ(l.width, 2);  // of 16
  EXPECT_EQ(l.stride_head, 5);
  EXPECT_EQ(l.stride_batch, 15);
  EXPECT_EQ(l.lead, 1);
  EXPECT_FALSE(AttnCase::parse("n64").has_lists());
  EXPECT_EQ(AttnCase::parse("n64").list_shape().rows, 0);
  EXPECT_THROW(AttnCase::parse("n512 keep=0.1").list_shape(), Error);  // 0.8 of a block
  EXPECT_NE(error_of("keep=0").find("above 0 and up to 1"), std::string::npos);
  EXPECT_NE(error_of("keep=1.5").find("above 0 and up to 1"), std::string::npos);
  EXPECT_NE(error_of("lists=mass").find("expected keep="), std::string::npos);
  EXPECT_NE(error_of("keep=0.5 lists=mess").find("did you mean \"mass\""), std::string::npos)
      << error_of("keep=0.5 lists=mess");
}

TEST(AttnCase, CountsPairsOfListedBlocks) {
  // Rows of 128 queries, blocks of 64 keys; causal, so the mask acts inside listed blocks.
  Problem p = AttnCase::parse("b1 h2 n200 causal d64 keep=0.5").problem();
  const std::vector<int32_t> index{1, 3, 0, 2}, count{2, 2};
  p.blocks.index = index.data(), p.blocks.count = count.data();
  p.blocks.stride_head = 0;  // shared
  // Row 0: block 1 for queries 64 … 127, block 3 for none. Row 1: block 0 for all of 72 queries,
  // block 2 (keys 128 … 191) for queries 128 … 199.
  const int64_t lead = 64 * 65 / 2 + 72 * 64, rest = 64 * 65 / 2 + 8 * 64;
  EXPECT_EQ(count_listed_pairs(p).leading, 2 * lead);
  EXPECT_EQ(count_listed_pairs(p).all, 2 * (lead + rest));
}

TEST(AttnCase, NamesTheBadToken) {
  for (const char* token : {"scale=0", "scale=x", "scale=1x", "scale=nan", "scale=1e-60"})
    EXPECT_NE(error_of(token).find("a number other than 0"), std::string::npos) << token;
  for (const char* token : {"softcap=-1", "softcap=x", "softcap=1x", "softcap=nan", "softcap=inf"})
    EXPECT_NE(error_of(token).find("a positive number"), std::string::npos) << token;
  EXPECT_NE(error_of("h8 quick").find("\"quick\" is unknown"), std::string::npos);
  EXPECT_NE(error_of("x12").find("\"x12\" is unknown"), std::string::npos);
  EXPECT_NE(error_of("colour=red").find("\"colour=red\" is unknown"), std::string::npos);
  EXPECT_NE(error_of("n12k").find("whole number"), std::string::npos);
  EXPECT_NE(error_of("n-3").find("whole number"), std::string::npos);
  EXPECT_NE(error_of("n99999999999999999999").find("whole number"), std::string::npos);
  EXPECT_NE(error_of("h0").find("from 1"), std::string::npos);
  EXPECT_NE(error_of("h8 hk3").find("multiple of hk"), std::string::npos);
  EXPECT_NE(error_of("n64 nk32").find("nk is given twice"), std::string::npos);
  EXPECT_NE(error_of("paper vectorwise").find("recipe is given twice"), std::string::npos);
  EXPECT_NE(error_of("causal full").find("mask is given twice"), std::string::npos);
  EXPECT_NE(error_of("lift=dX").find("\"dX\""), std::string::npos);
  EXPECT_NE(error_of("smooth_k=maybe").find("on or off"), std::string::npos);
  EXPECT_NE(error_of("rotate=90").find("on or off"), std::string::npos);
  EXPECT_NE(error_of("rounding=dither:dP").find("dither of O, dV, dQ or dK"), std::string::npos);
  EXPECT_NE(error_of("rounding=dither:").find("got \"\""), std::string::npos);
  EXPECT_NE(error_of("rounding=nearest:dQ").find("expected nearest"), std::string::npos);
  EXPECT_NE(error_of("window=3").find("window=<left>,<right>"), std::string::npos);
  EXPECT_NE(error_of("tile=64").find("tile=<queries>x<keys>"), std::string::npos);
}

TEST(AttnCase, ViewsFollowTheLayout) {
  float x[1];
  const auto bhsd = AttnCase::parse("b2 h6 hk3 nq5 nk7 d8 bhsd f32");
  EXPECT_EQ(bhsd.q_view(x).shape, (std::array<int64_t, 4>{2, 6, 5, 8}));
  EXPECT_EQ(bhsd.q_view(x).stride, (std::array<int64_t, 4>{240, 40, 8, 1}));
  const auto bshd = AttnCase::parse("b2 h6 hk3 nq5 nk7 d8 bshd f32");
  EXPECT_EQ(bshd.k_view(x).shape, (std::array<int64_t, 4>{2, 3, 7, 8}));
  EXPECT_EQ(bshd.k_view(x).stride, (std::array<int64_t, 4>{168, 8, 24, 1}));
}

TEST(AttnCase, ValuesMayHaveTheirOwnHeadDim) {
  float x[1];
  const auto c = AttnCase::parse("b2 h6 hk3 nq5 nk7 d8 dv=16 bshd f32");
  EXPECT_EQ(c.to_string(), "b2 h6 hk3 nq5 nk7 d8 dv=16 full f32 vectorwise bshd seed1");
  EXPECT_EQ(AttnCase::parse(c.to_string()).value_dim(), 16);
  EXPECT_EQ(c.q_view(x).shape, (std::array<int64_t, 4>{2, 6, 5, 8}));
  EXPECT_EQ(c.o_view(x).shape, (std::array<int64_t, 4>{2, 6, 5, 16}));
  EXPECT_EQ(c.v_view(x).shape, (std::array<int64_t, 4>{2, 3, 7, 16}));
  EXPECT_EQ(c.v_view(x).stride, (std::array<int64_t, 4>{336, 16, 48, 1}));
  EXPECT_EQ(c.o_elements(), 2 * 6 * 5 * 16);
  EXPECT_EQ(c.v_elements(), 2 * 3 * 7 * 16);
  EXPECT_EQ(c.problem().dv, 16);
  // The default, given or not, is no part of the text.
  const auto same = AttnCase::parse("d96 dv=96");
  EXPECT_EQ(same.to_string(), AttnCase::parse("d96").to_string());
  EXPECT_EQ(same.value_dim(), 96);
  EXPECT_NE(error_of("dv=none").find("\"dv=none\""), std::string::npos);
  EXPECT_NE(error_of("d64 dv=8 dv=8").find("given twice"), std::string::npos);
}

TEST(AttnCase, CountsVisiblePairsExactly) {
  EXPECT_EQ(AttnCase::parse("nq5 nk7").visible_pairs(), 35);
  EXPECT_EQ(AttnCase::parse("n64 causal").visible_pairs(), 64 * 65 / 2);
  // Two more keys than queries, diagonal at the bottom right: rows see 3, 4, 5 keys; at the top
  // left 1, 2, 3.
  EXPECT_EQ(AttnCase::parse("nq3 nk5 causal").visible_pairs(), 12);
  EXPECT_EQ(AttnCase::parse("nq3 nk5 causal align=top_left").visible_pairs(), 6);
  // More queries than keys: the first two rows see nothing.
  EXPECT_EQ(AttnCase::parse("nq5 nk3 causal").visible_pairs(), 6);
  EXPECT_EQ(AttnCase::parse("n10 window=2,1").visible_pairs(), 10 + (10 - 1) + (10 - 2) + (10 - 1));
}

TEST(MacCounts, SplitsByArithmetic) {
  const auto c = AttnCase::parse("b2 h4 hk2 n256 d32 paper");
  const int64_t one = int64_t{2} * 4 * 256 * 256 * 32;
  const MacCounts forward = count_macs(c, Direction::forward);
  EXPECT_EQ(forward.int8(), 2 * one);
  EXPECT_EQ(forward.floating(), 0);
  const MacCounts backward = count_macs(c, Direction::backward);
  EXPECT_EQ(backward.int8(), 4 * one);
  EXPECT_EQ(backward.floating(), one);
  EXPECT_EQ(backward.of(kMatmulDP).floating, one);
  EXPECT_EQ(backward.of(kMatmulS).int8, 0);
  EXPECT_EQ(backward.total(), 5 * one);
}

TEST(MacCounts, TwoOfTheBackwardAndOneOfTheForwardHaveTheHeadDimOfV) {
  const auto c = AttnCase::parse("n256 d32 dv=48");
  const int64_t pairs = int64_t{256} * 256;
  EXPECT_EQ(count_macs(c, Direction::forward).total(), pairs * (32 + 48));
  EXPECT_EQ(count_macs(c, Direction::backward).total(), pairs * (3 * 32 + 2 * 48));
  EXPECT_EQ(count_macs(c, Direction::backward).floating(), pairs * 48);
}

TEST(MacCounts, LeavesLiftedMatmulsAndLeadingPairsOutOfInt8) {
  const auto c = AttnCase::parse("n256 d32 vectorwise lift=S");
  const int64_t pairs = int64_t{256} * 256, one = pairs * 32;
  const MacCounts forward = count_macs(c, Direction::forward);
  EXPECT_EQ(forward.of(kMatmulS).floating, one);
  EXPECT_EQ(forward.of(kMatmulO).floating, 0);
  const MacCounts lead = count_macs(c, Direction::forward, {pairs, pairs / 4});
  EXPECT_EQ(lead.of(kMatmulO).floating, one / 4);
  EXPECT_EQ(lead.of(kMatmulO).int8, one * 3 / 4);
  const auto lifted = AttnCase::parse("n256 d32 lift=O");
  EXPECT_EQ(count_macs(lifted, Direction::forward).of(kMatmulO).int8, 0);
}

}  // namespace
}  // namespace sagebwd::spec
