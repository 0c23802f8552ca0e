#!/usr/bin/env bash
# Exporters of language models, in virtual environments of their own: they need versions of
# transformers that exclude each other. make exporters starts them as processes.
#
# usage: scripts/setup_exporters.sh      (makes .venv-exporters/NAME of each
#        benchmarks/exporters/NAME.txt, next to the Makefile)
# PYTHON names the interpreter, 3.11 or newer; by default that of .venv. PIP_EXTRA_INDEX_URL may name
# an index with the CPU build of PyTorch.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for requirements in benchmarks/exporters/*.txt; do
  venv=.venv-exporters/$(basename "$requirements" .txt)
  # Whole or not at all: the stamp appears only when everything has worked.
  if cmp --silent "$requirements" "$venv/.ready"; then
    continue
  fi
  python=${PYTHON:-.venv/bin/python}
  echo "make exporters: setting up $venv with $("$python" --version)" >&2
  rm -rf -- "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
  cp "$requirements" "$venv/.ready"
done
