# SPDX-License-Identifier: Apache-2.0
# Compile flags every target of the project shares.

add_library(sagebwd_flags INTERFACE)
target_compile_features(sagebwd_flags INTERFACE cxx_std_20)
target_compile_options(sagebwd_flags INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
  # gcc 12 sees overlapping copies inside std::string's operator+ that are not there (GCC bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
  # Codes must be bit-equal between instruction sets, forward and backward: no silent fused multiply-adds.
  -ffp-contract=off
  $<$<BOOL:${SAGEBWD_WERROR}>:-Werror>)

set(SAGEBWD_SANITIZE "" CACHE STRING "Build with a sanitizer: address;undefined or thread")
if(SAGEBWD_SANITIZE)
  string(REPLACE ";" "," _sanitizers "${SAGEBWD_SANITIZE}")
  target_compile_options(sagebwd_flags INTERFACE -fsanitize=${_sanitizers} -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer)
  target_link_options(sagebwd_flags INTERFACE -fsanitize=${_sanitizers})
endif()
