"""Ten steps of AdamW on an adapter agree with PEFT on PyTorch, which runs in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from odtpack import optimizers
from odtpack.adapters import AdapterSpec
from odtpack.adapters.layers import find_layers
from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack.model.shared_tensors import weight_array
from odtpack.quantized import quantize_base
from tests.adapters import llama
from tests.adapters.conftest import needs_peft
from tests.packaging_tools import open_training

STEPS, EPSILON = 10, 1e-3
RATES = {"lora": 0.01, "dora": 0.01, "ia3": 0.05}
RANK, ALPHA = 3, 5.0

Loss = Callable[[Tensor, Tensor], Tensor]


def config(spec: AdapterSpec, names: list[str]) -> Any:
    """The same adapter as PEFT configures it."""
    import peft

    if spec.kind == "ia3":
        feedforward = [name for name in names if name.endswith("down_proj")]
        return peft.IA3Config(target_modules=names, feedforward_modules=feedforward)
    return peft.LoraConfig(
        r=spec.rank, lora_alpha=spec.alpha, target_modules=names, use_dora=spec.kind == "dora"
    )


def follow(
    module: nn.Module,
    model: Path,
    folder: Path,
    spec: AdapterSpec,
    loss: tuple[str, Loss],
    data: tuple[np.ndarray, ...] | dict[str, np.ndarray],
    share: float = 3e-4,
    **build: Any,
) -> float:
    """Losses, and every parameter of the adapter after every step, agree with PEFT's.

    Data by name may have more than the model takes. Returns the largest share of the way that a
    parameter went by which it is off; at most the one that is given.
    """
    import peft

    manifest = build_package(
        model, folder, loss=loss[0], optimizer=optimizers.AdamW(
            epsilon=EPSILON, weight_decay=0.01, formula="pytorch"
        ),
        adapter=spec, **build,
    )  # fmt: skip
    assert manifest.adapter is not None
    theirs = peft.get_peft_model(copy.deepcopy(module), config(spec, list(manifest.adapter.layers)))
    state, trainer, optimizer = open_training(folder)
    start = {n: p.data.copy() for n, p in state.parameters if p.requires_grad}
    assert set(start) == set(manifest.adapter.parameters)
    loaded = {name: torch.from_numpy(value) for name, value in start.items()}
    outcome = peft.set_peft_model_state_dict(theirs, loaded)
    assert not outcome.unexpected_keys, outcome.unexpected_keys
    assert not [key for key in outcome.missing_keys if "lora" in key or "ia3" in key]
    theirs = theirs.double().eval()
    trained = [p for p in theirs.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(v.size for v in start.values())
    rate = RATES[spec.kind]
    torch_optimizer = torch.optim.AdamW(trained, rate, eps=EPSILON, weight_decay=0.01)
    optimizer.set_learning_rate(rate)
    taken = trainer.input_names()
    given, data = data, tuple(data[n] for n in taken) if isinstance(data, dict) else data
    tensors = [torch.from_numpy(each) for each in data]
    inputs = [t.double() if t.is_floating_point() else t for t in tensors[:-1]]
    by_name = dict(zip(taken, inputs, strict=False)) if isinstance(given, dict) else {}
    losses, worst = [], 0.0
    for _ in range(STEPS):
        ours = float(trainer(*data))
        torch_optimizer.zero_grad()
        expected = loss[1](theirs(**by_name) if by_name else theirs(*inputs), tensors[-1])
        expected.backward()
        torch_optimizer.step()
        optimizer.step()
        trainer.lazy_reset_grad()
        losses.append(expected.item())
        assert ours == pytest.approx(losses[-1], rel=share / 15), f"loss {ours}, {losses[-1]}"
        values = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
        for name, first in start.items():
            value = values[name].numpy()
            error = np.linalg.norm(state.parameters[name].data - value)
            way = np.linalg.norm(value - first)
            assert way > 0, name
            rounded = 1e-6 * np.linalg.norm(value) + 1e-7
            assert error < share * way + rounded, f"{name}: {error:.1e} of {way:.1e}"
            worst = max(worst, share * float(error / (share * way + rounded)))
    assert losses[-1] < 0.97 * losses[0]  # ten steps that change nothing would agree too
    return worst


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits[:, :-1].reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(rows, labels[:, 1:].reshape(-1))


SPECS = {
    "lora": AdapterSpec("lora", tuple(f"*.{name}" for name in llama.LINEARS), (), RANK, ALPHA),
    "dora": AdapterSpec("dora", tuple(f"*.{name}" for name in llama.LINEARS), (), RANK, ALPHA),
    "ia3": AdapterSpec("ia3", ("*.k_proj", "*.v_proj", "*.down_proj"), ("*.down_proj",)),
}


def unpacked(module: nn.Module, model: Path, base: Any) -> nn.Module:
    """The module with the weights that a base of few bits stands for, by onnx.reference."""
    loaded = quantize_base(load_model(model), base)
    count = 0
    for layer in find_layers(loaded.graph):
        use = layer.uses[0]
        if use.weight is layer.source:
            continue
        array = weight_array(use.weight)
        weight = module.get_submodule(layer.name).weight
        found = torch.from_numpy(array if use.outputs_first else array.T.copy())
        error = (found - weight).abs().max() / weight.abs().max()
        assert 0 < error < {"int8": 0.005, "int4": 0.13, "nf4": 0.16}[base]
        with torch.no_grad():
            weight.copy_(found)
        count += 1
    stored = loaded.graph.initializers
    table = module.get_submodule("embed_tokens").weight
    if "embed_tokens.weight_quantized" in stored and count:
        codes, scales = (
            stored[f"embed_tokens.weight_{each}"].const_value.numpy()
            for each in ("quantized", "scale")
        )
        with torch.no_grad():
            table.copy_(torch.from_numpy(codes * scales[:, None]))
    assert count > 10
    return module


@needs_peft
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("base", ["int8", "int4", "nf4"])
def test_a_base_of_few_bits(kind: str, base: Any, llama_file: Path, tmp_path: Path) -> None:
    loss = ("next_token", next_token)
    module = unpacked(llama.llama(), llama_file, base)
    follow(module, llama_file, tmp_path, SPECS[kind], loss, llama.batch(), base=base)


@needs_peft
@pytest.mark.parametrize("kind", SPECS)
def test_a_language_model(kind: str, llama_file: Path, tmp_path: Path) -> None:
    loss = ("next_token", next_token)
    follow(llama.llama(), llama_file, tmp_path, SPECS[kind], loss, llama.batch())
