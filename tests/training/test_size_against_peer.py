"""Packages are as small as the reference's artifacts, or much smaller."""

from __future__ import annotations

import pytest

from benchmarks.package_size import MODELS, measure
from tests.peer import client
from tests.sweep import split

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(client.peer_available() is not None, reason=str(client.peer_available())),
]


@pytest.mark.parametrize("name", split(MODELS, lambda name: name != "transformer"))
def test_everything_trained_in_float32(name: str) -> None:
    sizes = measure(name)
    assert sizes.package <= 1.05 * sizes.reference
    assert sizes.nominal <= 0.05 * sizes.reference


@pytest.mark.parametrize("name", split(MODELS, lambda name: name != "mobilenet"))
def test_backbone_frozen_in_float16(name: str) -> None:
    sizes = measure(name, "float16", head=True)
    assert sizes.package <= 0.6 * sizes.reference
