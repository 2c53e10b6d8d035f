// SPDX-License-Identifier: Apache-2.0
// Checks. Each message says what was expected and what came. It is a stream, so values can be
// inserted.
#pragma once

#include <sstream>

#include "sagebwd/error.h"

#define SAGE_THROW(kind, stream_expr)                  \
  do {                                                 \
    std::ostringstream sage_message_;                  \
    sage_message_ << stream_expr;                      \
    throw ::sagebwd::Error(kind, sage_message_.str()); \
  } while (0)

/// The caller's argument is wrong.
#define SAGE_CHECK(cond, stream_expr)                                             \
  do {                                                                            \
    if (!(cond)) SAGE_THROW(::sagebwd::ErrorKind::invalid_argument, stream_expr); \
  } while (0)

/// Our own invariant is broken.
#define SAGE_INTERNAL(cond)                                                    \
  do {                                                                         \
    if (!(cond))                                                               \
      SAGE_THROW(::sagebwd::ErrorKind::internal,                               \
                 __FILE__ << ":" << __LINE__ << ": broken invariant: " #cond); \
  } while (0)
