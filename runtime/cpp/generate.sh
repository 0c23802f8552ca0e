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
# An element type is a number here: a file may hold any, and C++ forbids reading an enum that has no
# such value.
sed -e 's/^namespace .*/namespace odtpack.fbs;/' -e '/^\/\/\/ The element types/,/^}/d' \
  -e 's/data_type:TensorDataType/data_type:int32/' \
  "$here/../../docs/formats/checkpoint.fbs" >"$work/checkpoint.fbs"
flatc --cpp -o "$work" "$work/checkpoint.fbs"
sed -e '/^\/\/ Ensure the included/,/"Non-compatible flatbuffers/d' "$work/checkpoint_generated.h" \
  >"${1:-$here/include/odtpack}/checkpoint_generated.h"
