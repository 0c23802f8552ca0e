#!/usr/bin/env bash
# onnxruntime-genai and what its builder needs, in a virtual environment of its own, which make
# exporters starts as a process.
#
# usage: scripts/setup_exporters.sh [DIRECTORY]      (default: .venv-exporters next to the Makefile)
# PYTHON names the interpreter; by default that of .venv.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-exporters}
requirements=('onnxruntime-genai==0.18.0' 'torch==2.13.0' 'transformers>=5.23' onnx onnx_ir)

# The stamp holds what was installed: another list of requirements builds the environment anew.
if [[ -f $venv/.ready && $(<"$venv/.ready") == "${requirements[*]}" ]]; then
  exit 0
fi

python=${PYTHON:-.venv/bin/python}
echo "make exporters: setting up $venv with $("$python" --version)" >&2
rm -rf -- "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"
echo "${requirements[*]}" >"$venv/.ready"
