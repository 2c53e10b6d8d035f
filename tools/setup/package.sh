#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Python package and installs it into the virtual environment DIR. Does nothing when its sources have not
# changed since.
#   package.sh DIR
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$1
stamp=$dir/.package
key=$(find bindings cmake include python src CMakeLists.txt pyproject.toml -type f ! -name '*.pyc' -print0 |
  LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then exit 0; fi

echo 'setup: building and installing the Python package'
# The environment has PyTorch already: an isolated build would fetch it a second time for its headers.
"$dir/bin/python" -m pip --disable-pip-version-check --no-input install -q --no-build-isolation --no-deps \
  --force-reinstall .
echo "$key" > "$stamp"
