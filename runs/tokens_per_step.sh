#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Does INT8 attention keep up with full precision, with the same number of tokens in large steps or in small ones?
#   tokens_per_step.sh DATA OUT TOKENS [ARMS] [SEED]
#   tokens_per_step.sh DATA OUT all
# One arm is full precision again: PyTorch's backward adds up in any order, so the two differ by chance alone, and by as
# much as chance may explain elsewhere.
# TOKENS: of a step, such as 2.1M or 260K. ARMS: one of the sets below, or a list as --compare takes it. all: the whole
# experiment, with the sets side by side on one device (so the times of its steps say nothing). In the environment:
#   TOTAL  tokens of an arm (default 600M); the learning rate is the same at every TOKENS
#   START  tokens of full precision, START_STEP (260K) a step, from which all arms go on (default 120M; 0: from random weights)
#   ARMS   what the sets below train instead
#   NAME   of the model, for the record; nothing for the small one of model.sh
source "$(dirname "$0")/model.sh"
START=${START:-120M} TOTAL=${TOTAL:-600M}
data=$1 out=$2 tokens=$3 chosen=${4:-qknorm} seed=${5:-0}
if [[ $tokens == all ]]; then
  mkdir -p "$out"
  side_by_side() {  # each argument: what follows DATA OUT
    local each status=0 jobs=()
    for each in "$@"; do
      LIMIT=$(left) "$0" "$data" "$out" $each > "$out/log_${each// /_}.txt" 2>&1 &
      jobs+=($!)
    done
    for each in "${jobs[@]}"; do wait "$each" || status=$?; done
    tail -n 12 "$out"/log_*.txt
    return $status
  }
  side_by_side "start qknorm 0" "start plain 0" "start decisive 1"
  side_by_side "2.1M qknorm 0" "2.1M plain 0" "2.1M decisive 1" "260K qknorm 0" "260K plain 0"
  exit
fi
norm=--qk-norm
case $chosen in
  qknorm) arms=${ARMS:-fpa,again=fpa,paper,dither=paper rounding=dither,vectorwise} ;;
  plain) arms=${ARMS:-fpa,again=fpa,paper,dither=paper rounding=dither,vectorwise} norm=--no-qk-norm ;;
  decisive) arms=${ARMS:-fpa,again=fpa,paper,vectorwise} ;;
  *) arms=$chosen ;;
esac
start "$data" "$out" "$norm" "$seed"
[[ $tokens != start ]] || exit 0
read -r per_step total <<< "$(number "$tokens" "$TOTAL")"
steps=$((total / per_step))
name=tokens_per_step_${NAME:+${NAME}_}${tokens}_${chosen//[^a-zA-Z0-9_-]/_}_seed$seed
compare "$name" "$arms" "$out/$name" "${begin[@]}" --data "$data" "$norm" --seed "$seed" --data-seed "$seed" \
  --tokens-per-step "$per_step" --steps "$steps" --warmup $((steps / 20 + 1)) --lr "${LR:-2e-3}" \
  --eval-every $((steps / 10 + 1)) --audit-every $((steps / 20 + 1)) --log-every $((steps / 40 + 1)) \
  --save-every $((steps / 3 + 1)) --keep 1
