#!/usr/bin/env bash
# Installs Debian packages that are missing; as root, or with sudo that asks for no password. Exits
# with 77 where there is no apt.
#
# usage: scripts/debian_packages.sh PURPOSE PACKAGE...
set -euo pipefail

purpose=$1
shift
missing=()
for package in "$@"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok' || missing+=("$package")
done
((${#missing[@]})) || exit 0
if ! command -v apt-get >/dev/null; then
  echo "$purpose: this needs ${missing[*]}, and there is no apt to install them with." >&2
  exit 77
fi
privileged=()
if [[ $(id -u) -ne 0 ]]; then privileged=(sudo -n); fi
exec {turn}</var/lib/dpkg
flock -w 900 "$turn" # apt waits for no other apt
echo "$purpose: installing ${missing[*]}" >&2
${privileged[@]+"${privileged[@]}"} apt-get update -qq
${privileged[@]+"${privileged[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
  --no-install-recommends "${missing[@]}" >/dev/null
