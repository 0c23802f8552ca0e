#!/usr/bin/env bash
# Runs a command inside the root of scripts/setup_swift.sh, where this project has the same path.
#
# usage: scripts/swift.sh COMMAND [ARGUMENT...]
# ODTPACK_SWIFT_BIND names further folders that the command sees, separated by colons.
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${ODTPACK_SWIFT:-$project/build/swift}
privileged=()
if [[ $(id -u) -ne 0 ]]; then privileged=(sudo -n); fi
${privileged[@]+"${privileged[@]}"} unshare -m bash -euc '
  root=$1 directory=$2 folders=$3; shift 3
  mount -t proc proc "$root/proc"
  mount --bind /dev "$root/dev"
  IFS=:
  for folder in $folders; do
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
  done
  exec chroot "$root" /usr/bin/env --chdir="$directory" "$@"
' _ "$target/root" "$PWD" "$project:$target:/tmp${ODTPACK_SWIFT_BIND:+:$ODTPACK_SWIFT_BIND}" "$@"
