#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `make check`, `make test` and `make test-all`: each tier runs what the one before it runs, and more.
# Every part runs even when an earlier one failed; a summary closes the log.
#   run_tests.sh check|test|test-all        JOBS: compile jobs
set -uo pipefail
cd "$(dirname "$0")/.." || exit
tier=${1:-test}
case $tier in
  check) level=0 usual='less time than make test' ;;
  test) level=1 usual='13 minutes' ;;
  test-all) level=2 usual='more time than make test, which takes 13 minutes,' ;;
  *) echo "run_tests.sh: expected check, test or test-all, got \"$tier\"" >&2; exit 2 ;;
esac
jobs=${JOBS:-$(nproc)}
start=$SECONDS
summary=()
failed=()
# Threads that wait by spinning take the cores from those they wait for, five to ten times over on a busy machine.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
. tools/setup/ccache.sh

# part SECONDS NAME COMMAND...: runs the command under a headline and notes how it went. SECONDS: what it usually takes
# from a fresh clone, on two cores; 0: nobody has timed it.
part() {
  local usually=$1 name=$2 began=$SECONDS result=ok
  shift 2
  local words=
  if [ "$usually" -gt 0 ]; then words="; this part usually takes about $usually s"; fi
  printf '\n== %s (%d s so far%s)\n' "$name" $((SECONDS - start)) "$words"
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
python_tests() { .venv/bin/python -m pytest -n 2 -q "$@"; }
sanitizer() {
  build "$1" "build-$1" --target sagebwd_tests &&
    ${fixed_addresses[@]+"${fixed_addresses[@]}"} ctest --test-dir "build-$1" --output-on-failure --no-tests=error
}
# Compiles the kernels for these targets. A tuned kernel that spills is an error, and so are products of a warpgroup
# that ptxas serialises.
has_nvcc() { type -P nvcc > /dev/null || type -P /usr/local/cuda/bin/nvcc > /dev/null; }
compile_kernels() {
  cmake -S . -B build-cuda -G Ninja -DSAGEBWD_CUDA=ON -DSAGEBWD_WERROR=ON "-DCMAKE_CUDA_ARCHITECTURES=$1" \
    -DSAGEBWD_BUILD_TOOLS=OFF -DSAGEBWD_BUILD_TESTS=OFF > /dev/null &&
    cmake --build build-cuda -j "$jobs" --target sagebwd_cuda_kernels sagebwd_cuda_sm90 sagebwd_cuda_host
}
cuda() {
  if tools/setup/has_gpu.sh; then
    .venv/bin/python tools/gpu_check tests frontend
    return
  fi
  if has_nvcc; then
    compile_kernels "$1" || return
  else
    echo 'no nvcc here: the CUDA code was not compiled'
  fi
  .venv/bin/python tools/gpu_check --stale
}
long_fuzz() { SAGEBWD_FUZZ_CASES=3000 build/bin/sagebwd_tests --gtest_brief=1 --gtest_filter='*Fuzz*'; }

echo "make $tier: from a fresh clone this takes $usual on two idle cores"

# Fetching packages leaves the cores idle, so it goes on beside the build.
mkdir -p build
requirements=(tests/requirements.txt)
[ $level -ge 2 ] && requirements+=(tests/requirements-frameworks.txt)
tools/setup/venv.sh .venv "${requirements[@]}" > build/venv.log 2>&1 &
venv=$!
virtual_environment() {
  local result=0
  wait "$venv" || result=1
  cat build/venv.log
  return "$result"
}

targets=(--target sagebwd_tests bin/sagebwd)
[ $level -ge 1 ] && targets+=(emulated_tests)
[ $level -ge 2 ] && targets=()
usually=(0 260 0)
part "${usually[level]}" build build release build ${targets[@]+"${targets[@]}"}
part 30 "virtual environment" virtual_environment
part 5 style tools/check_style.sh .venv
if [ -x build/bin/sagebwd_tests ]; then
  part 90 "C++ tests" run_ctest build -j2 -LE 'package|emulator'
  part 80 "Python package" tools/setup/package.sh .venv
  case $level in
    0) part 0 "Python tests" python_tests -m 'not slow and not long' ;;
    1) part 150 "Python tests" python_tests -m 'not long' ;;
    2) part 0 "Python tests" python_tests ;;
  esac
  if [ $level -ge 1 ]; then
    emulated='^emulator$' gpus=90-real
    [ $level -ge 2 ] && emulated=emulator gpus='80-real;89-real;90-real;100-real;120-real'
    part 160 "CUDA kernels on CPU" run_ctest build -j2 -L "$emulated"
    part 150 "CUDA code" cuda "$gpus"
    part 80 "address, undefined" sanitizer asan
  fi
  if [ $level -ge 2 ]; then
    part 0 "long fuzz" long_fuzz
    part 0 "thread" sanitizer tsan
    part 0 "documentation" make -s docs
    part 0 "installed package" run_ctest build -L package
  fi
fi

printf '\n'
printf '  %s\n' "${summary[@]}"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'make %s: FAILED (%s) after %d s\n' "$tier" "$(IFS=,; echo "${failed[*]}")" $((SECONDS - start))
  exit 1
fi
printf 'make %s: all passed in %d s\n' "$tier" $((SECONDS - start))
