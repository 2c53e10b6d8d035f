// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library. The C interface turns its kind into a status code.
#pragma once

#include <stdexcept>
#include <string>

#include "sagebwd/types.h"

namespace sagebwd {

enum class ErrorKind : int {
  invalid_argument = 1,  // the caller's argument is wrong; nothing was written
  unsupported =
      2,  // a valid request no implementation here can serve; the message lists every refusal
  internal = 3,  // our own invariant is broken: please report it
};

class SAGEBWD_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace sagebwd
