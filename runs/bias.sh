#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Error of the accumulated weight gradients against exact attention at a trained checkpoint, as tokens grow.
#   bias.sh RUN OUT [TOKENS] [DATA]
# RUN: directory of a run (an arm of another script, or its start). If there is none, the 45M model is trained there first,
# in full precision on 80M tokens of DATA, or START. In the environment: ARMS as --recipes takes them, NAME of the record.
source "$(dirname "$0")/model.sh"
run=$1 out=$2 tokens=${3:-16K,64K,256K,1M} data=${4:-}
if [[ ! -d $run/checkpoints ]]; then
  read -r per_step total <<< "$(number "${START_STEP:-260K}" "${START:-80M}")"
  steps=$((total / per_step))
  read -r -a size <<< "${SIZE:---preset 45m --compile inductor --micro-batch 64}"
  "$PYTHON" -m sagebwd.train "${size[@]}" --attention fpa --data "$data" --tokens-per-step "$per_step" --steps "$steps" \
    --warmup $((steps / 10 + 1)) --eval-every 0 --log-every 20 --keep 1 --out "$run"
fi
"$PYTHON" -m sagebwd.train.bias "$run" --tokens "$tokens" --out "$out" --recipes "${ARMS:-fpa,paper,dither=paper rounding=dither,\
vectorwise,dither_dQ=vectorwise rounding=dither:dQ,vdither=vectorwise rounding=dither}"
"$PYTHON" "$here/record.py" "$RESULTS/bias_${NAME:-$(basename "$run")}.json" --bias "$out/bias.json"
