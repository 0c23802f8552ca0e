"""The forms in which an export reaches the packager, and the options that change its shape."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from tests.exported import twins
from tests.exported.compare import assert_follows
from tests.exported.export import Exporter, export
from tests.exported.subjects import SUBJECTS, Data

SUBJECT = SUBJECTS["padding-mask"]


@pytest.fixture
def made() -> tuple[nn.Module, Data, Tensor | None]:
    module, data, target = twins.make(SUBJECT, 0)
    return module.eval(), data, target


@pytest.mark.parametrize(
    ("exporter", "options"),
    [
        ("torchscript", {"keep_initializers_as_inputs": True}),
        ("torchscript", {"do_constant_folding": False}),
        ("dynamo", {"keep_initializers_as_inputs": True}),
        ("dynamo", {"optimize": False}),
        ("dynamo", {"external_data": False}),
    ],
)
def test_options(
    made: tuple[nn.Module, Data, Tensor | None],
    exporter: Exporter,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    module, data, target = made
    model = export(
        module, data, tmp_path / "model.onnx", exporter, dynamic=SUBJECT.dynamic, **options
    )
    manifest = assert_follows(SUBJECT, module, data, target, model, tmp_path)
    # Parameters that the file offers as inputs are none that the application feeds.
    assert [value.name for value in manifest.inputs] == [*data, "labels"]


@pytest.mark.parametrize("form", ["model", "model_proto"])
def test_a_program_in_memory(
    made: tuple[nn.Module, Data, Tensor | None], form: str, tmp_path: Path
) -> None:
    """What torch.onnx.export returns, whose initializers are the module's own tensors."""
    module, data, target = made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, tuple(data.values()), dynamo=True, verbose=False)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    assert_follows(SUBJECT, module, data, target, getattr(program, form), tmp_path)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_stream(made: tuple[nn.Module, Data, Tensor | None], tmp_path: Path) -> None:
    module, data, target = made
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, tuple(data.values()), stream, dynamo=False)
    model = onnx.load_from_string(stream.getvalue())
    assert_follows(SUBJECT, module, data, target, model, tmp_path)


def test_external_data(made: tuple[nn.Module, Data, Tensor | None], tmp_path: Path) -> None:
    """As the newer exporter writes models by default, and larger ones always."""
    module, data, target = made
    model = export(module, data, tmp_path / "model.onnx", "dynamo", external_data=True)
    stored = onnx.load(model, load_external_data=False)
    assert any(tensor.external_data for tensor in stored.graph.initializer)
    assert_follows(SUBJECT, module, data, target, model, tmp_path)
