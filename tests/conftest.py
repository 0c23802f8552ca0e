"""What holds for all tests."""

import collections
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.command import run
from tests.sweep import EVERY, Asked

__all__ = ["run"]

# No test asserts a time, and a busy machine is slow to make examples.
hypothesis.settings.register_profile(
    "odtpack", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("odtpack")

NODE_CASES = "node cases "
LONGEST = ("tests/test_additions.py", "tests/fuzz/test_fuzz.py::test_many")
SWEEPS = ("test_gradient_is_that_of_both_oracles", "test_gradient_of_the_body_is_that_of_both")


def pytest_configure(config: pytest.Config) -> None:
    """Make no cases of the sweep where they are left out, and collect no garbage meanwhile.

    A fifth of the time that collection took went into looking for garbage among objects that
    all stay.
    """
    gc.disable()
    Asked.rest = "not sweep" not in config.option.markexpr


class FromBehind(pytest.Dir):
    """A folder whose last file is collected first."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return [*super().collect()][::-1]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Dir | None:
    """Let every other process begin with the last file.

    What one has imported the other finds as bytecode, where a fresh clone has none yet.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return FromBehind.from_parent(parent, path=path) if number % 2 else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slowest tests to make sweep, and those of kits to make kits.

    ``scripts/slow_tests.py`` chooses them. With ODTPACK_SWEEP_EVERY=25 each test function of the
    sweep keeps one in 25 of its cases, and each file one in 25 of its slowest tests.
    """
    slow = set(Path(__file__).with_name("slow_tests.txt").read_text("utf-8").splitlines())
    cases: collections.Counter[str] = collections.Counter()
    left_out = set()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("sweep")
        if EVERY > 1 and item.get_closest_marker("sweep"):
            group = item.nodeid.partition("::" if item.nodeid in slow else "[")[0]
            if cases[group] % EVERY:
                left_out.add(item)
            cases[group] += 1
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    # All processes need one order. Some run for minutes: as the last ones they would run alone.
    items.sort(key=lambda item: (not item.nodeid.startswith(LONGEST), item.path.parts))


def pytest_collection_finish() -> None:
    """Take half a million objects, the tests and PyTorch, out of the garbage collector's sight.

    They live until the end. A full collection walked through all of them to find nothing, and
    every build but a process's first starts with one: it cost several times the build.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def listed_codes() -> Iterator[None]:
    """Errors whose code is not in the table of error codes fail."""
    from odtpack_runtime.errors import OdtpackError, error_codes

    original = OdtpackError.__init__

    def checked(self: OdtpackError, code: str, what: str, **details: str | None) -> None:
        assert code in error_codes(), f"{code!r} is not in error_codes.toml"
        original(self, code, what, **details)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OdtpackError, "__init__", checked)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The first simulation calibrates the machine, and those of all processes take that over."""
    from tests import calibrated

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers
    with pytest.MonkeyPatch.context() as patch, calibrated.shared():
        patch.setenv(calibrated.FOLDER, str(folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Sessions of this process that name no number of threads have one, and so has PyTorch.

    The tests run on all cores as it is, and threads wait for each other in a busy loop: with one
    for each core a session took twice the time to open, and a small step as well.
    """
    import onnxruntime

    original = onnxruntime.InferenceSession.__init__

    def alone(self: Any, model: Any, sess_options: Any = None, *others: Any, **named: Any) -> None:
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        asked = options.intra_op_num_threads
        options.intra_op_num_threads = asked or 1
        try:
            original(self, model, options, *others, **named)
        finally:
            options.intra_op_num_threads = asked

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime.InferenceSession, "__init__", alone)
        yield


@pytest.fixture(autouse=True, scope="session")
def kept_processes() -> Iterator[None]:
    """Processes that answered for one package answer for the next: ``tests/kept_processes.py``."""
    from tests import kept_processes

    with kept_processes.kept():
        yield


@pytest.fixture(autouse=True, scope="session")
def one_job() -> Iterator[None]:
    """Work that names no number of jobs is done in this process.

    The tests run on all cores as it is, and a process of a pool takes a second to start.
    """
    from odtpack_simulator.replay import executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "default_jobs", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_the_disk() -> Iterator[None]:
    """Files that this process writes need not survive a power cut.

    A build waits for the disk twenty times, for as long as it computes. Processes that tests
    start wait as they do for users, and there tests kill and fail what is written.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many gradients were held to the oracles, and what became of the node cases."""
    passed = [
        report
        for report in terminalreporter.getreports("passed")
        if report.when == "call" and any(sweep in report.nodeid for sweep in SWEEPS)
    ]
    for kind, marked in (("representative", False), ("further", True)):
        ids = [report.nodeid for report in passed if ("sweep" in report.keywords) == marked]
        operators = {nodeid.rpartition("[")[2].partition("-")[0] for nodeid in ids}
        if ids:
            terminalreporter.write_line(
                f"gradients: {len(ids)} {kind} cases of {len(operators)} operators agree with "
                "PyTorch and finite differences"
            )
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    counts: collections.Counter[str] = collections.Counter()
    for name, number in (each for report in reports for each in report.user_properties):
        if name.startswith(NODE_CASES):
            counts[name.removeprefix(NODE_CASES)] += number
    if counts:
        parts = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        terminalreporter.write_line(f"node cases of the onnx package: {counts.total()}: {parts}")
