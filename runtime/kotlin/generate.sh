#!/usr/bin/env bash
# Generate the readers and writers of the checkpoint's tables from docs/formats/checkpoint.fbs with
# flatc 2.0.8. They get a package of their own; the check for one version of flatbuffers goes, since
# the code needs nothing that changed later.
#
# usage: runtime/kotlin/generate.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${1:-$here/src/main/java}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sed 's/^namespace .*//; 1i namespace org.odtpack.fbs;' "$here/../../docs/formats/checkpoint.fbs" \
  >"$work/checkpoint.fbs"
flatc --java -o "$target" "$work/checkpoint.fbs"
sed -i -e '/ValidateVersion/d' "$target"/org/odtpack/fbs/*.java
