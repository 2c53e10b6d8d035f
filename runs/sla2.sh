#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a video model loses when attention sees few blocks, and what the linear branch, α and the trained router give back.
#   sla2.sh OUT
# 32 frames of 128² pixels, 8192 tokens, blocks of 128 × 64. One model is trained with full attention; from there every kind
# of attention goes on, on the same clips, for each KEEP and SEED (full attention once for each seed). After LIMIT seconds the
# exit status is 5; run it again, and it goes on. The page is OUT/sla2.html, the record $RESULTS/NAME.json.
# In the environment: KEEPS, SEEDS, ARMS, STEPS, TUNE, SIZE, NAME.
#
# Cost on an H200, batch 8, per step: 23 TFLOP of full attention at 330 TFLOP/s and 5 TFLOP of other products at 150 are
# 100 ms, and what moves memory about 40 ms. So full attention takes 0.14 s, a tenth of the blocks 0.08 s, and with the linear
# branch 0.10 s. Start 1600 × 0.14 = 224 s; full 3 × 160 × 0.14 = 67 s; six sparse arms 77 s; 24 others 384 s; stage 1
# 12 × 10 s; measuring 33 × 2 s; starting and pages 60 s. In all 1000 s: two calls of 540 s.
RESULTS=${RESULTS:-$(dirname "$0")/../results/sla2}
source "$(dirname "$0")/model.sh"
out=$1 status=0
read -r -a size <<< "${SIZE:---frames 32 --pixels 128 --patch 8 --layers 8 --heads 6 --block 128 --batch 8 --dtype bfloat16 --lr 1e-3 --fit 80 --cells 0}"
"$PYTHON" -m sagebwd.sla2.demo "${size[@]}" --out "$out" --resume --limit "$(left)" --steps "${STEPS:-1600}" --tune "${TUNE:-160}" \
  --arms "${ARMS:-full,sparse,v1,identity,sla2,sla2-16bit}" --keep "${KEEPS:-0.1,0.05}" --seed "${SEEDS:-0,1,2}" || status=$?
((status == 0 || status == 5)) || exit $status
if [[ -f $out/sla2.json ]]; then
  "$PYTHON" -m sagebwd.sla2.demo.summary "$out/sla2.json" | tee "$out/summary.md"
  "$PYTHON" "$here/record.py" "$RESULTS/${NAME:-video}.json" --sla2 "$out/sla2.json"
fi
exit $status
