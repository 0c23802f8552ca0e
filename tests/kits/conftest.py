"""The conformance suite, written once for all of its tests; and which kits ran, and which not."""

from pathlib import Path
from typing import Any

import pytest

from tests.kits import cpp_kit, csharp_kit, javascript, swift_kit
from tests.kits.ran import RAN, Ran
from tests.kits.vectors import write_suite
from tests.once import made_once

_ran = Ran()
_NATIVE = {"cpp": cpp_kit, "swift": swift_kit}
_LAYERS = {"swift": swift_kit, "csharp": csharp_kit}
_SLOWEST = ("layers", "release", "kotlin", "cpp", "gallery", "js_browser", "decoder", "c", "js",
            "trust", "cpp_calls")  # fmt: skip
_CORE = {"cpp": cpp_kit, **_LAYERS}


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "suite", write_suite)


@pytest.fixture(scope="session")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The node_modules of a project that installed the tarball of a release."""
    return made_once(tmp_path_factory, "npm", _npm) / "node_modules"


def _npm(project: Path) -> None:
    project.mkdir()
    javascript.install(project)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that all processes end at about the same time."""
    order = {f"test_{name}.py": -place for place, name in enumerate(_SLOWEST[::-1], 1)}
    items.sort(key=lambda item: order.get(item.path.name, 0))


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
