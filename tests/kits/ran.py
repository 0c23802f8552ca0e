"""Which platforms the tests of the kits ran on, with what outcome; why not, where they did not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

RAN = Path(__file__).parents[2] / "build" / "kits" / "ran.json"
_PLATFORMS = (
    ("test_cpp.py", "arm64", "C++ on ARM64, emulated"),
    ("test_cpp.py", "", "C++ on x86-64"),
    ("test_js_browser.py", "webgpu", "Chromium, WebGPU in software"),
    ("test_js_browser.py", "", "Chromium, WebAssembly"),
    ("test_js.py", "", "Node.js"),
    ("test_kotlin.py", "", "Kotlin and Java on the JVM"),
    ("test_swift", "", "Swift on Linux"),
)
"""File of the tests, a part of their names, platform; the first that fits counts."""
PLATFORMS = tuple(platform for _, _, platform in _PLATFORMS)


class Ran:
    """Outcomes of tests by platform."""

    def __init__(self) -> None:
        self.platforms: dict[str, Counter[str]] = {}
        self._reasons: dict[str, str] = {}

    def add(self, test: str, outcome: str, reason: str) -> None:
        """Count a test by its id; those that belong to no platform are left out.

        Args:
            test: ``tests/kits/test_cpp.py::test_name``.
            outcome: ``passed``, ``failed`` or ``skipped``.
            reason: Why it was skipped.
        """
        file, _, name = test.partition("::")
        for start, part, platform in _PLATFORMS:
            if Path(file).name.startswith(start) and part in name:
                self.platforms.setdefault(platform, Counter())[outcome] += 1
                if outcome == "skipped":
                    self._reasons[platform] = reason
                return

    def ran(self, platform: str) -> bool:
        """Whether a test ran there at all."""
        counts = self.platforms.get(platform, Counter())
        return counts["passed"] + counts["failed"] > 0

    def lines(self) -> list[str]:
        """One line for what ran, with counts, and one for what did not, with reasons."""
        ran = ", ".join(f"{each} ({_counted(self.platforms[each])})"
                        for each in PLATFORMS if self.ran(each))  # fmt: skip
        left = "; ".join(f"{each}: {self._reasons.get(each, 'not asked for')}"
                         for each in PLATFORMS if not self.ran(each))  # fmt: skip
        return [f"kits that ran: {ran or 'none'}", f"kits that did not run: {left or 'none'}"]

    def write(self, path: Path) -> None:
        """Write the counts and reasons as JSON; platforms not asked for keep what is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text()) if path.is_file() else {}
        content = {each: before.get(each, {"ran": False}) for each in PLATFORMS}
        for each, counts in self.platforms.items():
            reason = self._reasons.get(each)
            content[each] = {"ran": self.ran(each), **counts, "reason": reason}
        path.write_text(json.dumps(content, indent=1) + "\n")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
