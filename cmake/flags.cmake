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

# Messages name source files. What is installed must not tell where it was built, nor differ by it.
set(_relative "-ffile-prefix-map=${PROJECT_SOURCE_DIR}=sagebwd")
target_compile_options(sagebwd_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:${_relative}> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${_relative}>)

set(SAGEBWD_SANITIZE "" CACHE STRING "Build with a sanitizer: address;undefined or thread")

# What a release build checks of itself while it runs: copies into buffers of known size, and return addresses behind
# arrays on the stack. Tables of addresses are filled in at load time and read-only from then on.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS "-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3")
check_cxx_source_compiles("#include <string>\nint main() { return std::string().empty() ? 0 : 1; }" SAGEBWD_FORTIFY_3)
unset(CMAKE_REQUIRED_FLAGS)
set(_hardened $<AND:$<CONFIG:Release,RelWithDebInfo,MinSizeRel>,$<STREQUAL:${SAGEBWD_SANITIZE},>>)
target_compile_options(sagebwd_flags INTERFACE
  $<$<AND:${_hardened},$<COMPILE_LANGUAGE:CXX>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=$<IF:$<BOOL:${SAGEBWD_FORTIFY_3}>,3,2>;-fstack-protector-strong>)
target_link_options(sagebwd_flags INTERFACE LINKER:-z,relro,-z,now,-z,noexecstack)

if(SAGEBWD_SANITIZE)
  string(REPLACE ";" "," _sanitizers "${SAGEBWD_SANITIZE}")
  target_compile_options(sagebwd_flags INTERFACE -fsanitize=${_sanitizers} -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer)
  target_link_options(sagebwd_flags INTERFACE -fsanitize=${_sanitizers})
endif()
