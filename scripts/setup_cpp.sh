#!/usr/bin/env bash
# What the C++ kit is built and tested with, in build/cpp-deps: ONNX Runtime's headers, the
# library of the Python environment, and both for ARM64 with an emulator.
#
#     include/          headers of ONNX Runtime, from Debian: the newest that the library serves
#     lib/, lib-arm64/  libonnxruntime.so of the wheels for this machine and for ARM64
#     arm64/            what an ARM64 program finds at / under qemu
#
# usage: scripts/setup_cpp.sh [DIRECTORY]      (default: build/cpp-deps)
# ODTPACK_ORT_INCLUDE names a folder with onnxruntime_cxx_api.h where there is no apt.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:-$root/build/cpp-deps}
python=$root/.venv/bin/python
version=$("$python" -c 'import onnxruntime; print(onnxruntime.__version__)')
wheel=$("$python" -c 'import onnxruntime, pathlib; print(pathlib.Path(onnxruntime.__file__).parent)')
stamp="onnxruntime $version, setup 1"
[[ -f $target/.ready && $(<"$target/.ready") == "$stamp" ]] && exit 0

"$root/scripts/debian_packages.sh" "C++ kit" cmake g++ flatbuffers-compiler libflatbuffers-dev \
  qemu-user-static g++-aarch64-linux-gnu libc6-dev-arm64-cross

rm -rf "$target"
mkdir -p "$target"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$root/scripts/ort_headers.sh" "$version" "$target/include"

# Programs look for the library by its soname, which its file does not carry.
link_library() {
  mkdir -p "$2"
  for name in libonnxruntime.so libonnxruntime.so.1; do ln -s "$1" "$2/$name"; done
}
link_library "$(echo "$wheel"/capi/libonnxruntime.so.*)" "$target/lib"

"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
  --platform manylinux2014_aarch64 --python-version 3.11 -d "$work/wheels" "onnxruntime==$version"
"$python" -m zipfile -e "$work"/wheels/onnxruntime-*.whl "$work/arm64"
mkdir -p "$target/arm64/proc" "$target/arm64/ort"
cp "$work"/arm64/onnxruntime/capi/libonnxruntime.so.* "$target/arm64/ort/"
link_library "$(echo "$target"/arm64/ort/libonnxruntime.so.*)" "$target/lib-arm64"
ln -s /usr/aarch64-linux-gnu/lib "$target/arm64/lib"
# Without an ARM one of its own, the library reads the host's /proc/cpuinfo and crashes.
for processor in 0 1; do
  printf '%s\n' "processor : $processor" 'BogoMIPS : 50.00' \
    'Features : fp asimd evtstrm crc32 cpuid' 'CPU implementer : 0x41' 'CPU architecture: 8' \
    'CPU variant : 0x0' 'CPU part : 0xd03' 'CPU revision : 4' ''
done >"$target/arm64/proc/cpuinfo"

# A cross compiler must not see /usr/include.
cp -r /usr/include/flatbuffers "$target/include/"

printf '%s\n' "$stamp" >"$target/.ready"
