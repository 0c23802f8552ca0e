"""The conformance suite, written once for all of its tests; and which kits ran, and which not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kits import cpp_kit, csharp_kit, swift_kit
from tests.kits.ran import RAN, Ran
from tests.kits.vectors import write_suite
from tests.once import made_once

_ran = Ran()
_NATIVE = {"cpp": cpp_kit, "swift": swift_kit}
_LAYERS = {"swift": swift_kit, "csharp": csharp_kit}
_CORE = {"cpp": cpp_kit, **_LAYERS}


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "suite", write_suite)


def _needed(kit: Any) -> Any:
    if reason := kit.unavailable():
        pytest.skip(reason)
    return kit


@pytest.fixture(params=_NATIVE)
def kit(request: pytest.FixtureRequest) -> Any:
    """The module that builds and runs a kit's programs."""
    return _needed(_NATIVE[request.param])


@pytest.fixture(params=_LAYERS)
def layer(request: pytest.FixtureRequest) -> Any:
    """The same of a kit over the C interface."""
    return _needed(_LAYERS[request.param])


@pytest.fixture(params=_CORE)
def native(request: pytest.FixtureRequest) -> Any:
    """The same of each kit on the native core."""
    return _needed(_CORE[request.param])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else ""
        _ran.add(report.nodeid, report.outcome, reason.removeprefix("Skipped: "))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _ran.platforms or hasattr(terminalreporter.config, "workerinput"):
        return
    terminalreporter.section("kits")
    for line in _ran.lines():
        terminalreporter.write_line(line)
    _ran.write(RAN)
