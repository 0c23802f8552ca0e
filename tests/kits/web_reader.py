"""The kit in Chromium as a reader: ``python -m tests.kits.web_reader hostile|read DIR``."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.kits import web
from tests.kits.javascript import SCRIPTS
from tests.reports.browser import CHROMIUM, Browser

_READ = """(async () => {
  const { hostile, readings } = await import('/scripts/reading.mjs');
  const { parseManifest } = await import('/odtpack/manifest.js');
  const at = (path) => new URL(path.split('/').map(encodeURIComponent).join('/'),
    new URL('/files/', location.href));
  const read = async (path) => new Uint8Array(await (await fetch(at(path))).arrayBuffer());
  const sha256 = async (bytes) => Array.from(
    new Uint8Array(await crypto.subtle.digest('SHA-256', bytes.slice())),
    (byte) => byte.toString(16).padStart(2, '0')).join('');
  const context = { kit, ort, parseManifest, read, at, sha256 };
  const names = %s;
  const lines = [];
  for await (const line of names ? readings(context, names) : hostile(context)) lines.push(line);
  window.results = { lines };
})().catch((error) => { window.results = { failed: String(error) }; }), 1"""


def unavailable() -> str | None:
    """None where there is a browser, otherwise the reason."""
    return None if CHROMIUM else "no Chromium on this machine"


def main() -> None:
    """Print a line for each case or file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["hostile", "read"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    names = None
    if arguments.command == "read":
        found = (*arguments.folder.glob("*.ckpt"), *arguments.folder.glob("*.json"))
        names = sorted(path.name for path in found)
    folders = {**web.FOLDERS, "files": arguments.folder, "scripts": SCRIPTS}
    with (
        tempfile.TemporaryDirectory(prefix="odtpack-chromium-") as profile,
        Browser(Path(profile), served=True) as browser,
        web.serve(folders) as address,
    ):
        web.open_kit(browser, f"{address}?threads=1")
        browser.evaluate(_READ % json.dumps(names))
        while not (results := browser.evaluate("window.results")):
            time.sleep(0.2)
    if "failed" in results:
        sys.exit(str(results["failed"]))
    sys.stdout.write("".join(f"{line}\n" for line in results["lines"]))


if __name__ == "__main__":
    main()
