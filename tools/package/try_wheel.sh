#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs a wheel into an empty environment and uses it: forward and backward, the program, the CMake package.
#   try_wheel.sh WHEEL [TORCH]      TORCH: a requirement such as torch==2.11.*; PYTHON: the interpreter
set -euo pipefail
wheel=$(realpath "$1") torch=${2:-torch}
python=$("$(dirname "$0")/../setup/python.sh")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"

echo "== $("$python" --version), $torch"
"$python" -m venv empty
empty/bin/python -m pip --disable-pip-version-check --no-input install -q "$wheel" "$torch"
empty/bin/python - << 'END'
import torch, sagebwd
torch.manual_seed(0)
q, k, v = (torch.randn(1, 200, 4, 64, requires_grad=True) for _ in range(3))
out = sagebwd.attention(q, k, v, causal=True)
exact = torch.nn.functional.scaled_dot_product_attention(
    *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
weight = torch.randn_like(out)
got = torch.autograd.grad((out * weight).sum(), (q, k, v))
want = torch.autograd.grad((exact * weight).sum(), (q, k, v))
errors = [((a - b).norm() / b.norm()).item() for a, b in zip((out, *got), (exact, *want))]
print("torch", torch.__version__, "errors of O, dQ, dK, dV:", *(f"{e:.4f}" for e in errors))
assert max(errors) < 0.05, errors
END
empty/bin/sagebwd --version
empty/bin/sagebwd info > info.txt
grep -q chosen info.txt
cmake_dir=$(empty/bin/python -m sagebwd --cmake-dir)
test -f "$cmake_dir/sagebwdConfig.cmake"
copies=$(find empty -name 'libsagebwd.so*' | wc -l)
[ "$copies" = 1 ] || { echo "the library is there $copies times" >&2; exit 1; }
echo 'the wheel works'
