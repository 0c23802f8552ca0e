#!/usr/bin/env bash
# odtpack and what it needs, in a virtual environment.
#
# usage: scripts/setup_venv.sh demo|full DIRECTORY
#   demo: what `odtpack demo` needs. full: also the tests, PyTorch as their oracle, lint and types.
# PYTHON names the interpreter, 3.11 or newer; otherwise the first such one on PATH is taken.
# PyTorch's default build for Linux brings gigabytes of CUDA; its CPU build serves the tests as well.
# Point pip at it (PIP_EXTRA_INDEX_URL, see PyTorch's installation page) before the first run.
set -euo pipefail

kind=$1
venv=$2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_new_enough() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if ! is_new_enough "$venv/bin/python"; then
  candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  python=
  for candidate in "${candidates[@]}"; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      python=$candidate
      break
    fi
  done
  if [[ -z $python ]]; then
    cat >&2 <<MESSAGE
odtpack needs Python 3.11 or newer with the venv module, and none was found: ${candidates[0]} is
$("${candidates[0]}" --version 2>/dev/null || echo "not on PATH").
  help: install it (on Debian and Ubuntu: apt-get install python3 python3-venv),
        or name it: make PYTHON=/path/to/python3.12
MESSAGE
    exit 2
  fi
  echo "setting up $venv with $("$python" --version)" >&2
  rm -rf -- "$venv"
  "$python" -m venv "$venv"
fi

install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
odtpack=(-e ./runtime -e)
case $kind in
  demo) "${install[@]}" "${odtpack[@]}" '.[demo]' ;;
  full)
    echo "installing the tests' requirements, PyTorch among them" >&2
    "${install[@]}" 'pip>=25.1' # the first with --group
    "${install[@]}" --group test --group oracle --group dev "${odtpack[@]}" \
      '.[demo,fit,privacy,ray,webgpu]' 'torch==2.13.0'
    touch "$venv/.ready-demo"
    ;;
  *)
    echo "usage: scripts/setup_venv.sh demo|full DIRECTORY" >&2
    exit 2
    ;;
esac
touch "$venv/.ready-$kind"
