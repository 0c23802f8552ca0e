"""Tests that need the reference system take the fixture ``peer``; without it they are skipped."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.peer import client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks whatever takes the fixture, so that ``-m "not peer"`` leaves it out."""
    here = Path(__file__).parent
    for item in items:
        if "peer" in getattr(item, "fixturenames", ()) and here in item.path.parents:
            item.add_marker(pytest.mark.peer)


@pytest.fixture(scope="session")
def peer() -> ModuleType:
    """The module ``tests.peer.client``, where the reference system is installed."""
    reason = client.peer_available()
    if reason is not None:
        pytest.skip(reason)
    return client
