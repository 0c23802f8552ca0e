#!/usr/bin/env bash
# The tokenizers of docs/guides/text.md for other languages, in build/tokenizers: js from npm, jvm
# from Maven, and native, the guide's library, by Cargo. A language whose tools are not there is left
# out, and the tests say so.
#
# usage: scripts/setup_tokenizers.sh [PYTHON]      (default: .venv/bin/python)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:-$root/.venv/bin/python}
build=$root/build/tokenizers
mkdir -p "$build"/{js,jvm,native/src}
PATH=$PATH:$root/build/node/bin # of scripts/setup_kits_js.sh

if command -v npm >/dev/null && [[ ! -e $build/js/.ready ]]; then
  echo "tokenizers: installing @huggingface/tokenizers" >&2
  npm install --prefix "$build/js" --ignore-scripts --no-audit --no-fund --loglevel=error \
    @huggingface/tokenizers@0.2.0 >/dev/null
  touch "$build/js/.ready"
fi

if command -v mvn >/dev/null && [[ ! -e $build/jvm/.ready ]]; then
  echo "tokenizers: fetching ai.djl.huggingface:tokenizers" >&2
  mvn -q -B -f "$root/tests/tokenizers/pom.xml" dependency:copy-dependencies \
    "-DoutputDirectory=$build/jvm"
  touch "$build/jvm/.ready"
fi

if command -v cargo >/dev/null; then
  "$python" - "$root/docs/guides/text.md" "$build/native" <<'PYTHON'
import pathlib
import re
import sys

guide, folder = map(pathlib.Path, sys.argv[1:])
for name, content in re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", guide.read_text(), re.M | re.S):
    path = folder / name
    if not path.is_file() or path.read_text() != content:  # Cargo looks at times
        path.write_text(content)
PYTHON
  echo "tokenizers: building the library of the guide" >&2
  cargo build --quiet --release --manifest-path "$build/native/Cargo.toml"
fi
