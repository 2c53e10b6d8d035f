#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs a build, moves the install tree, and uses it from another project by find_package and by pkg-config.
#   run.sh BUILD_DIR WORK_DIR        CC and CXX name the compilers
set -euo pipefail
build=$1 work=$2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
cc=${CC:-cc} cxx=${CXX:-c++}
version=$(sed -n 's/.*SAGEBWD_VERSION_STRING "\(.*\)"/\1/p' "$root/include/sagebwd/version.h")

rm -rf "$work"
mkdir -p "$work"
cmake --install "$build" --prefix "$work/first" > "$work/install.log"
mv "$work/first" "$work/moved"
prefix=$work/moved
if grep -rIl -e "$work/first" -e "$root" "$prefix"; then
  echo "consumer: the files above name a build or install path; the tree cannot be moved" >&2
  exit 1
fi
pc=$(find "$prefix" -name sagebwd.pc)
[ -n "$pc" ] || { echo "consumer: no sagebwd.pc was installed" >&2; exit 1; }

echo "== find_package"
cmake -S "$here" -B "$work/by-cmake" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" -DSAGEBWD_EXPECTED_VERSION="$version" > "$work/configure.log"
cmake --build "$work/by-cmake" > "$work/build.log" || { cat "$work/build.log"; exit 1; }
"$work/by-cmake/example_cpp"
"$work/by-cmake/example_c"

echo "== pkg-config"
PKG_CONFIG_PATH=$(dirname "$pc")
export PKG_CONFIG_PATH
[ "$(pkg-config --modversion sagebwd)" = "$version" ]
pkg-config --exact-version="$version" sagebwd
read -ra flags <<< "$(pkg-config --cflags --libs sagebwd)"
rpath=-Wl,-rpath,$(pkg-config --variable=libdir sagebwd)
"$cxx" -std=c++20 -O2 "$root/examples/attention.cpp" "${flags[@]}" "$rpath" -o "$work/pc_cpp"
"$cc" -std=c99 -O2 "$root/examples/attention.c" "${flags[@]}" -lm "$rpath" -o "$work/pc_c"
"$work/pc_cpp"
"$work/pc_c"

if [ -x "$build/bin/sagebwd" ]; then
  echo "== tool"
  "$prefix/bin/sagebwd" --version | grep -F "$version"
fi
echo "consumer: ok"
