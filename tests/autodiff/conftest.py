"""Says after a run how many gradients were held to the oracles."""

from __future__ import annotations

import pytest

SWEEPS = ("test_gradient_is_that_of_both_oracles", "test_gradient_of_the_body_is_that_of_both")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = [
        report.nodeid
        for report in terminalreporter.getreports("passed")
        if any(sweep in report.nodeid for sweep in SWEEPS)
    ]
    if passed:
        operators = {nodeid.rpartition("[")[2].partition("-")[0] for nodeid in passed}
        terminalreporter.write_line(
            f"gradient sweep: {len(passed)} cases of {len(operators)} operators agree with "
            "PyTorch and finite differences"
        )
