#!/usr/bin/env bash
# The Kotlin kit, built by Maven against the published onnxruntime, and what its tests run with, in
# build/kotlin:
#
#     tools/      the Kotlin compiler and Android's classes
#     android/    classes.jar of onnxruntime-android, where the repository has it
#     tests/      the compiled programs of tests/kits/kotlin
#
# and in build/kits the Python wheel of the same ONNX Runtime, which the tests compare with to the
# bit. What is there and up to date is not made again; after the first run no network is needed.
#
# usage: scripts/setup_kits_kotlin.sh [PYTHON]      (default: .venv/bin/python)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:-$root/.venv/bin/python}
kit=$root/runtime/kotlin
build=$root/build/kotlin
tests=$root/tests/kits/kotlin

if ! command -v mvn >/dev/null || ! command -v javac >/dev/null; then
  "$root/scripts/debian_packages.sh" "Kotlin kit" maven default-jdk-headless
fi

# Without the network first: what was fetched once serves for ever.
maven() {
  mvn -q -B --offline "$@" >/dev/null 2>&1 || mvn -q -B "$@"
}

mkdir -p "$build"
sources=$(cat "$kit/pom.xml" "$tests/pom.xml" "$0" $(find "$kit/src" "$tests" -type f | sort) | sha256sum)
if [[ ! -e $build/.ready || $(<"$build/.ready") != "$sources" ]]; then
  rm -f "$build/.ready"
  echo "Kotlin kit: building the kit" >&2
  maven -f "$kit/pom.xml" package
  if [[ ! -e $build/tools/.ready ]] || ! cmp -s "$tests/pom.xml" "$build/tools/.ready"; then
    rm -rf "$build/tools"
    maven -f "$tests/pom.xml" dependency:copy-dependencies "-DoutputDirectory=$build/tools"
    cp "$tests/pom.xml" "$build/tools/.ready"
  fi
  rm -rf "$build/tests"
  "$tests/kotlinc.sh" -d "$build/tests" -cp "$kit/target/classes:$kit/target/lib/*" \
    "-Xfriend-paths=$kit/target/classes" "$tests"/*.kt
  echo "$sources" >"$build/.ready"
fi

version=$(sed -n 's/.*<onnxruntime.version>\(.*\)<.*/\1/p' "$kit/pom.xml")
if [[ ! -e $build/android/.tried ]]; then
  mkdir -p "$build/android"
  if mvn -q -B dependency:copy "-DoutputDirectory=$build/android" \
    "-Dartifact=com.microsoft.onnxruntime:onnxruntime-android:$version:aar" >/dev/null 2>&1; then
    (cd "$build/android" && jar xf "onnxruntime-android-$version.aar" classes.jar)
  fi
  touch "$build/android/.tried"
fi

wheel=$root/build/kits/onnxruntime-$version
if [[ ! -e $wheel/.ready ]]; then
  echo "Kotlin kit: installing the wheel of ONNX Runtime $version into $wheel" >&2
  rm -rf -- "$wheel"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$wheel" \
    "onnxruntime==$version"
  touch "$wheel/.ready"
fi
