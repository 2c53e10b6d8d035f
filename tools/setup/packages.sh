#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the packages of packages.txt that are missing: by apt where that is allowed, else it says what to install.
# INSTALL=no in the environment: only names them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

has_header() {
  if ! command -v g++ > /dev/null; then
    [ -e "/usr/include/$1" ]
  else
    printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | g++ -E -x c++ - > /dev/null 2>&1
  fi
}

is_there() {
  case $1 in
    command) command -v "$2" > /dev/null ;;
    header) has_header "$2" ;;
    python) [ -n "$("$here/python.sh")" ] ;;
    module) "$("$here/python.sh")" -c "import $2" 2> /dev/null ;;
    *) echo "packages.txt: no way to check for \"$1\"" >&2; exit 2 ;;
  esac
}

find_missing() {
  missing=()
  local package kind what
  while read -r package kind what; do
    is_there "$kind" "$what" || missing+=("$package")
  done < <(grep -vE '^(#|$)' "$here/packages.txt")
}

find_missing
[ ${#missing[@]} -eq 0 ] && exit 0

root=()
if [ "$(id -u)" -ne 0 ]; then root=(sudo -n); fi
if [ "${INSTALL:-yes}" = no ]; then
  printf 'Missing: %s  (names as in Debian and Ubuntu). INSTALL=no: nothing was installed.\n' "${missing[*]}" >&2
  exit 1
fi
if ! command -v apt-get > /dev/null || { [ ${#root[@]} -gt 0 ] && ! sudo -n true 2> /dev/null; }; then
  cat >&2 << END
Missing: ${missing[*]}  (names as in Debian and Ubuntu)
They cannot be installed from here: that takes apt-get, and root or sudo without a password. Please run
  sudo apt-get install ${missing[*]}
or install the same with your system's package manager, and try again.
END
  exit 1
fi

echo "setup: installing ${missing[*]} with apt-get; INSTALL=no only names what is missing"
apt=(${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Acquire::Retries=3 -o Dpkg::Use-Pty=0)
"${apt[@]}" update
"${apt[@]}" install --no-install-recommends "${missing[@]}"

find_missing
if [ ${#missing[@]} -gt 0 ]; then
  echo "setup: still missing after the installation: ${missing[*]}" >&2
  exit 1
fi
