// SPDX-License-Identifier: Apache-2.0
// A function with a stack of its own that can be left in the middle and gone on with later.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <memory>

namespace sagebwd::emulator {

class Fiber {
 public:
  /// Calls begin() first, and leave() whenever there is nothing to do; never returns.
  using Entry = void (*)();

  explicit Fiber(Entry entry);

  /// Goes on with the fiber until it leaves.
  void enter();
  void begin();
  /// Back to enter(); called on the fiber.
  void leave();

 private:
  static void jump(jmp_buf& from, jmp_buf& to);
  void announce_switch(bool to_fiber);

  std::unique_ptr<std::byte[]> stack_;
  ucontext_t first_;  // until the fiber has been entered once
  bool started_ = false;
  jmp_buf inside_, outside_;
  // Bounds of the stack that enter() was called on, for the address sanitizer.
  const void* outer_bottom_ = nullptr;
  size_t outer_size_ = 0;
};

}  // namespace sagebwd::emulator
