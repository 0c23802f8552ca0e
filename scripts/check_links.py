"""Check a built site: every link and anchor leads somewhere, and no page loads from another host.

usage: python scripts/check_links.py FOLDER
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src"}


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "top"}
        self.links: list[tuple[str, bool]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        loads = LOADS.get(tag)
        for name in ("href", "src"):
            if name in given and tag != "base" and given.get("rel") != "canonical":
                self.links.append((given[name], name == loads))


def check(folder: Path) -> tuple[int, list[str]]:
    """Return how many links there are, and one line for each that leads nowhere."""
    folder = folder.resolve()
    pages = {path: _Page(path.read_text("utf-8")) for path in sorted(folder.rglob("*.html"))}
    checked, broken = 0, []
    for path, page in pages.items():
        for link, loads in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if loads and parts.scheme not in ("data", "javascript"):
                    broken.append(f"{path.relative_to(folder)} loads {link}")
                continue
            checked += 1
            # The page that a server shows for an address that is not there has absolute links.
            base = folder if parts.path.startswith("/") else path.parent
            target = path if not parts.path else (base / unquote(parts.path.lstrip("/"))).resolve()
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            there = target.is_relative_to(folder) and target.is_file()
            if not there or (target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(folder)} links to {link}")
    return checked, broken


def main() -> int:
    folder = Path(sys.argv[1])
    checked, broken = check(folder)
    print(*broken, sep="\n", end="\n" if broken else "")
    print(f"{folder}: {checked:,} links and anchors, {len(broken)} broken")
    return 1 if broken or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
