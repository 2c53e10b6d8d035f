#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The question of tokens_per_step.sh nearer to the publication: a Llama of 45M parameters on GPT-2 tokens, 200 steps of 2.1M
# tokens, all arms from one start in full precision.
#   tokens_per_step_45m.sh DATA OUT [ARMS] [SEED]
# The start, OUT/start--qk-norm_seed0, is the run that bias.sh wants too.
# ARMS=fpa,again=fpa:micro_batch=32,vectorwise has full precision twice, in another order of additions: what two runs drift
# apart by rounding alone. At a learning rate of 1e-3 the arms drifted apart by more than 0.01; at the default, by 0.005 at most.
# On an H200 a step takes about 2 s an arm, three arms 23 minutes: several calls of LIMIT seconds.
export MODEL=${MODEL:---preset 45m --compile inductor --micro-batch 64 --eval-tokens 512K}
export START=${START:-52M} START_LR=${START_LR:-1.5e-3} TOTAL=${TOTAL:-400M} LR=${LR:-4e-4} NAME=45m
exec "$(dirname "$0")/tokens_per_step.sh" "$1" "$2" "${TOKENS:-2.1M}" "${3:-decisive}" "${4:-0}"
