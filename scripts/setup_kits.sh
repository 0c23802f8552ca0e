#!/usr/bin/env bash
# What the training kits are built and tested with, beyond the Python environment. A kit whose tools
# cannot be had here (exit code 77) is left out, and the tests say so. A Swift toolchain that is there
# (make swift) gets the library of the environment as it is now: bits are compared with that.
#
# usage: scripts/setup_kits.sh [kits-sample]      (which tests nothing with Conan)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

in_turn() {
  local part code
  for part in "$@"; do
    code=0
    "./$part.sh" || code=$?
    if ((code != 0 && code != 77)); then
      echo "scripts/$part.sh failed with exit code $code" >&2
      return "$code"
    fi
  done
}

native=(setup_cpp setup_csharp setup_csharp_arm64)
if [[ ${1:-} != kits-sample ]]; then native+=(setup_conan); fi
if [[ -f ${ODTPACK_SWIFT:-../build/swift}/.ready ]]; then native+=(setup_swift); fi
# Both wait for downloads most of the time.
in_turn "${native[@]}" &
others=$!
code=0
in_turn setup_kits_js setup_kits_kotlin || code=$?
wait "$others" || code=$?
exit "$code"
