// SPDX-License-Identifier: Apache-2.0
// Which keys and tiles the oracles look at, against the band written out pair by pair.
#include <gtest/gtest.h>

#include "ref/recipe_tile.h"
#include "ref/visibility.h"

namespace sagebwd::ref {
namespace {

using Pair = std::pair<int64_t, int64_t>;

RecipeHead head_of(Visibility visible) {
  RecipeHead head;
  head.nq = 150, head.nk = 330, head.visible = std::move(visible);
  head.recipe.tile_q = 64, head.recipe.tile_k = 64;
  return head;
}

TEST(RefVisibility, WithoutABandEveryQuerySeesEveryKey) {
  const Visibility all;
  ASSERT_EQ(all.spans(7, 20).size(), 1u);
  EXPECT_EQ(all.spans(7, 20)[0].begin, 0);
  EXPECT_EQ(all.spans(7, 20)[0].end, 20);
  EXPECT_TRUE(all.spans(7, 0).empty());
}

TEST(RefVisibility, BandsAreClippedToTheKeys) {
  const Visibility band([](int64_t i) { return Pair(i - 5, i + 5); });
  for (int64_t i : {0, 3, 10, 18, 24, 25, 40})
    for (const Span& tile : {Span{0, 20}, Span{8, 16}}) {
      const Span seen = band.inside(i, tile.begin, tile.end);
      for (int64_t j = tile.begin; j < tile.end; ++j)
        EXPECT_EQ(j >= seen.begin && j < seen.end, j >= i - 5 && j < i + 5) << i << " " << j;
      EXPECT_GE(seen.begin, tile.begin);
      EXPECT_LE(seen.end, tile.end);
    }
  EXPECT_TRUE(band.spans(40, 20).empty());
  EXPECT_EQ(band.spans(10, 20).size(), 1u);
}

TEST(RefWalk, VisitsTilesWithAVisiblePair) {
  RecipeHead head = head_of([](int64_t i) { return Pair(i + 60, i + 130); });
  EXPECT_EQ(KeyWalk(head, 0).tiles, (std::vector<int64_t>{0, 1, 2, 3}));  // keys 60 … 192
  EXPECT_EQ(KeyWalk(head, 1).tiles, (std::vector<int64_t>{1, 2, 3, 4}));  // keys 124 … 256
  EXPECT_EQ(KeyWalk(head, 2).tiles, (std::vector<int64_t>{2, 3, 4}));     // keys 188 … 278
  head.visible = [](int64_t i) { return Pair(0, i < 100 ? 0 : 1); };
  EXPECT_TRUE(KeyWalk(head, 0).tiles.empty());
  EXPECT_EQ(KeyWalk(head, 1).tiles, (std::vector<int64_t>{0}));
}

}  // namespace
}  // namespace sagebwd::ref
