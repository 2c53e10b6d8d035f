#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# strict_ptxas.sh COMMAND...: compiles, and fails if ptxas has put waits of its own between asynchronous products. That
# is what its notes C75xx say ("wgmma serialized", "wait injected"). No option makes errors of them: to ptxas they are
# information. The kernel would still be right, but slow.
log=$(mktemp) || exit
trap 'rm -f "$log"' EXIT
"$@" 2> "$log"
status=$?
cat "$log" >&2
if [ "$status" -eq 0 ] && grep -q '(C75[0-9][0-9])' "$log"; then
  echo 'error: ptxas has serialised products of a warpgroup (see the notes above)' >&2
  # Without its object the file is compiled again by the next build.
  while [ "$#" -gt 1 ]; do
    if [ "$1" = -o ]; then rm -f "$2"; fi
    shift
  done
  exit 1
fi
exit "$status"
