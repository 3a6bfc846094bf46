#!/bin/sh
# Runs a compile command, and fails also where ptxas says in passing that it had to give up what a kernel is made for:
# it calls these information, and so has no option that makes them errors. A shell's script, not CMake's, whose path
# would be part of the command: another CMake would compile everything again.
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
[ "$status" -eq 0 ] || exit "$status"
# C7508: setmaxnreg was ignored. C7510 and others: products were serialised, or waited for where they need not be.
if printf '%s\n' "$output" | grep -Eq '\(C75(08|10|12|14|15|17)\)'; then
  echo "A kernel would be slow: see what ptxas says above." >&2
  exit 1
fi
