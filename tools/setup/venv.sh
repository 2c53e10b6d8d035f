#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment DIR with the packages of REQUIREMENTS. Does nothing when it holds them already.
#   venv.sh DIR REQUIREMENTS
set -euo pipefail
dir=$1 requirements=$2
here=$(cd "$(dirname "$0")" && pwd)
python=$("$here/python.sh")
stamp=$dir/.stamp
key=$("$python" --version; sha256sum < "$requirements")

# The stamp is written last, so an interrupted installation is repeated.
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && "$dir/bin/python" -c '' 2> /dev/null; then exit 0; fi

echo "setup: virtual environment $dir"
"$python" -m venv --clear "$dir"
"$dir/bin/python" -m pip --disable-pip-version-check --no-input install -q -r "$requirements"
echo "$key" > "$stamp"
