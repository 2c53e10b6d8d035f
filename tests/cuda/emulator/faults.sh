#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Whether the emulator finds mistakes in a pipeline: makes them on purpose (emulator/faults.h), one at a time, and fails
# if the tests of Hopper's kernels pass all the same. Late copies.
#   faults.sh PROGRAM all|few
set -uo pipefail
export SAGEBWD_TEST_IMPL=cuda-sm90 SAGEBWD_EMULATOR_COPIES=late
program=$1
# tests FAULT FILTER: their exit status
tests() { SAGEBWD_EMULATOR_FAULT=$1 timeout 60 "$program" --gtest_brief=1 --gtest_fail_fast --gtest_filter="$2" >"$log" 2>&1; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT

dense=Faults.Dense  # forward: blocks of 512 threads; backward: of 384
listed=Faults.Listed  # forward: of 384
missed=0
for filter in $dense $listed; do
  tests "" "$filter" || { echo "$filter fails without a fault"; cat "$log"; exit 1; }
done
# Barriers, in the order of init_barriers. Dense forward: full and empty of three stages, then of two slots. Backward:
# keys, then front and back of two places, then full and then empty of dS. Listed forward: four stages, two slots.
anywhere="copy_place swizzle a_place b_place product_wait pending commit fence sums"
forward="wait:0 wait:1 wait:6 parity:0 parity:1 parity:6 parity:7 bytes:0 bytes:6 arrivals:1 arrive:1 arrive:7"
backward="wait:0 wait:1 wait:2 wait:5 parity:1 parity:2 parity:5 bytes:0 bytes:1 bytes:2 arrivals:5 arrive:5 named_barrier"
list="wait:0 wait:8 parity:0 parity:1 parity:8 bytes:0 bytes:8 arrivals:1 arrive:1"
try() {
  local filter=$1 threads=$2 fault status
  for fault in "${@:3}"; do
    tests "$fault/$threads" "$filter"
    status=$?
    if [ $status = 0 ] || [ $status = 124 ]; then  # 124: it hangs
      echo "not found: $fault, $filter, blocks of $threads threads, status $status"
      missed=$((missed + 1))
    else
      echo "found: $fault, $filter, blocks of $threads: $(grep -m1 -E 'emulated kernel|actual' "$log" || echo "status $status")"
    fi
  done
}
if [ "$2" = few ]; then
  try $dense 512 swizzle a_place pending commit wait:1 parity:1 bytes:0 bytes:6
  try $dense 384 copy_place b_place product_wait fence wait:2 parity:5 bytes:0 bytes:1 arrivals:5
  try $listed 384 wait:0 parity:1 bytes:8
  exit $((missed > 0))
fi
try $dense 512 $anywhere $forward
try $dense 384 $anywhere $backward
try $listed 384 $anywhere $list
exit $((missed > 0))
