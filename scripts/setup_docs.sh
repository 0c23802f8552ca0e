#!/usr/bin/env bash
# What make docs needs: the group `docs` of pyproject.toml in a virtual environment of its own, and where npm and
# Doxygen can be had, the references of the JavaScript and the C++ kit in build/docs-tools.
#
# usage: scripts/setup_docs.sh [DIRECTORY]      (default: .venv-docs next to the Makefile)
# PYTHON names the interpreter, 3.11 or newer.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-docs}
tools=build/docs-tools
python=${PYTHON:-}
for candidate in .venv/bin/python python3.13 python3.12 python3.11 python3; do
  if [[ -z $python ]] && command -v "$candidate" >/dev/null &&
    "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
  fi
done
if [[ -z $python ]]; then
  echo "make docs needs Python 3.11 or newer with the venv module: make docs PYTHON=/path/to/python" >&2
  exit 2
fi

# The reference is read from the sources, so that odtpack and its libraries are not installed.
wanted=$("$python" -c 'import tomllib
with open("pyproject.toml", "rb") as stream:
    print(*tomllib.load(stream)["dependency-groups"]["docs"], sep="\n")')
if [[ ! -f $venv/.ready || $(<"$venv/.ready") != "$wanted" ]]; then
  echo "make docs: setting up $venv with $("$python" --version)" >&2
  rm -rf -- "$venv"
  "$python" -m venv "$venv"
  mapfile -t requirements <<<"$wanted"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"
  printf '%s\n' "$wanted" >"$venv/.ready.tmp"
  mv "$venv/.ready.tmp" "$venv/.ready"
fi

mkdir -p "$tools"

# TypeDoc needs the compiler whose API it uses; the kit itself is compiled with a newer one.
javascript() {
  local npm=$tools/npm
  if [[ ! -e $npm/.ready ]]; then
    mkdir -p "$npm"
    (cd "$npm" && npm install --no-save --ignore-scripts --no-audit --no-fund --loglevel=error --prefix . \
      typedoc@0.28 typescript@5.9 flatbuffers@25.9.23 @types/node@20 onnxruntime-common@1.30.0 &&
      npm pack --silent mermaid@11 iframe-worker@1 >/dev/null &&
      tar -xzf mermaid-*.tgz package/dist/mermaid.min.js &&
      tar -xzf iframe-worker-*.tgz package/shim/index.js) || return 1
    rm -f "$npm"/*.tgz
    touch "$npm/.ready"
  fi
  cp "$npm/package/dist/mermaid.min.js" "$tools/mermaid.min.js"
  cp "$npm/package/shim/index.js" "$tools/iframe-worker.js"
  # Beside the modules that it imports, which need not be installed in the kit.
  rm -rf -- "$npm/kit"
  mkdir "$npm/kit"
  cp -r runtime/js/src runtime/js/tsconfig.json runtime/js/package.json "$npm/kit/"
  (cd "$npm/kit" && ../node_modules/.bin/typedoc --entryPoints src/index.ts --name "odtpack for JavaScript" \
    --readme none --out "../../javascript" --logLevel Error --skipErrorChecking --githubPages false \
    --disableSources --excludePrivate --excludeInternal --hideGenerator)
}

cpp() {
  if ! command -v doxygen >/dev/null; then
    scripts/debian_packages.sh "C++ reference" doxygen || return 1
  fi
  mkdir -p "$tools/cpp"
  (cat scripts/doxygen.conf && echo "OUTPUT_DIRECTORY = $tools/cpp") | doxygen -
}

if ! command -v npm >/dev/null || ! javascript; then
  rm -rf -- "$tools/javascript" "$tools/mermaid.min.js" "$tools/iframe-worker.js"
  echo "make docs: without npm the reference of the JavaScript kit is left out" >&2
fi
if ! cpp >&2; then
  rm -rf -- "$tools/cpp"
  echo "make docs: without Doxygen the reference of the C++ kit is left out" >&2
fi
