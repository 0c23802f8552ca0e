#!/usr/bin/env bash
# What the training kits are built and tested with, beyond the Python environment. A kit whose tools
# cannot be had here (exit code 77) is left out, and the tests say so. A Swift toolchain that is there
# (make swift) gets the library of the environment as it is now: bits are compared with that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
parts=(setup_cpp setup_conan setup_csharp setup_csharp_arm64 setup_kits_js setup_kits_kotlin)
if [[ -f ${ODTPACK_SWIFT:-../build/swift}/.ready ]]; then parts+=(setup_swift); fi
for part in "${parts[@]}"; do
  code=0
  ./$part.sh || code=$?
  if ((code != 0 && code != 77)); then exit "$code"; fi
done
