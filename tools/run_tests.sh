#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `make test`: every part runs even when an earlier one failed; a summary closes the log.
# JOBS: compile jobs. FUZZ: number of cases of an additional, long fuzz run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
jobs=${JOBS:-$(nproc)}
start=$SECONDS
summary=()
failed=()

# part NAME COMMAND...: runs the command under a headline and notes how it went.
part() {
  local name=$1 began=$SECONDS result=ok
  shift
  printf '\n== %s\n' "$name"
  if ! "$@"; then
    result=FAILED
    failed+=("$name")
  fi
  summary+=("$(printf '%-22s %-6s %4d s' "$name" "$result" $((SECONDS - began)))")
}

# Older thread sanitizers cannot place their memory where the kernel randomises addresses widely.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2> /dev/null; then fixed_addresses=(setarch "$(uname -m)" -R); fi

build() { cmake --preset "$1" > /dev/null && cmake --build "$2" -j "$jobs" "${@:3}"; }
run_ctest() { ctest --test-dir "$1" --output-on-failure --no-tests=error "${@:2}"; }
# These tests keep one core busy, mostly; so the trainer's run beside the others.
python_tests() {
  local log=build/trainer_tests.log result=0 trainer
  .venv/bin/python -m pytest tests/python/train > "$log" 2>&1 &
  trainer=$!
  .venv/bin/python -m pytest tests/python --ignore=tests/python/train || result=1
  wait "$trainer" || result=1
  cat "$log"
  return "$result"
}
sanitizer() {
  build "$1" "build-$1" --target sagebwd_tests &&
    ${fixed_addresses[@]+"${fixed_addresses[@]}"} ctest --test-dir "build-$1" --output-on-failure --no-tests=error
}
# With a GPU its tests run; with only a compiler the kernels are compiled for the target they are tuned on, where a
# tuned kernel that spills is an error, and so are products of a warpgroup that ptxas serialises.
has_nvcc() { type -P nvcc > /dev/null || type -P /usr/local/cuda/bin/nvcc > /dev/null; }
cuda() {
  if tools/setup/has_gpu.sh; then
    .venv/bin/python tools/gpu_check tests frontend
  elif has_nvcc; then
    cmake -S . -B build-cuda -G Ninja -DSAGEBWD_CUDA=ON -DSAGEBWD_WERROR=ON -DCMAKE_CUDA_ARCHITECTURES=90-real \
      -DSAGEBWD_BUILD_TOOLS=OFF -DSAGEBWD_BUILD_TESTS=OFF > /dev/null &&
      cmake --build build-cuda -j "$jobs" --target sagebwd_cuda_kernels sagebwd_cuda_sm90 sagebwd_cuda_host &&
      .venv/bin/python tools/gpu_check --stale
  else
    echo 'no nvcc here: the CUDA code was not compiled'
    .venv/bin/python tools/gpu_check --stale
  fi
}
fuzz() { SAGEBWD_FUZZ_CASES=$FUZZ build/bin/sagebwd_tests --gtest_brief=1 --gtest_filter='*Fuzz*'; }

# Fetching packages leaves the cores idle, so it goes on beside the build.
mkdir -p build
tools/setup/venv.sh .venv tests/requirements.txt > build/venv.log 2>&1 &
venv=$!
virtual_environment() {
  local result=0
  wait "$venv" || result=1
  cat build/venv.log
  return "$result"
}

part build build release build
part "virtual environment" virtual_environment
part style tools/check_style.sh .venv
if [ -x build/bin/sagebwd_tests ]; then
  part "C++ tests" run_ctest build -j2 -LE 'package|emulator'
  part "Python package" tools/setup/package.sh .venv
  part "Python tests" python_tests
  [ -n "${FUZZ:-}" ] && part "fuzz, $FUZZ cases" fuzz
  part "CUDA kernels on CPU" run_ctest build -j2 -L emulator
  part "CUDA code" cuda
  part "address, undefined" sanitizer asan
  part "thread" sanitizer tsan
  part "installed package" run_ctest build -L package
fi

printf '\n'
printf '  %s\n' "${summary[@]}"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'make test: FAILED (%s) after %d s\n' "$(IFS=,; echo "${failed[*]}")" $((SECONDS - start))
  exit 1
fi
printf 'make test: all passed in %d s\n' $((SECONDS - start))
