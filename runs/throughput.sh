#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Whole training steps of the 325M model: tokens per second, MFU, memory; PyTorch's attention and INT8, one process each.
#   throughput.sh OUT [DATA]
# In the environment: ARMS and CONTEXTS, which of them, in order; all contexts have the same tokens in a micro-batch.
# Without DATA: the standard library's bytes with a vocabulary of 50257, which costs what BPE tokens cost.
source "$(dirname "$0")/model.sh"
out=$1 data=${2:-}
read -r -a size <<< "${SIZE:---preset 325m --tokens-per-step 128K --compile inductor}"
for context in ${CONTEXTS:-4096 16384}; do
  for arm in ${ARMS:-fpa paper vectorwise}; do
    case $arm in
      fpa) attention=(--attention fpa) ;;
      *) attention=(--attention sagebwd --recipe "$arm") ;;
    esac
    "$PYTHON" -m sagebwd.train "${size[@]}" --context "$context" --micro-batch $((32768 / context)) "${attention[@]}" \
      --data "$data" --vocab "${VOCAB:-50257}" --steps "${STEPS:-12}" --warmup 2 --eval-every 0 --eval-tokens 32K \
      --out "$out/throughput/${arm}_$context" --overwrite --keep 0
  done
done
record throughput_325m "$out/throughput"/*/
