#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Error of the accumulated weight gradients against exact attention at a trained checkpoint, as tokens grow.
#   bias.sh RUN OUT [TOKENS]
# RUN: directory of a run (an arm of another script). Options after "--" go to sagebwd.bias.
source "$(dirname "$0")/model.sh"
run=$1 out=$2 tokens=${3:-16K,64K,256K,1M}
"$PYTHON" -m sagebwd.bias "$run" --tokens "$tokens" --out "$out" \
  --recipes "${ARMS:-fpa,paper,dither=paper:rounding=dither,vectorwise,vdither=vectorwise:rounding=dither}"
"$PYTHON" "$here/record.py" "$RESULTS/bias_$(basename "$(dirname "$run")")_$(basename "$run").json" --bias "$out/bias.json"
