#!/usr/bin/env bash
# The Swift toolchain that the Swift kit is built and tested with on Linux: Debian's swiftlang in
# a root of its own, the headers that the C++ kit below it needs, and the library of the Python
# environment.
#
#     root/       Debian trixie with swiftlang
#     include/    headers of ONNX Runtime and of flatbuffers
#     lib/        libonnxruntime.so of the wheel
#
# usage: scripts/setup_swift.sh      (into ODTPACK_SWIFT, default: build/swift)
# ODTPACK_ORT_INCLUDE names a folder with onnxruntime_cxx_api.h to be used in place of Debian's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${ODTPACK_SWIFT:-$root/build/swift}
python=$root/.venv/bin/python
version=$("$python" -c 'import onnxruntime; print(onnxruntime.__version__)')
wheel=$("$python" -c 'import onnxruntime, pathlib; print(pathlib.Path(onnxruntime.__file__).parent)')
stamp="onnxruntime $version, setup 3"
[[ -f $target/.ready && $(<"$target/.ready") == "$stamp" ]] && exit 0

privileged=()
if [[ $(id -u) -ne 0 ]]; then privileged=(sudo -n); fi
as_root() { ${privileged[@]+"${privileged[@]}"} "$@"; }
suite_uri() {
  apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' | sort -u |
    awk '$2 == "Debian" && $1 !~ /security/ { print $1; exit }'
}

mkdir -p "$target"
# A root that was begun is thrown away: debootstrap does not resume.
if [[ ! -f $target/.root-ready ]]; then
  if ! command -v debootstrap >/dev/null && [[ ! -x /usr/sbin/debootstrap ]]; then
    "$root/scripts/debian_packages.sh" "Swift kit" debootstrap
  fi
  echo "Swift kit: installing Debian's swiftlang into $target/root (about 2 GB)" >&2
  as_root rm -rf "$target/root"
  as_root env PATH="$PATH:/usr/sbin:/sbin" debootstrap --variant=minbase \
    --include=ca-certificates trixie "$target/root" "$(suite_uri)" >"$target/root.log" 2>&1
  touch "$target/.root-ready"
fi
# Swift's package manager fetches dependencies with git.
as_root unshare -m bash -euc '
  mount -t proc proc "$1/proc"
  DEBIAN_FRONTEND=noninteractive chroot "$1" apt-get install -qq -y --no-install-recommends \
    swiftlang libc6-dev libstdc++-14-dev binutils git
  chroot "$1" apt-get clean' _ "$target/root" >>"$target/root.log" 2>&1

"$root/scripts/debian_packages.sh" "Swift kit" flatbuffers-compiler libflatbuffers-dev
rm -rf "$target/include"
mkdir -p "$target/lib"
"$root/scripts/ort_headers.sh" "$version" "$target/include"
cp -r /usr/include/flatbuffers "$target/include/"

# A copy, since the root sees none of the host's files; programs look for it by its soname.
cp -f "$(echo "$wheel"/capi/libonnxruntime.so.*)" "$target/lib/libonnxruntime.so.1"
ln -sf libonnxruntime.so.1 "$target/lib/libonnxruntime.so"

printf '%s\n' "$stamp" >"$target/.ready"
