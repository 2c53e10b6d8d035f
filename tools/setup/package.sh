#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Python package and installs it into the virtual environment DIR. Does nothing when its sources have not
# changed since.
#   package.sh DIR
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$1
stamp=$dir/.package
# Without a GPU the kernels would be of no use here, and they take minutes to compile.
cuda=OFF
if tools/setup/has_gpu.sh; then cuda=AUTO; fi
key="$cuda $(find bindings cmake include python src tools/cli tools/package CMakeLists.txt pyproject.toml -type f \
  ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then exit 0; fi

echo 'setup: building and installing the Python package'
. tools/setup/ccache.sh
# The environment has PyTorch already: an isolated build would fetch it a second time for its headers. Warnings are errors
# as in build/, or ccache would see other commands.
"$dir/bin/python" -m pip --disable-pip-version-check --no-input install -q --no-build-isolation --no-deps \
  --force-reinstall --config-settings=cmake.define.SAGEBWD_CUDA=$cuda \
  --config-settings=cmake.define.SAGEBWD_BUILD_TOOLS=ON --config-settings=cmake.define.SAGEBWD_WERROR=ON .
echo "$key" > "$stamp"
