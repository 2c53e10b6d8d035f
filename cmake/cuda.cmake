# SPDX-License-Identifier: Apache-2.0
# Whether the CUDA backend is built, for which GPUs, and with which flags. Sets SAGEBWD_HAS_CUDA.

set(SAGEBWD_CUDA AUTO CACHE STRING
    "Build the CUDA backend: AUTO (when nvcc 12.8 or later works here), ON (or fail) or OFF")
set_property(CACHE SAGEBWD_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SAGEBWD_CUDA_ARCHITECTURES AUTO CACHE STRING
    "GPUs to build for: AUTO (those of this machine, or ALL where there is none), ALL, or a list as in CMAKE_CUDA_ARCHITECTURES")
set_property(CACHE SAGEBWD_CUDA_ARCHITECTURES PROPERTY STRINGS AUTO ALL)

# A release serves all of these; its PTX serves GPUs that come later.
set(_all_gpus 80-real 86-real 89-real 90-real 100-real 120-real 80-virtual)

# Sets `nvcc` to the compiler's path, or `why` to the reason why there is none that works.
function(sagebwd_find_nvcc nvcc why)
  if(CMAKE_CUDA_COMPILER)
    set(path ${CMAKE_CUDA_COMPILER})
  elseif(DEFINED ENV{CUDACXX})
    set(path $ENV{CUDACXX})
  else()
    find_program(SAGEBWD_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(SAGEBWD_NVCC)
    set(path ${SAGEBWD_NVCC})
  endif()
  if(NOT path)
    set(${why} "nvcc was not found: put it on the PATH, or its path into CUDACXX" PARENT_SCOPE)
    return()
  endif()

  execute_process(COMMAND ${path} --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${text}")
  if(NOT status EQUAL 0 OR CMAKE_MATCH_1 STREQUAL "")
    set(${why} "${path} does not run" PARENT_SCOPE)
    return()
  elseif(CMAKE_MATCH_1 VERSION_LESS 12.8)
    set(${why} "${path} is version ${CMAKE_MATCH_1}, 12.8 or later is needed" PARENT_SCOPE)
    return()
  endif()

  # It may still lack a host compiler that it accepts, or the runtime library.
  set(probe ${CMAKE_BINARY_DIR}/CMakeFiles/sagebwd_nvcc)
  if(NOT EXISTS ${probe}/works)
    file(WRITE ${probe}/probe.cu "#include <cuda_runtime.h>\n#include <string>\n__global__ void kernel() {}\nint main() { kernel<<<1, 1>>>(); }\n")
    execute_process(COMMAND ${path} -std=c++20 -arch=sm_80 -cudart=static probe.cu -o works
      WORKING_DIRECTORY ${probe} OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      string(REGEX MATCH "[^\n]*(error|fatal)[^\n]*" line "${text}")
      set(${why} "${path} cannot build a small program (${line})" PARENT_SCOPE)
      return()
    endif()
  endif()
  set(${nvcc} ${path} PARENT_SCOPE)
endfunction()

# Sets `gpus` to the architectures of this machine's GPUs, as far as the kernels and the compiler know them.
function(sagebwd_gpus_here nvcc gpus)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status)
  set(found "")
  if(status EQUAL 0)
    execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE known)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${text}")
    foreach(capability ${capabilities})
      string(REPLACE "." "" number ${capability})
      if(number LESS 80)
        message(STATUS "sagebwd: a GPU of compute capability ${capability} is here; 8.0 or later is needed")
      elseif(known MATCHES "compute_${number}\n")
        list(APPEND found ${number}-real)
      else()
        list(APPEND found 80-virtual)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES found)
  endif()
  set(${gpus} "${found}" PARENT_SCOPE)
endfunction()

set(SAGEBWD_HAS_CUDA OFF)
if(SAGEBWD_CUDA STREQUAL "AUTO" OR SAGEBWD_CUDA)
  sagebwd_find_nvcc(_nvcc _why)
  if(_nvcc)
    set(SAGEBWD_HAS_CUDA ON)
  elseif(SAGEBWD_CUDA STREQUAL "AUTO")
    message(STATUS "sagebwd: no CUDA backend: ${_why}")
  else()
    message(FATAL_ERROR "SAGEBWD_CUDA=${SAGEBWD_CUDA}: ${_why}")
  endif()
endif()
if(NOT SAGEBWD_HAS_CUDA)
  return()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  if(SAGEBWD_CUDA_ARCHITECTURES STREQUAL "AUTO")
    sagebwd_gpus_here(${_nvcc} CMAKE_CUDA_ARCHITECTURES)
  elseif(NOT SAGEBWD_CUDA_ARCHITECTURES STREQUAL "ALL")
    set(CMAKE_CUDA_ARCHITECTURES ${SAGEBWD_CUDA_ARCHITECTURES})
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES ${_all_gpus})
  endif()
endif()
set(CMAKE_CUDA_COMPILER ${_nvcc})
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
message(STATUS "sagebwd: CUDA backend for ${CMAKE_CUDA_ARCHITECTURES}, by nvcc ${CMAKE_CUDA_COMPILER_VERSION}")

add_library(sagebwd_cuda_flags INTERFACE)
# CMake before 3.30 drops CUDA_STANDARD 20 with this compiler, so the standard is passed by hand.
target_compile_options(sagebwd_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wextra>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SAGEBWD_WERROR}>>:-Werror=all-warnings>)
