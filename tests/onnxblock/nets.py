"""Forward models for block tests, and ways to run what blocks make of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from odtpack import onnxblock
from tests import model_text
from tests.model_text import parsed

RESET = "lazy_reset_grad"


def mlp(sizes: tuple[int, int, int] = (12, 8, 5), outputs: int = 1) -> onnx.ModelProto:
    """fc1, Relu, and as many heads fc2, fc3, ... as there are outputs."""
    layers = {"fc1": sizes[:2]} | {f"fc{i}": sizes[1:] for i in range(2, 2 + outputs)}
    random = np.random.default_rng(0)
    values = {}
    for layer, (inside, outside) in layers.items():
        values[f"{layer}.weight"] = random.standard_normal((outside, inside)) / np.sqrt(inside)
        values[f"{layer}.bias"] = random.standard_normal(outside) / 4
    gemm = '{} = Gemm <transB = 1> ({}, "{}.weight", "{}.bias")'
    ends = [(f'"output-{i}"', "r", f"fc{i + 2}", f"fc{i + 2}") for i in range(outputs)]
    nodes = [gemm.format("hidden", '"input-0"', "fc1", "fc1"), "r = Relu(hidden)"]
    nodes += [gemm.format(*end) for end in ends]
    declared = ", ".join(f"float[batch, {sizes[2]}] {end[0]}" for end in ends)
    text = f'mlp (float[batch, {sizes[0]}] "input-0") => ({declared}) {{ {" ".join(nodes)} }}'
    return parsed(text, **{name: np.float32(value) for name, value in values.items()})


def names(model: onnx.ModelProto) -> list[str]:
    """Names of the initializers."""
    return [tensor.name for tensor in model.graph.initializer]


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Initializers by name."""
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


class Twin(nn.Module):
    """The same in PyTorch, in float64."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        tensors = {n: torch.from_numpy(v.copy()).double() for n, v in values(model).items()}
        self.p = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(tensor) for name, tensor in tensors.items()}
        )
        self.heads = len(model.graph.output)

    def forward(self, x: torch.Tensor) -> Any:
        r = torch.relu(x @ self.p["fc1_weight"].T + self.p["fc1_bias"])
        found = [
            r @ self.p[f"fc{i}_weight"].T + self.p[f"fc{i}_bias"] for i in range(2, 2 + self.heads)
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def gradients(self) -> dict[str, np.ndarray]:
        return {
            name.replace("_", ".", 1): p.grad.numpy()
            for name, p in self.p.items()
            if p.grad is not None
        }


def run(model, feeds, optimized=True):
    """Outputs by name. Gradient buffers start at zero and are replaced."""
    given = dict(feeds)
    for node in model.graph.input:
        if node.name.endswith("_grad.accumulation.buffer"):
            owner = node.name.removesuffix("_grad.accumulation.buffer")
            given[node.name] = np.zeros_like(given[owner])
        if node.name == RESET:
            given[RESET] = np.ones(1, np.bool_)
    return model_text.run(model, given, "all" if optimized else "off")


def batch(model: onnx.ModelProto, size: int = 7) -> np.ndarray:
    width = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    return np.random.default_rng(5).standard_normal((size, width), dtype=np.float32)


def built(block: Any, *given: Any, on: onnx.ModelProto | int = 17) -> Any:
    """What a block writes into a model, or into an empty one of an opset."""
    with onnxblock.empty_base(on) if isinstance(on, int) else onnxblock.base(on):
        block(*given)
    return block.to_model_proto()


class Call:
    """A block whose graph is what another block writes."""

    def __init__(self, block: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block

    def build(self, *names: str) -> Any:
        return self.block(*names)


class Forward(Call, onnxblock.ForwardBlock):
    """A forward block of any block."""


class Train(Call, onnxblock.TrainingBlock):
    """A training block of any loss."""
