#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Whole training steps of the 325M model: tokens per second, MFU, memory; PyTorch's attention and INT8, one process each.
#   throughput.sh OUT [DATA]
# ARMS in the environment: which of them, in order.
# Without DATA: the standard library's bytes with a vocabulary of 50257, which costs what BPE tokens cost.
source "$(dirname "$0")/model.sh"
out=$1 data=${2:-}
size=${SIZE:---preset 325m --tokens-per-step 128K --micro-batch 8 --compile inductor}
read -r -a size <<< "$size"
for arm in ${ARMS:-fpa paper vectorwise}; do
  case $arm in
    fpa) attention=(--attention fpa) ;;
    *) attention=(--attention sagebwd --recipe "$arm") ;;
  esac
  "$PYTHON" -m sagebwd.train "${size[@]}" "${attention[@]}" --data "$data" --vocab "${VOCAB:-50257}" --steps "${STEPS:-12}" \
    --warmup 2 --eval-every 0 --eval-tokens 32K --out "$out/throughput/$arm" --overwrite --keep 0
done
record throughput_325m "$out/throughput"/*/
