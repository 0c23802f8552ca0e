"""Federated averaging in one process: three phones train, a server averages.

Each client holds its own copy of the package's state and its own data. Only the flat
vector of trainable parameters crosses between them.

    python examples/federated_average.py [WORKING_FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx.numpy_helper
import onnx.parser

from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Module, Optimizer

CLIENTS, ROUNDS, STEPS = 3, 5, 10


def network() -> onnx.ModelProto:
    """A network with one hidden layer, for images [batch, 1, 8, 8] of eight classes."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        network (float[batch, 1, 8, 8] input) => (float[batch, 8] output) {
            pixels = Flatten(input)
            before = Gemm(pixels, fc1_weight, fc1_bias)
            hidden = Relu(before)
            output = Gemm(hidden, fc2_weight, fc2_bias)
        }""")
    random = np.random.default_rng(0)
    for name, shape in {"fc1": (64, 32), "fc2": (32, 8)}.items():
        weight = random.normal(0, (2 / shape[0]) ** 0.5, shape).astype(np.float32)
        for suffix, values in (("weight", weight), ("bias", np.zeros(shape[1], np.float32))):
            tensor = onnx.numpy_helper.from_array(values, f"{name}_{suffix}")
            model.graph.initializer.append(tensor)
    return model


def client_data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images whose brightest row is the class, 64 of them, [64, 1, 8, 8] and [64]."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 8, 64)
    images = random.random((64, 1, 8, 8), np.float32) * 0.5
    images[np.arange(64), 0, labels] += 1
    return images, labels


def main(folder: Path) -> float:
    """Run the rounds; return the mean loss over clients after the last."""
    build_package(network(), folder, loss="cross_entropy", optimizer="sgd")
    modules = []
    for _ in range(CLIENTS):
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        modules.append(Module(folder / "training_model.onnx", state, folder / "eval_model.onnx"))
    optimizers = [Optimizer(folder / "optimizer_model.onnx", module) for module in modules]
    for round_number in range(1, ROUNDS + 1):
        for client, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            images, labels = client_data(client)
            optimizer.set_learning_rate(0.1)
            module.train()
            for _ in range(STEPS):
                module(images, labels)
                optimizer.step()
                module.lazy_reset_grad()
        vectors = [m.get_contiguous_parameters(trainable_only=True).numpy() for m in modules]
        average = np.mean(vectors, axis=0, dtype=np.float32)
        for module in modules:
            module.copy_buffer_to_parameters(average, trainable_only=True)
        losses = [m.eval()(*client_data(100 + i))[0] for i, m in enumerate(modules)]
        loss = float(np.mean(losses))
        print(f"round {round_number}: held-out loss {loss:.3f}")
    return loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch))
