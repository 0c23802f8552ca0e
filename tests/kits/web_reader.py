"""The kit in Chromium as a reader: ``python -m tests.kits.web_reader hostile|read DIR``."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.kits import web
from tests.reports.browser import CHROMIUM, Browser


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
    with (
        tempfile.TemporaryDirectory(prefix="odtpack-chromium-") as profile,
        Browser(Path(profile), served=True) as browser,
        web.serve({**web.FOLDERS, "files": arguments.folder}) as address,
    ):
        web.open_kit(browser, f"{address}?threads=1")
        results = web.run(browser, "read", names)
    if "what" in results:
        sys.exit(str(results["what"]))
    sys.stdout.write("".join(f"{line}\n" for line in results["lines"]))


if __name__ == "__main__":
    main()
