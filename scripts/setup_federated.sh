#!/usr/bin/env bash
# Flower, in a virtual environment of its own: it pins older versions of libraries that odtpack's
# commands use. The tests marked `federated` and the benchmark of fleets start it as a process.
#
# usage: scripts/setup_federated.sh [DIRECTORY]      (default: .venv-federated next to the Makefile)
# PYTHON names the interpreter, 3.11 or newer; by default that of .venv.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=${1:-$root/.venv-federated}

of_venv() {
  "$root/.venv/bin/python" -c \
    "import importlib.metadata as m; print('$1==' + m.version('$1'))"
}

# Ray comes with Flower's own engine of simulations. The two that compute are those of .venv: the
# same bits are asked of both.
requirements=(
  -e ./runtime
  -e '.[demo,federated]'
  'flwr[simulation]>=1.28'
  "$(of_venv onnx)"
  "$(of_venv onnxruntime)"
)

# The stamp holds what was installed: another list of requirements builds the environment anew.
wanted=$(printf '%s\n' "${requirements[@]}")
if [[ -f $venv/.ready && $(<"$venv/.ready") == "$wanted" ]]; then
  exit 0
fi

python=${PYTHON:-$root/.venv/bin/python}
echo "make federated: setting up $venv with $("$python" --version)" >&2
rm -rf -- "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]}"
"$venv/bin/python" -c 'import odtpack.flower' || {
  echo "make federated: the packages were installed but odtpack.flower does not import" >&2
  exit 1
}

# Whole or not at all: the stamp appears only when everything above has worked.
printf '%s\n' "$wanted" >"$venv/.ready.tmp"
mv "$venv/.ready.tmp" "$venv/.ready"
