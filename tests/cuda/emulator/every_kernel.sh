#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a test program of the emulator, and fails when a tuned kernel in it has not run. A kernel that another target runs
# is there without code (arch::runs_here): a return and nothing else. Hopper's
# main kernels, and the operand kernel as they need it, have tests of their own.
#   every_kernel.sh MEMORY PROGRAM ARGUMENTS...   MEMORY: of the GPUs to run on, "0 102400" (0: what the target has)
set -euo pipefail
gpus=$1
shift
launches=$(mktemp)
trap 'rm -f "$launches"' EXIT
export SAGEBWD_EMULATOR_LAUNCHES=$launches
for memory in $gpus; do SAGEBWD_EMULATOR_SHARED_MEMORY=$memory "$@"; done
nm --demangle --print-size --defined-only "$1" | awk -v launches="$launches" '
  BEGIN { while ((getline address < launches) > 0) ran[address] = 1 }
  $3 ~ /^[tTW]$/ && /[a-z]_kernel[<(]/ && !/lambda|clone|::plain::|sm90::(backward|forward|listed_forward)_kernel/ && $2 !~ /^0*[0-8]$/ {
    if ($1 in ran) { ++good; next }
    ++bad
    $1 = $2 = $3 = ""
    print "never ran:" $0
  }
  END {
    printf "%d tuned kernels ran, %d did not\n", good, bad
    exit bad > 0 || good == 0
  }'
