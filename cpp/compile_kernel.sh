#!/bin/sh
# Runs a compile command and turns some of ptxas's remarks into errors: those that it ignored setmaxnreg or serialized
# products. To ptxas they are information, and no option makes them errors. This is a shell script and not a CMake
# script because the path of CMake would be part of the command: another CMake would compile everything again.
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
[ "$status" -eq 0 ] || exit "$status"
# C7508: setmaxnreg was ignored. The others: products were serialized, or waited for needlessly.
if printf '%s\n' "$output" | grep -Eq '\(C75(08|10|12|14|15|17)\)'; then
  echo "This kernel would be slow: see the messages of ptxas above." >&2
  exit 1
fi
