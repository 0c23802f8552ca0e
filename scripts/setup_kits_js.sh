#!/usr/bin/env bash
# The JavaScript kit: its modules from npm, compiled, and beside it the Python wheel of the same
# ONNX Runtime, which the tests compare with to the bit.
#
# usage: scripts/setup_kits_js.sh [PYTHON]      (default: .venv/bin/python)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:-$root/.venv/bin/python}
kit=$root/runtime/js

if ! command -v npm >/dev/null; then
  cat >&2 <<'MESSAGE'
make kits: no npm was found.
  The JavaScript kit is compiled and tested with Node.js 20 or newer.
  help: install nodejs and npm. Without them its tests are skipped and everything else runs.
MESSAGE
  exit 2
fi

cd "$kit"
if ! cmp -s package-lock.json node_modules/.ready; then
  echo "make kits: installing the modules of $kit" >&2
  # The packages' own install scripts would download other builds of ONNX Runtime.
  npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
  cp package-lock.json node_modules/.ready
fi
npm run --silent build

version=$(node --print "require('onnxruntime-node/package.json').version")
wheel=$root/build/kits/onnxruntime-$version
if [[ ! -e $wheel/.ready ]]; then
  echo "make kits: installing the wheel of ONNX Runtime $version into $wheel" >&2
  rm -rf -- "$wheel"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$wheel" \
    "onnxruntime==$version"
  touch "$wheel/.ready"
fi
