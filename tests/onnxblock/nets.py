"""Forward models for block tests, and ways to run what blocks make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import nn

RESET = "lazy_reset_grad"


def mlp(sizes: tuple[int, int, int] = (12, 8, 5), outputs: int = 1) -> onnx.ModelProto:
    """fc1, Relu, and as many heads fc2, fc3, ... as there are outputs."""
    layers = {"fc1": sizes[:2]} | {f"fc{i}": sizes[1:] for i in range(2, 2 + outputs)}
    random = np.random.default_rng(0)
    tensors = []
    for layer, (inside, outside) in layers.items():
        weight = random.standard_normal((outside, inside)) / np.sqrt(inside)
        bias = random.standard_normal(outside) / 4
        for part, array in (("weight", weight), ("bias", bias)):
            name = f"{layer}.{part}"
            tensors.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))

    def gemm(x: str, layer: str, y: str) -> onnx.NodeProto:
        inputs = [x, f"{layer}.weight", f"{layer}.bias"]
        return helper.make_node("Gemm", inputs, [y], transB=1)

    ends = [f"output-{i}" for i in range(outputs)]
    nodes = [gemm("input-0", "fc1", "hidden"), helper.make_node("Relu", ["hidden"], ["r"])]
    nodes += [gemm("r", layer, end) for layer, end in zip([*layers][1:], ends, strict=True)]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("input-0", TensorProto.FLOAT, ["batch", sizes[0]])],
        [
            helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", sizes[2]])
            for end in ends
        ],
        tensors,
    )
    return model_of(graph)


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    """A model of opset 17."""
    opset = [helper.make_opsetid("", 17)]
    return onnx.ModelProto(ir_version=8, graph=graph, opset_import=opset)


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


def session(model: onnx.ModelProto, optimized: bool = True) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = (
        levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    )
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], optimized: bool = True
) -> dict[str, np.ndarray]:
    """Outputs by name. Gradient buffers start at zero and are replaced."""
    opened = session(model, optimized)
    given = dict(feeds)
    for node in opened.get_inputs():
        if node.name.endswith("_grad.accumulation.buffer"):
            owner = node.name.removesuffix("_grad.accumulation.buffer")
            given[node.name] = np.zeros_like(given[owner])
        if node.name == RESET:
            given[RESET] = np.ones(1, np.bool_)
    outputs = [node.name for node in opened.get_outputs()]
    return dict(zip(outputs, opened.run(outputs, given), strict=True))


def batch(model: onnx.ModelProto, size: int = 7) -> np.ndarray:
    width = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    return np.random.default_rng(5).standard_normal((size, width), dtype=np.float32)
