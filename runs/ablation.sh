#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What each choice of the recipe is worth in training, continuing a full-precision model (model.sh) without QK-norm,
# where logits are largest.
#   ablation.sh DATA OUT smoothing|lift [RECIPE]
# smoothing: none, of K, in paper also of Q and K. lift: one matmul at a time in floating point (S and S' together: the backward
# must rebuild the logits of the forward). RECIPE: paper (default) or vectorwise.
source "$(dirname "$0")/model.sh"
data=$1 out=$2 which=$3 recipe=${4:-paper}
case $which in
  smoothing)
    arms="fpa,none=$recipe smooth_k=off,k=$recipe"
    if [ "$recipe" = paper ]; then arms+=",qk=paper smooth_q=on"; fi
    ;;
  lift)
    arms=fpa,int8=$recipe
    for matmul in O dV dQ dK; do arms+=",$matmul=$recipe lift=$matmul"; done
    arms+=",S=$recipe lift=S,S2"
    ;;
  *) echo "expected smoothing or lift, got $which" >&2; exit 2 ;;
esac
start "$data" "$out" --no-qk-norm 0
read -r per_step total <<< "$(number "${TOKENS:-1M}" "${TOTAL:-60M}")"
steps=$((total / per_step))
name=ablation_${which}_$recipe
compare "$name" "$arms" "$out/$name" "${begin[@]}" --data "$data" --no-qk-norm --tokens-per-step "$per_step" --steps "$steps" \
  --warmup $((steps / 20 + 1)) --lr "${LR:-2e-3}" --eval-every $((steps / 5 + 1)) --audit-every $((steps / 10 + 1)) \
  --log-every $((steps / 20 + 1)) --save-every $((steps / 3 + 1)) --keep 1
