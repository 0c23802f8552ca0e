#!/usr/bin/env bash
# Conan, in a virtual environment of its own, build/conan: the tests build the C++ kit's recipe with it.
#
# usage: scripts/setup_conan.sh [PYTHON]      (default: .venv/bin/python)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/build/conan
[[ -e $target/.ready ]] && exit 0
echo "C++ kit: installing Conan into $target" >&2
"${1:-$root/.venv/bin/python}" -m venv --clear "$target"
"$target/bin/pip" install --quiet --disable-pip-version-check "conan>=2.4,<3"
touch "$target/.ready"
