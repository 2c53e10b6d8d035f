#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The same number of tokens in large steps or in small ones: does INT8 attention keep up with full precision?
#   tokens_per_step.sh DATA OUT TOKENS [ARMS] [SEED]
# TOKENS: of a step, such as 2.1M or 260K. ARMS: one of the groups below, or a list as --compare takes it. In the environment:
#   TOTAL  tokens of an arm (default 420M); the learning rate is the same at every TOKENS
#   START  tokens of full precision, 260K a step, from which all arms go on (default 200M; 0: every arm from random weights).
#          From random weights chance decides when attention begins to help, and that hides everything else.
source "$(dirname "$0")/model.sh"
data=$1 out=$2 tokens=$3 group=${4:-qknorm} seed=${5:-0}
norm=(--qk-norm)
case $group in
  qknorm) arms=fpa,paper,dither=paper:rounding=dither,vectorwise ;;
  plain) arms=fpa,paper,dither=paper:rounding=dither,vectorwise norm=(--no-qk-norm) ;;
  pair) arms=fpa,vectorwise ;;
  *) arms=$group ;;
esac
model+=(--data "$data" "${norm[@]}" --seed "$seed")
per_step=$(number "$tokens") total=$(number "${TOTAL:-420M}") start=$(number "${START:-200M}")
init=()
if ((start > 0)); then
  init=(--init "$out/start${norm[0]}_seed$seed")
  small=$(number 260K)
  "$PYTHON" -m sagebwd.train "${model[@]}" --attention fpa --out "${init[1]}" --resume auto --keep 1 \
    --tokens-per-step "$small" --steps $((start / small)) --warmup 50 --lr 4e-3 --data-seed $((seed + 1000)) --log-every 50
fi
steps=$((total / per_step))
name=tokens_per_step_${tokens}_${group//[^a-zA-Z0-9_-]/_}_seed$seed
compare "$arms" "$out/$name" "${init[@]}" --tokens-per-step "$per_step" --steps "$steps" --warmup $((steps / 20 + 1)) \
  --lr "${LR:-2e-3}" --data-seed "$seed" --eval-every $((steps / 10 + 1)) --audit-every $((steps / 20 + 1)) \
  --log-every $((steps / 40 + 1)) --save-every $((steps / 3 + 1)) --keep 1
record "$name" "$out/$name"/*/
