#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a video model loses when attention sees few blocks, and what the linear branch, α and the trained router give back.
#   sla2.sh OUT
# 32 frames of 128² pixels, 8192 tokens, blocks of 128 × 64. One model is trained with full attention (OUT/start.pt); from
# there every kind of attention goes on, on the same clips, for each KEEP and SEED. A run that is finished is skipped, so
# the script can be called again. In the environment: KEEPS, SEEDS, ARMS, STEPS (2000), TUNE (300), SIZE, PYTHON.
set -euo pipefail
out=$1
PYTHON=${PYTHON:-python3}
read -r -a size <<< "${SIZE:---frames 32 --pixels 128 --patch 8 --layers 8 --heads 6 --block 128 --batch 16 --dtype bfloat16 --lr 1e-3}"
for seed in ${SEEDS:-0 1 2}; do
  for keep in ${KEEPS:-0.1 0.05}; do
    run=$out/keep${keep}_seed$seed
    [[ -f $run/sla2.html ]] && continue
    "$PYTHON" -m sagebwd.sla2.demo "${size[@]}" --start "$out/start.pt" --steps "${STEPS:-2000}" --tune "${TUNE:-300}" --fit 100 \
      --arms "${ARMS:-full,sparse,v1,identity,sla2}" --keep "$keep" --seed "$seed" --out "$run"
  done
done
"$PYTHON" -m sagebwd.sla2.demo.summary "$out"/keep*/sla2.json | tee "$out/summary.md"
