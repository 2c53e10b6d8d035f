// SPDX-License-Identifier: Apache-2.0
// Calls that are checked once: memory from the caller's allocator, and support as a value.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "api/small_problem.h"
#include "sagebwd/error.h"

namespace sagebwd::testing {
namespace {

/// Memory for one call, and how often it was asked for.
struct Memory {
  std::vector<std::byte> bytes;
  int asked = 0;
  Allocator allocator() {
    return {[](void* self, size_t size) -> void* {
              auto& memory = *static_cast<Memory*>(self);
              ++memory.asked;
              memory.bytes.resize(size);
              return memory.bytes.data();
            },
            this};
  }
};

TEST(Once, AnAllocatorGivesTheWorkspace) {
  SmallProblem given, asked;
  forward(given.forward_args());
  backward(given.backward_args());
  Memory memory;
  ForwardArgs f = asked.forward_args();
  f.workspace = nullptr, f.allocator = memory.allocator();
  forward(f);
  EXPECT_EQ(memory.asked, 1);
  EXPECT_EQ(memory.bytes.size(), workspace_size(f));
  BackwardArgs b = asked.backward_args();
  b.workspace = nullptr, b.allocator = memory.allocator();
  backward(b);
  EXPECT_EQ(memory.asked, 2);
  EXPECT_EQ(memory.bytes.size(), workspace_size(b));
  EXPECT_EQ(given.outputs(), asked.outputs());
}

TEST(Once, AGivenWorkspaceComesFirst) {
  SmallProblem p;
  Memory memory;
  ForwardArgs f = p.forward_args();
  f.allocator = memory.allocator();
  forward(f);
  EXPECT_EQ(memory.asked, 0);
}

TEST(Once, AnAllocatorThatFailsLeavesTheOutputs) {
  SmallProblem p;
  ForwardArgs f = p.forward_args();
  f.workspace = nullptr;
  f.allocator.run = [](void*, size_t) -> void* { return nullptr; };
  EXPECT_THROW(forward(f), Error);
  f.allocator.run = [](void*, size_t) -> void* { throw std::runtime_error("none left"); };
  EXPECT_THROW(forward(f), std::runtime_error);
  Memory memory;
  f.allocator = memory.allocator();
  f.q.dtype = Dtype::f16;  // not that of k
  EXPECT_THROW(forward(f), Error);
  EXPECT_EQ(memory.asked, 0);
  EXPECT_TRUE(p.untouched());
}

TEST(Once, SupportIsAValue) {
  SmallProblem p;
  ForwardArgs f = p.forward_args();
  BackwardArgs b = p.backward_args();
  EXPECT_EQ(refusal(f), "");
  EXPECT_EQ(refusal(b), "");
  ASSERT_EQ(setenv("SAGEBWD_IMPL", "cpu-none", 1), 0);
  EXPECT_NE(refusal(f).find("SAGEBWD_IMPL pins cpu-none"), std::string::npos);
  EXPECT_NE(refusal(b).find("SAGEBWD_IMPL pins cpu-none"), std::string::npos);
  EXPECT_FALSE(try_forward(f));
  EXPECT_FALSE(try_backward(b));
  EXPECT_THROW(forward(f), Error);
  unsetenv("SAGEBWD_IMPL");
  EXPECT_TRUE(p.untouched());
  f.scale = std::numeric_limits<float>::infinity();  // wrong, not unsupported
  EXPECT_THROW(try_forward(f), Error);
  f.scale = 0;
  EXPECT_TRUE(try_forward(f));
  EXPECT_TRUE(try_backward(b));
  EXPECT_FALSE(p.untouched());
}

}  // namespace
}  // namespace sagebwd::testing
