"""What the tests of adapters share: models, and PEFT if it is installed."""

import importlib.util
from pathlib import Path

import pytest

from tests.adapters import llama

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="PEFT is not installed (pip install peft)"
)


@pytest.fixture(scope="session")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The language model with seed 0."""
    return llama.exported(llama.llama(), tmp_path_factory.mktemp("llama") / "model.onnx")
