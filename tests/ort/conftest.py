"""Packages of the models, built once."""

from collections.abc import Callable

import pytest

from odtpack.choices import OrtFormat
from odtpack_runtime.package.package import Package
from tests.ort.models import package_of

Shared = Callable[[str, OrtFormat | None], Package]


@pytest.fixture(scope="session")
def shared_package(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Like :func:`package_of`, for tests that leave the package as it is."""
    built: dict[tuple[str, OrtFormat | None], Package] = {}

    def get(name: str, ort_format: OrtFormat | None) -> Package:
        key = name, ort_format
        if key not in built:
            built[key] = package_of(name, tmp_path_factory.mktemp(name) / "p", ort_format)
        return built[key]

    return get
