// SPDX-License-Identifier: Apache-2.0
// setcontext starts a fiber; from then on _setjmp switches stacks, without system calls: a thread
// block switches millions of times.
#undef _FORTIFY_SOURCE  // its longjmp takes another stack for a mistake
#include "emulator/fiber.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace sagebwd::emulator {
namespace {

constexpr size_t kStack = 256 * 1024;  // room for unoptimised and instrumented builds

}  // namespace

Fiber::Fiber(Entry entry) : stack_(new std::byte[kStack]) {
  getcontext(&first_);
  first_.uc_stack.ss_sp = stack_.get();
  first_.uc_stack.ss_size = kStack;
  first_.uc_link = nullptr;
  makecontext(&first_, entry, 0);
}

void Fiber::jump(jmp_buf& from, jmp_buf& to) {
  if (_setjmp(from) == 0) _longjmp(to, 1);
}

void Fiber::enter() {
  announce_switch(true);
  if (started_) {
    jump(outside_, inside_);
  } else {
    started_ = true;
    if (_setjmp(outside_) == 0) setcontext(&first_);
  }
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void Fiber::begin() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &outer_bottom_, &outer_size_);
#endif
}

void Fiber::leave() {
  announce_switch(false);
  jump(inside_, outside_);
  begin();
}

void Fiber::announce_switch([[maybe_unused]] bool to_fiber) {
#ifdef __SANITIZE_ADDRESS__
  to_fiber ? __sanitizer_start_switch_fiber(nullptr, stack_.get(), kStack)
           : __sanitizer_start_switch_fiber(nullptr, outer_bottom_, outer_size_);
#endif
}

}  // namespace sagebwd::emulator
