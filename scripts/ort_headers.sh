#!/usr/bin/env bash
# Copies ONNX Runtime's headers for C and C++ into a folder: the newest of Debian's that a library
# of a version serves. The wheels hold no headers, and Debian's newer suites do: they are looked up
# through an apt of their own, which leaves that of the system alone.
#
# usage: scripts/ort_headers.sh VERSION FOLDER
# ODTPACK_ORT_INCLUDE names a folder with onnxruntime_cxx_api.h where there is no apt.
set -euo pipefail

version=$1 target=$2
mkdir -p "$target"
if [[ -n ${ODTPACK_ORT_INCLUDE:-} ]]; then
  cp -r "$ODTPACK_ORT_INCLUDE/." "$target/"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uri=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' | sort -u |
  awk '$2 == "Debian" && $1 !~ /security/ { print $1; exit }')
mkdir -p "$work"/{parts,state/lists/partial,cache/archives/partial}
touch "$work/state/status"
cat >"$work/parts/newer.sources" <<SOURCES
Types: deb
URIs: $uri
Suites: trixie sid experimental
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
apt=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/parts"
  -o "Dir::State=$work/state" -o "Dir::State::status=$work/state/status"
  -o "Dir::Cache=$work/cache" -o Acquire::Languages=none -o APT::Sandbox::User=root)
apt-get "${apt[@]}" -qq update
newest=$(apt-cache "${apt[@]}" madison libonnxruntime-dev | awk '{ print $3 }' |
  while read -r candidate; do
    if dpkg --compare-versions "${candidate%%[+-]*}" le "$version"; then echo "$candidate"; fi
  done | sort -V | tail -n 1)
(cd "$work" && apt-get "${apt[@]}" -qq download "libonnxruntime-dev=$newest")
dpkg-deb -x "$work"/libonnxruntime-dev_*.deb "$work/headers"
cp -r "$work/headers/usr/include/onnxruntime/." "$target/"
