"""Runs a function of a benchmark in a fresh process; arguments and result pass as JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="odtpack-bench-") as name:
        yield Path(name)


def call(
    function: Callable[..., Any],
    *,
    python: str | Path = sys.executable,
    how: dict[str, Any] | None = None,  # for subprocess.run
    environment: dict[str, str] | None = None,  # on top of this process's
    **arguments: Any,
) -> Any:
    """What a function returns in a process of its own; if it fails, a RuntimeError says why."""
    module = function.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name
    with scratch() as folder:
        job, result = folder / "job.json", folder / "result.json"
        job.write_text(json.dumps(arguments, default=os.fspath))
        command = [python, "-W", "ignore", "-m", "benchmarks.apart", module, function.__name__]
        done = subprocess.run(
            [*command, job, result], cwd=ROOT, env={**os.environ, **(environment or {})},
            capture_output=True, text=True, errors="replace", check=False, **(how or {}),
        )  # fmt: skip
        if done.returncode or not result.exists():
            said = done.stderr[-2000:] or f"exit code {done.returncode}"
            raise RuntimeError(f"{function.__name__} {arguments}: {said}")
        return json.loads(result.read_text())


if __name__ == "__main__":
    name, function_name, given, answer = sys.argv[1:]
    found = getattr(importlib.import_module(name), function_name)
    Path(answer).write_text(json.dumps(found(**json.loads(Path(given).read_text()))))
