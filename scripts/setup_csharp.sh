#!/usr/bin/env bash
# What compiles the C# kit and runs it: Debian's Mono. Its native library needs what the C++ kit needs
# (scripts/setup_cpp.sh).
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/debian_packages.sh" "C# kit" mono-mcs mono-runtime \
  libmono-system-core4.0-cil
