"""What `make kits` says at its end: which kits ran, and why others did not."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kits.ran import PLATFORMS, Ran


def test_what_ran_and_what_did_not_is_said_with_the_reason(tmp_path: Path) -> None:
    ran = Ran()
    ran.add("tests/kits/test_cpp.py::test_a", "passed", "")
    ran.add("tests/kits/test_cpp.py::test_b", "failed", "")
    ran.add("tests/kits/test_cpp.py::test_on_arm64", "passed", "")
    ran.add("tests/kits/test_js.py::test_a", "passed", "")
    ran.add("tests/kits/test_js.py::test_b", "skipped", "no reference")
    ran.add("tests/kits/test_swift_apps.py::test_a", "skipped", "there is no toolchain")
    ran.add("tests/kits/test_python.py::test_a", "passed", "")
    did, did_not = ran.lines()
    assert did == (
        "kits that ran: C++ on ARM64, emulated (1 passed), C++ on x86-64 (1 failed, 1 passed), "
        "Node.js (1 passed, 1 skipped)"
    )
    assert "Swift on Linux: there is no toolchain" in did_not
    assert "Kotlin and Java on the JVM: not asked for" in did_not
    ran.write(tmp_path / "build" / "ran.json")
    content = json.loads((tmp_path / "build" / "ran.json").read_text())
    assert list(content) == list(PLATFORMS)
    assert content["Node.js"] == {"ran": True, "passed": 1, "skipped": 1, "reason": "no reference"}
    assert content["Swift on Linux"]["ran"] is False
    later = Ran()
    later.add("tests/kits/test_swift.py::test_a", "passed", "")
    later.write(tmp_path / "build" / "ran.json")
    again = json.loads((tmp_path / "build" / "ran.json").read_text())
    assert again == content | {"Swift on Linux": {"ran": True, "passed": 1, "reason": None}}
