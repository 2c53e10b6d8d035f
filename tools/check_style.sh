#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that the sources are formatted and linted, with the tools of the environment VENV.
#   check_style.sh VENV [--fix]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1/bin
python=(python tests tools runs examples)
cpp=$(git ls-files '*.c' '*.h' '*.hpp' '*.cpp' '*.inl' '*.cu' '*.cuh' 2> /dev/null) || cpp=
# Without a repository (a source archive) the files are found by name.
[ -n "$cpp" ] || cpp=$(find bindings examples include src tests tools -type f \
  \( -name '*.c' -o -name '*.h' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' \))
if [ "${2:-}" = --fix ]; then
  xargs "$bin/clang-format" -i <<< "$cpp"
  "$bin/ruff" check -q --fix "${python[@]}"
  "$bin/ruff" format -q "${python[@]}"
else
  xargs "$bin/clang-format" --dry-run -Werror <<< "$cpp"
  "$bin/ruff" check -q "${python[@]}"
  "$bin/ruff" format -q --check "${python[@]}"
fi
