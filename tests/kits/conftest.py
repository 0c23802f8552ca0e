"""The conformance suite, written once for all of its tests; and which kits ran, and which not."""

from pathlib import Path
from typing import Any

import pytest

from tests.kits import cpp_kit, csharp_kit, javascript, kotlin_kit, swift_kit
from tests.kits.ran import RAN, Ran
from tests.kits.vectors import write_suite
from tests.once import made_once

_ran = Ran()
_SLOWEST = ("layers", "training", "release", "kotlin", "cpp", "gallery", "js_browser", "decoder",
            "c", "js", "trust", "cpp_calls")  # fmt: skip
_KITS = {"cpp": cpp_kit, "swift": swift_kit, "csharp": csharp_kit, "kotlin": kotlin_kit,
         "node": javascript}  # fmt: skip


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


def _kits(*names: str) -> Any:
    """A fixture: the module that builds and runs a kit's programs."""

    @pytest.fixture(params=names)
    def kit(request: pytest.FixtureRequest) -> Any:
        module = _KITS[request.param]
        if reason := module.unavailable():
            pytest.skip(reason)
        return module

    return kit


every = _kits(*_KITS)
native = _kits("cpp", "swift", "csharp")
"""The kits on the native core; ``layer``: those over its C interface."""
layer, kit = _kits("swift", "csharp"), _kits("cpp", "swift")


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
