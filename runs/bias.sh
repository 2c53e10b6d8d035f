#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Error of the accumulated weight gradients against exact attention at a trained checkpoint, as tokens grow.
#   bias.sh RUN OUT [TOKENS] [DATA]
# RUN: directory of a run (an arm of another script). If there is none, the 45M model is trained there first, on 80M tokens
# of DATA in full precision. In the environment: ARMS as --recipes takes them, NAME of the record.
source "$(dirname "$0")/model.sh"
run=$1 out=$2 tokens=${3:-16K,64K,256K,1M} data=${4:-}
if [[ ! -d $run/checkpoints ]]; then
  "$PYTHON" -m sagebwd.train --preset 45m --attention fpa --data "$data" --tokens-per-step 260K --steps 305 --warmup 30 \
    --compile inductor --micro-batch 64 --eval-every 0 --log-every 20 --keep 1 --out "$run"
fi
"$PYTHON" -m sagebwd.train.bias "$run" --tokens "$tokens" --out "$out" \
  --recipes "${ARMS:-fpa,paper,dither=paper:rounding=dither,vectorwise,vdither=vectorwise:rounding=dither}"
"$PYTHON" "$here/record.py" "$RESULTS/bias_${NAME:-$(basename "$run")}.json" --bias "$out/bias.json"
