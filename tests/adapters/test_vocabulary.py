"""The loss by parts of the vocabulary is PyTorch's, whatever matrix the model ends in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from torch import nn

from odtpack.adapters import AdapterSpec
from odtpack.adapters.layers import find_layers
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.model.loading import load_model
from tests.adapters import genai, llama
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import SPECS, follow, next_token, unpacked

LOSS = ("next_token", next_token)


@needs_peft
@pytest.mark.parametrize(("words", "base"), [(7, None), (7, "int8"), (100, None)])
def test_tied_to_the_embedding(words: int, base: Any, llama_file: Path, tmp_path: Path) -> None:
    module = llama.llama() if base is None else unpacked(llama.llama(), llama_file, base)
    options = {"words": words}
    follow(
        module, llama_file, tmp_path, SPECS["lora"], LOSS, llama.batch(),
        base=base, loss_options=options,
    )  # fmt: skip
    found = onnx.load(tmp_path / "training_model.onnx").graph
    shapes = [
        [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in found.value_info
    ]
    assert words >= llama.VOCABULARY or not any(
        shape[-1:] == [llama.VOCABULARY] and len(shape) == 3 for shape in shapes
    )


@needs_peft
@pytest.mark.parametrize("base", [None, "int8", "int4"])
def test_a_matrix_of_its_own(base: Any, tmp_path: Path) -> None:
    module = llama.llama()
    module.lm_head.weight = nn.Parameter(0.5 * module.lm_head.weight.detach().flip(0))
    model = llama.exported(module, tmp_path / "model.onnx")
    if base is not None:
        module = unpacked(module, model, base)
    follow(
        module, model, tmp_path / "package", SPECS["lora"], LOSS, llama.batch(),
        base=base, loss_options={"words": 8},
    )  # fmt: skip


@needs_peft
@pytest.mark.parametrize("symmetric", [True, False])
def test_of_an_exported_decoder(symmetric: bool, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    module = genai.decoder(model, symmetric=symmetric)
    spec = AdapterSpec("lora", ("*.v_proj", "*.down_proj"), (), 3, 5.0)
    options = {"words": 9}
    follow(module, model, tmp_path / "package", spec, LOSS, llama.batch(), loss_options=options)
    graph = onnx.load(tmp_path / "package" / "training_model.onnx").graph
    heads = [each.dims for each in graph.initializer if "lm_head" in each.name]
    assert all(rows < llama.VOCABULARY for rows, _ in heads)


def test_the_matrix_must_be_frozen(llama_file: Path, tmp_path: Path) -> None:
    head = find_layers(load_model(llama_file).graph)[-1]
    assert head.outputs == llama.VOCABULARY
    for more, code in (
        ({}, "trained-and-frozen"),
        ({"adapter": AdapterSpec("dora", (head.name,))}, "head-not-found"),
        ({"adapter": SPECS["ia3"], "train": (str(head.source.name),)}, "trained-and-frozen"),
    ):
        with pytest.raises(OdtpackError) as caught:
            build_package(
                llama_file, tmp_path, loss="next_token", loss_options={"words": 8}, **more
            )
        assert caught.value.code == code


@needs_peft
@pytest.mark.parametrize("base", [None, "int8", "int4"])
def test_adapter_on_the_embedding_of_a_tied_model(
    base: Any, llama_file: Path, tmp_path: Path
) -> None:
    """It is on the look-up, as in PEFT, and not on the product with the same table."""
    module = llama.llama() if base is None else unpacked(llama.llama(), llama_file, base)
    spec = AdapterSpec("lora", ("embed_tokens", "*.q_proj"), (), 3, 5.0)
    follow(module, llama_file, tmp_path, spec, LOSS, llama.batch(), base=base)


@needs_peft
def test_adapter_on_an_embedding_of_few_bits(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    module = genai.decoder(model, symmetric=False, tables=True)
    spec = AdapterSpec("lora", ("model.embed_tokens", "*.v_proj"), (), 3, 5.0)
    follow(module, model, tmp_path / "package", spec, LOSS, llama.batch())
