# SPDX-License-Identifier: Apache-2.0
# What the scripts share; sourced by them. The model is small enough (4 layers, width 128, 2 heads of 64) to take hundreds
# of steps of 2.1M tokens on one GPU in a minute: bytes instead of BPE tokens, because at this size a vocabulary of 50257
# would cost more than the whole transformer.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-540}
export COMMAND="runs/$(basename "$0") $*"
RESULTS=${RESULTS:-$here/../results/train}
MODEL=${MODEL:---preset demo --as-bytes --tokenizer "${TOKENIZER:-data/tokenizer}" --compile inductor
  --micro-batch 128 --eval-tokens 1M}
read -r -a model <<< "$(tr '\n' ' ' <<< "$MODEL")"

number() { "$PYTHON" -c 'import sys; from sagebwd.train.config import count; print(count(sys.argv[1]))' "$1"; }

# compare ARMS OUT OPTIONS...: trains the arms side by side, or goes on where they were.
compare() {
  local arms=$1 out=$2
  shift 2
  "$PYTHON" -m sagebwd.train "${model[@]}" --compare "$arms" --out "$out" --resume auto --time-limit "$LIMIT" "$@"
}

# record NAME RUN...: writes $RESULTS/NAME.json from the directories of runs.
record() { "$PYTHON" "$here/record.py" "$RESULTS/$1.json" "${@:2}"; }
