#!/usr/bin/env bash
# The reference system, ONNX Runtime training 1.19.2, in a virtual environment of its own.
#
# Its wheels end with Python 3.12 and with NumPy 1, and its `artifacts` module imports torch, so it
# cannot live beside odtpack. The tests marked `peer` and the benchmarks start it as a process.
#
# usage: scripts/setup_peer.sh [DIRECTORY]      (default: .venv-peer next to the Makefile)
# PEER_PYTHON names another Python 3.11 interpreter. PIP_EXTRA_INDEX_URL may name an index with the
# CPU build of torch, which pip then prefers to the default one with its gigabytes of CUDA.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-peer}

requirements=(
  onnxruntime-training-cpu==1.19.2
  onnx==1.16.2       # IR 10 and opset 21: the highest that 1.19.2 loads
  'numpy<2'
  torch==2.13.0      # imported by onnxruntime.training, never run
  protobuf
  setuptools
  cerberus
  flatbuffers
  h5py
  packaging
  sympy
)

# The stamp holds what was installed: another list of requirements builds the environment anew.
wanted=$(printf '%s\n' "${requirements[@]}")
if [[ -f $venv/.ready && $(<"$venv/.ready") == "$wanted" ]]; then
  exit 0
fi

is_python311() {
  "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1
}

python=
for candidate in ${PEER_PYTHON:+"$PEER_PYTHON"} python3.11 python3; do
  if command -v "$candidate" >/dev/null && is_python311 "$candidate"; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  cat >&2 <<'MESSAGE'
make peer: no Python 3.11 with the venv module was found.
  The reference system (onnxruntime-training-cpu 1.19.2) is set up with Python 3.11 only.
  help: put python3.11 on PATH, or run: PEER_PYTHON=/path/to/python3.11 make peer
        Without it the tests marked `peer` are skipped and everything else runs.
MESSAGE
  exit 2
fi

echo "make peer: setting up $venv with $("$python" --version)" >&2
rm -rf -- "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"
"$venv/bin/python" -W ignore -c 'from onnxruntime.training import api, artifacts' || {
  echo "make peer: the packages were installed but onnxruntime.training.artifacts does not import" >&2
  exit 1
}

# Whole or not at all: the stamp appears only when everything above has worked.
printf '%s\n' "$wanted" >"$venv/.ready.tmp"
mv "$venv/.ready.tmp" "$venv/.ready"
