#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The same number of tokens in large steps or in small ones: does INT8 attention keep up with full precision?
#   tokens_per_step.sh DATA OUT TOKENS [ARMS] [SEED]
# TOKENS: of a step, such as 2.1M or 260K. ARMS: as --compare takes them, or one of the groups below. TOTAL in the
# environment: tokens of the whole run (default 420M). The learning rate is the same at every TOKENS.
source "$(dirname "$0")/model.sh"
data=$1 out=$2 tokens=$3 arms=${4:-qknorm} seed=${5:-0}
case $arms in
  qknorm) arms=fpa,paper,dither=paper:rounding=dither,vectorwise ;;
  plain) arms=fpa:qk_norm=no,paper:qk_norm=no,dither=paper:rounding=dither:qk_norm=no,vectorwise:qk_norm=no ;;
  pair) arms=fpa,vectorwise ;;
esac
per_step=$(number "$tokens") total=$(number "${TOTAL:-420M}")
steps=$((total / per_step))
tag=${4:-qknorm}
name=tokens_per_step_${tokens}_${tag//[^a-zA-Z0-9_-]/_}_seed$seed
compare "$arms" "$out/$name" --data "$data" --tokens-per-step "$per_step" --steps "$steps" --warmup $((steps / 20 + 1)) \
  --lr "${LR:-4e-3}" --seed "$seed" --data-seed "$seed" --eval-every $((steps / 10 + 1)) --audit-every $((steps / 20 + 1)) \
  --log-every $((steps / 40 + 1)) --save-every $((steps / 3 + 1)) --keep 1
record "$name" "$out/$name"/*/
