"""Which platforms the tests of the kits ran on, with what outcome; why not, where they did not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

RAN = Path(__file__).parents[2] / "build" / "kits" / "ran.json"
_KITS = {"kotlin": "Kotlin and Java on the JVM", "node": "Node.js", "swift": "Swift on Linux",
         "csharp": "C# under Mono", "": "C++ on x86-64"}  # fmt: skip
"""Platforms by what names of the tests of several kits hold."""
_OF_SEVERAL = ("segments", "kit_device", "kernels", "layers", "telemetry", "training", "trust")
_PLATFORMS = (
    ("test_cpp", "arm64", "C++ on ARM64, emulated"), ("test_cpp", "", "C++ on x86-64"),
    ("test_js_browser.py", "webgpu", "Chromium, WebGPU in software"),
    ("test_js_browser.py", "", "Chromium, WebAssembly"), ("test_js.py", "", "Node.js"),
    ("test_js_segments.py", "", "Node.js"), ("test_kotlin", "", "Kotlin and Java on the JVM"),
    ("test_csharp", "arm64", "C# on ARM64, emulated"), ("test_csharp", "", "C# under Mono"),
    ("test_swift", "", "Swift on Linux"), ("test_trust.py", "arm64", "C++ on ARM64, emulated"),
    *((f"test_{file}.py", *each) for file in _OF_SEVERAL for each in _KITS.items()),
)  # fmt: skip
"""File of the tests, a part of their names, platform; the first that fits counts."""
PLATFORMS = tuple(dict.fromkeys(platform for _, _, platform in _PLATFORMS))


class Ran:
    """Outcomes of tests by platform."""

    def __init__(self) -> None:
        self.platforms: dict[str, dict[str, tuple[str, str]]] = {}
        """Outcome of each test, and why it was skipped."""

    def add(self, test: str, outcome: str, reason: str) -> None:
        """Note whether a test passed, failed or was skipped; those of no platform are left out."""
        file, _, name = test.partition("::")
        for start, part, platform in _PLATFORMS:
            if Path(file).name.startswith(start) and part in name:
                self.platforms.setdefault(platform, {})[test] = outcome, reason
                return

    def counts(self, platform: str) -> Counter[str]:
        """How many tests of a platform ended how."""
        return Counter(outcome for outcome, _ in self.platforms.get(platform, {}).values())

    def ran(self, platform: str) -> bool:
        """Whether a test ran there at all."""
        return not self.counts(platform).keys().isdisjoint(("passed", "failed"))

    def reasons(self, platform: str) -> str:
        """Why tests were skipped; empty if none was."""
        found = self.platforms.get(platform, {}).values()
        return "; ".join(dict.fromkeys(why for outcome, why in found if outcome == "skipped"))

    def lines(self) -> list[str]:
        """One line for what ran, with counts, and one for what did not, with reasons."""
        ran = ", ".join(f"{each} ({_counted(self.counts(each))})"
                        for each in PLATFORMS if self.ran(each))  # fmt: skip
        left = "; ".join(f"{each}: {self.reasons(each) or 'not asked for'}"
                         for each in PLATFORMS if not self.ran(each))  # fmt: skip
        return [f"kits that ran: {ran or 'none'}", f"kits that did not run: {left or 'none'}"]

    def write(self, path: Path) -> None:
        """Write the outcomes as JSON; tests that did not run keep the outcome that is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        merged = Ran.read(path)
        for platform, tests in self.platforms.items():
            merged.platforms.setdefault(platform, {}).update(tests)
        path.write_text(json.dumps(merged.platforms, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Ran:
        """What :meth:`write` wrote; nothing if there is no such file."""
        ran = cls()
        content = json.loads(path.read_text()) if path.is_file() else {}
        for platform, tests in content.items():
            ran.platforms[platform] = {test: (kind, why) for test, (kind, why) in tests.items()}
        return ran


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
