# SPDX-License-Identifier: Apache-2.0
# The CUDA language and the flags every CUDA file shares.

set(SAGEBWD_CUDA_ARCHITECTURES "80-real;86-real;89-real;90-real;100-real;120-real;80-virtual" CACHE STRING
    "GPUs to build for; the PTX serves those that come later")
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${SAGEBWD_CUDA_ARCHITECTURES})
endif()
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
  set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

add_library(sagebwd_cuda_flags INTERFACE)
# CMake before 3.30 drops CUDA_STANDARD 20 with this compiler, so the standard is passed by hand.
target_compile_options(sagebwd_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wextra>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SAGEBWD_WERROR}>>:-Werror=all-warnings>)
