#!/usr/bin/env bash
# What the training kits are built and tested with, beyond the Python environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
./setup_cpp.sh
./setup_kits_js.sh
./setup_kits_kotlin.sh
