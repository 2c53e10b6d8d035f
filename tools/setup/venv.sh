#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment DIR with the packages of REQUIREMENTS. Does nothing when it holds them already; further
# requirements are added to what it holds. A file named *-frameworks.txt changes nothing that is there.
#   venv.sh DIR REQUIREMENTS...
set -euo pipefail
dir=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
python=$("$here/python.sh")

# One stamp for each file, written last, so that an interrupted installation is repeated. A new Python starts anew.
version=$("$python" --version)
if [ "$(cat "$dir/.python" 2> /dev/null)" != "$version" ] || ! "$dir/bin/python" -c '' 2> /dev/null; then
  echo "setup: virtual environment $dir"
  "$python" -m venv --clear "$dir"
  echo "$version" > "$dir/.python"
fi
for requirements in "$@"; do
  stamp=$dir/.$(basename "$requirements").stamp
  key=$(sha256sum < "$requirements")
  if [ "$(cat "$stamp" 2> /dev/null)" = "$key" ]; then continue; fi
  echo "setup: Python packages of $requirements"
  options=()
  case $requirements in *-frameworks.txt) options=(--no-deps --ignore-requires-python) ;; esac
  "$dir/bin/python" -m pip --disable-pip-version-check --no-input install -q ${options[@]+"${options[@]}"} \
    -r "$requirements"
  echo "$key" > "$stamp"
done
