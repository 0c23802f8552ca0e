"""What `make kits` says at its end: which kits ran, and why others did not."""

from __future__ import annotations

from pathlib import Path

from tests.kits.ran import Ran


def test_what_ran_and_what_did_not_is_said_with_the_reason() -> None:
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


def test_a_later_run_of_some_tests_changes_those_only(tmp_path: Path) -> None:
    path = tmp_path / "build" / "ran.json"
    first, later = Ran(), Ran()
    first.add("tests/kits/test_js.py::test_a", "failed", "")
    first.add("tests/kits/test_js.py::test_b", "skipped", "no reference")
    first.write(path)
    later.add("tests/kits/test_js.py::test_a", "passed", "")
    later.write(path)
    both = Ran.read(path)
    assert both.counts("Node.js") == {"passed": 1, "skipped": 1}
    assert both.reasons("Node.js") == "no reference"
    assert not both.ran("Swift on Linux")
