#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python of at least 3.10 that can make virtual environments; the best one it finds, if none can.
# PYTHON in the environment decides.
set -euo pipefail
fallback=
for candidate in ${PYTHON:-python3 /usr/bin/python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
  path=$(command -v "$candidate") || continue
  "$path" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null || continue
  if "$path" -c 'import ensurepip, venv' 2> /dev/null; then
    echo "$path"
    exit 0
  fi
  fallback=${fallback:-$path}
done
[ -n "$fallback" ] && echo "$fallback"
