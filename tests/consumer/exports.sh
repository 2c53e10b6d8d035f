#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks what libsagebwd.so exports (the C calls and the C++ interface) and needs (only libraries of the system), and
# how it was hardened. With --torch: what libsagebwd_torch.so exports, and how it was hardened.
#   exports.sh [--torch] LIBRARY
set -euo pipefail
torch=
if [ "$1" = --torch ]; then torch=1; shift; fi
library=$1
fail() { echo "exports: $*" >&2; exit 1; }

# Tables of addresses are filled in at load time and read-only from then on; no memory is both written and executed.
dynamic=$(readelf -d "$library") segments=$(readelf -lW "$library")
grep -qE 'BIND_NOW|FLAGS.*NOW' <<< "$dynamic" || fail "not linked with -z now"
grep -q GNU_RELRO <<< "$segments" || fail "not linked with -z relro"
grep -E 'GNU_STACK' <<< "$segments" | grep -qw RW || fail "asks for an executable stack"
! grep -E 'LOAD' <<< "$segments" | grep -q 'RWE' || fail "has memory that is both written and executed"
# A debug build is not optimised, and has no hardening checks.
calls=$(nm -D --undefined-only "$library")
if readelf -SW "$library" | grep -q '\.debug_info'; then
  calls="__stack_chk_fail __memcpy_chk"
fi
grep -q __stack_chk_fail <<< "$calls" || fail "not compiled with -fstack-protector-strong"

symbols=$(nm -DC --defined-only "$library" | sed -E 's/^[0-9a-f ]+ [A-Za-z] //')
if [ -n "$torch" ]; then
  expected=$'typeinfo for sagebwd::Error\ntypeinfo name for sagebwd::Error'
  [ "$(sort <<< "$symbols")" = "$expected" ] || fail "expected the type of sagebwd::Error alone, got
$symbols"
  echo "exports: the type of sagebwd::Error alone"
  exit
fi
grep -qE '__(mem|snprintf|vsnprintf|str)[a-z]*_chk' <<< "$calls" || fail "not compiled with _FORTIFY_SOURCE"
strangers=$(grep -vE '^(sagebwd_[a-z_]+|((typeinfo|typeinfo name|vtable) for )?sagebwd::[A-Za-z_]+(\[abi:cxx11\])?(::~?Error)?(\(.*\))?( const)?)$' \
  <<< "$symbols" || true)
[ -z "$strangers" ] || fail "symbols that are neither sagebwd_* nor of the public sagebwd:: interface:
$strangers"

# Each call the C header declares is there, and no other.
header=$(dirname "$0")/../../include/sagebwd/sagebwd.h
declared=$(tr '\n' ' ' < "$header" | grep -oE 'SAGEBWD_C_API [a-z ]+\*? *sagebwd_[a-z_]+\(' |
  grep -oE 'sagebwd_[a-z_]+' | sort)
exported=$(grep -oE '^sagebwd_[a-z_]+$' <<< "$symbols" | sort)
[ -n "$declared" ] || fail "no declaration found in $header"
[ "$declared" = "$exported" ] || fail "C calls, declared against exported:
$(diff <(echo "$declared") <(echo "$exported") || true)"
for name in forward backward workspace_size explain version recipe_by_name; do
  grep -qE "^sagebwd::$name\(" <<< "$symbols" || fail "sagebwd::$name is not exported"
done
# Callers catch our error type across the library boundary.
grep -qx 'typeinfo for sagebwd::Error' <<< "$symbols" || fail "the type of sagebwd::Error is not exported"

needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
others=$(grep -vE '^(libstdc\+\+|libm|libgcc_s|libc|libpthread|ld-linux-x86-64)\.so' <<< "$needed" || true)
[ -z "$others" ] || fail "needs libraries beyond the system's own: $others"
[ -z "$(readelf -d "$library" | grep -E 'RPATH|RUNPATH' || true)" ] || fail "carries a run path"
echo "exports: $(wc -l <<< "$symbols") symbols, $(wc -l <<< "$exported") of them C; needs $(tr '\n' ' ' <<< "$needed")"
