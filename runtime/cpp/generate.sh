#!/usr/bin/env bash
# Generate include/odtpack/checkpoint_generated.h from docs/formats/checkpoint.fbs with flatc 2.0.8.
# The names get a namespace of their own, apart from ONNX Runtime's, which apps may link as well;
# the check for one version of flatbuffers goes, since the code needs nothing that changed later.
#
# usage: runtime/cpp/generate.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sed 's/^namespace .*/namespace odtpack.fbs;/' "$here/../../docs/formats/checkpoint.fbs" >"$work/checkpoint.fbs"
flatc --cpp -o "$work" "$work/checkpoint.fbs"
sed -e '/^\/\/ Ensure the included/,/"Non-compatible flatbuffers/d' "$work/checkpoint_generated.h" \
  >"${1:-$here/include/odtpack}/checkpoint_generated.h"
