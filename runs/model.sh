# SPDX-License-Identifier: Apache-2.0
# What the scripts share; sourced by them. The model is small enough (4 layers, width 128, 2 heads of 64) to take hundreds
# of steps of 2.1M tokens on one GPU in a minute: bytes instead of BPE tokens, because at this size a vocabulary of 50257
# would cost more than the whole transformer.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-540}
left() { echo $((LIMIT > SECONDS + 10 ? LIMIT - SECONDS : 10)); }  # of LIMIT, for what comes next
# The command of the record, with what the environment changed.
COMMAND="runs/$(basename "$0") $*"
for name in SAGEBWD_IMPL MODEL TOTAL START START_STEP START_LR NAME TOKENS LR ARMS SIZE VOCAB STEPS TUNE KEEPS SEEDS; do
  [[ -z ${!name+set} ]] || COMMAND="$name=$(printf %q "${!name}") $COMMAND"
done
export COMMAND
RESULTS=${RESULTS:-$here/../results/train}
MODEL=${MODEL:---preset demo --as-bytes --tokenizer "${TOKENIZER:-data/tokenizer}" --compile inductor
  --micro-batch 256 --eval-tokens 1M}
read -r -a model <<< "$(tr '\n' ' ' <<< "$MODEL")"

number() { "$PYTHON" -c 'import sys; from sagebwd.train.config import count; print(*map(count, sys.argv[1:]))' "$@"; }

# compare NAME ARMS OUT OPTIONS...: trains the arms side by side, or goes on where they were, and writes $RESULTS/NAME.json.
# When the time is up, the record has the arms as far as they came, and the exit status is 5: run the script again.
compare() {
  local name=$1 arms=$2 out=$3 status=0
  shift 3
  "$PYTHON" -m sagebwd.train "${model[@]}" --compare "$arms" --out "$out" --resume auto --time-limit "$(left)" "$@" || status=$?
  ((status == 0 || status == 5)) || return $status
  record "$name" "$out"/*/
  return $status
}

# start DATA OUT NORM SEED: trains full precision on START tokens, START_STEP a step, unless it is there, and sets `begin`,
# the options that make arms go on from it. From random weights chance decides when attention begins to help, and that hides everything else.
start() {
  local tokens small
  read -r tokens small <<< "$(number "${START:-200M}" "${START_STEP:-260K}")"
  begin=()
  ((tokens > 0)) || return 0
  begin=(--init "$2/start$3_seed$4")
  [[ ! -e ${begin[1]}/summary.json ]] || return 0  # several sets may begin here at the same time
  "$PYTHON" -m sagebwd.train "${model[@]}" --data "$1" "$3" --seed "$4" --data-seed $(($4 + 1000)) --attention fpa \
    --out "${begin[1]}" --resume auto --keep 1 --time-limit "$(left)" --tokens-per-step "$small" \
    --steps $((tokens / small)) --warmup 50 --lr "${START_LR:-4e-3}" --eval-every 0 --log-every 50
}

# record NAME RUN...: writes $RESULTS/NAME.json from the directories of runs.
record() { "$PYTHON" "$here/record.py" "$RESULTS/$1.json" "${@:2}"; }
