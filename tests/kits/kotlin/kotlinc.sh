#!/usr/bin/env bash
# The Kotlin compiler of build/kotlin/tools; a `*` in the class path stands for all jars of a folder.
set -euo pipefail
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/build/kotlin/tools
arguments=()
for argument in "$@"; do
  if [[ $argument == *'/*' || $argument == *'/*:'* ]]; then
    expanded=
    IFS=: read -ra parts <<<"$argument"
    for part in "${parts[@]}"; do expanded+=:$(echo $part | tr ' ' :); done
    argument=${expanded#:}
  fi
  arguments+=("$argument")
done
compiler=$(echo "$tools"/{kotlin,annotations,trove4j}*.jar | tr ' ' :)
exec java -Xmx1g -XX:+UseSerialGC -cp "$compiler" org.jetbrains.kotlin.cli.jvm.K2JVMCompiler \
  -no-stdlib -no-reflect -nowarn -jvm-target 1.8 "${arguments[@]}"
