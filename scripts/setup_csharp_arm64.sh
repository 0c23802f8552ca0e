#!/usr/bin/env bash
# Mono for ARM64, which the C++ kit's emulator runs: Debian's packages, unpacked into build/mono-arm64.
# scripts/setup_cpp.sh comes first. Exits with 77 where they cannot be had.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/build/mono-arm64
[[ -e $target/.ready ]] && exit 0
command -v apt-get >/dev/null || exit 77
[[ -d $root/build/cpp-deps/arm64/proc && -d /usr/aarch64-linux-gnu/lib ]] || exit 77
echo "C# kit: unpacking Mono for ARM64 into $target" >&2
rm -rf "$target"
mkdir -p "$target/apt/partial"
options=(-qq -oAPT::Architecture=arm64 -oAPT::Architectures=arm64 "-oDir::State::Lists=$target/apt"
  -oDir::State::status=/dev/null "-oDir::Cache=$target/apt" -oAPT::Sandbox::User=)
apt-get "${options[@]}" update || exit 77
# Mono's native half is linked to Kerberos.
(cd "$target/apt" && apt-get "${options[@]}" download mono-runtime-common mono-runtime-sgen \
  libmono-corlib4.5-dll libmono-system4.0-cil libmono-system-core4.0-cil \
  libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1 libssl3) || exit 77
for package in "$target"/apt/*.deb; do dpkg -x "$package" "$target"; done
# The rest are the cross compiler's libraries, and an ARM processor's /proc/cpuinfo.
cp -r "$target/lib/aarch64-linux-gnu/." "$target/usr/lib/aarch64-linux-gnu/"
rm -rf "$target/apt" "$target/lib"
ln -s /usr/aarch64-linux-gnu/lib "$target/lib"
cp -r "$root/build/cpp-deps/arm64/proc" "$target/proc"
touch "$target/.ready"
