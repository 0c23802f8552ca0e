import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.federated import play as federated

Play = Callable[..., dict[str, Any]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Plays a job of ``flower_jobs.py`` in the environment of Flower."""
    if not federated.installed():
        pytest.fail("Flower is not installed in .venv-federated: run make federated")
    return functools.partial(federated.play, tmp_path)
